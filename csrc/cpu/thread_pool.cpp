#include "cpu/thread_pool.h"

#include "futex.h"

#include <chrono>
#include <sched.h>

namespace headrace {

namespace {

constexpr int spins_before_yield = 2000; // about 30 us, longer than most gaps between phases
constexpr auto yield_time = std::chrono::microseconds(150); // several times what a sleep costs

// Waits a moment. The yield gives the core to any other runnable thread. A spin that never yields
// collapses as soon as there are more running threads than cores.
class Backoff {
public:
    // Returns false, without a wait, once it is time to sleep.
    bool pause() {
        if (++spins_ < spins_before_yield) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            return true;
        }
        const auto now = std::chrono::steady_clock::now();
        if (spins_ == spins_before_yield) {
            yields_end_ = now + yield_time;
        } else if (now >= yields_end_) {
            return false;
        }
        sched_yield();
        return true;
    }
    void reset() { spins_ = 0; }

private:
    int spins_ = 0;
    std::chrono::steady_clock::time_point yields_end_;
};

} // namespace

// A thread counts itself, then has the system compare the word. The waker changes the word, then
// looks for sleepers. All of this is sequentially consistent: one of the two sees the other.
void ThreadPool::Sleepers::sleep(const void *word, uint32_t seen) {
    num_.fetch_add(1, std::memory_order_seq_cst);
    sleep_while(word, seen);
    num_.fetch_sub(1, std::memory_order_relaxed);
}

void ThreadPool::Sleepers::wake(const void *word) {
    if (num_.load(std::memory_order_seq_cst) != 0) {
        wake_all(word);
    }
}

ThreadPool::ThreadPool(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) {
        workers_.emplace_back([this, thread] { work(thread); });
    }
}

ThreadPool::~ThreadPool() {
    stopping_.store(true, std::memory_order_relaxed);
    open_phase(0);
    for (auto &worker : workers_) {
        worker.join();
    }
}

// The workers have no task yet, but they are awake for the first one.
void ThreadPool::begin_step() {
    in_step_.store(true, std::memory_order_relaxed);
    open_phase(0);
    clock.begin_step();
}

void ThreadPool::end_step() {
    clock.end_step();
    in_step_.store(false, std::memory_order_relaxed);
}

// A thread that sees the phase sees what was stored before it.
void ThreadPool::open_phase(int num_tasks) {
    const Ticket last{ticket_.load(std::memory_order_relaxed)};
    ticket_.store(Ticket::of(last.phase() + 1, num_tasks).bits, std::memory_order_seq_cst);
    idle_.wake(phase_word());
}

void ThreadPool::publish(int num_tasks, Invoke invoke, const void *body) {
    // Nothing is left to claim here, so no worker can act on a half-written description.
    num_finished_.store(0, std::memory_order_relaxed);
    invoke_.store(invoke, std::memory_order_relaxed);
    body_.store(body, std::memory_order_relaxed);
    open_phase(num_tasks);
    while (claim_and_run(0)) {
    }
    const StepPart part = clock.enter(StepPart::waiting);
    await_tasks(num_tasks);
    clock.enter(part);
}

void ThreadPool::await_tasks(int num_tasks) {
    Backoff backoff;
    while (true) {
        const uint32_t num_finished = num_finished_.load(std::memory_order_acquire);
        if (num_finished == uint32_t(num_tasks)) {
            return;
        }
        if (!backoff.pause()) {
            caller_.sleep(&num_finished_, num_finished);
        }
    }
}

bool ThreadPool::claim_and_run(int thread) {
    const bool from_last = descends(thread);
    Ticket ticket{ticket_.load(std::memory_order_acquire)};
    while (ticket.first() != ticket.end()) {
        const Invoke invoke = invoke_.load(std::memory_order_relaxed);
        const void *body = body_.load(std::memory_order_relaxed);
        const Ticket rest = from_last ? ticket.without_last() : ticket.without_first();
        if (ticket_.compare_exchange_weak(ticket.bits, rest.bits, std::memory_order_acq_rel)) {
            invoke(body, from_last ? rest.end() : ticket.first(), thread);
            num_finished_.fetch_add(1, std::memory_order_seq_cst);
            caller_.wake(&num_finished_);
            return true;
        }
    }
    return false;
}

void ThreadPool::work(int thread) {
    Backoff backoff;
    while (true) {
        const Ticket last{ticket_.load(std::memory_order_acquire)};
        if (stopping_.load(std::memory_order_relaxed)) {
            return;
        }
        if (claim_and_run(thread)) {
            backoff.reset();
        } else if (!in_step_.load(std::memory_order_relaxed) || !backoff.pause()) {
            idle_.sleep(phase_word(), uint32_t(last.phase()));
            backoff.reset();
        }
    }
}

} // namespace headrace
