#include "cpu/thread_pool.h"

#include <sched.h>

namespace headrace {

namespace {

constexpr int spins_before_yield = 2000; // about 30 us, longer than most gaps between phases

// Waits a moment. The yield gives the core to any other runnable thread. A spin that never yields
// collapses as soon as there are more running threads than cores.
class Backoff {
public:
    void pause() {
        if (++spins_ < spins_before_yield) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        } else {
            sched_yield();
        }
    }
    void reset() { spins_ = 0; }

private:
    int spins_ = 0;
};

} // namespace

ThreadPool::ThreadPool(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) {
        workers_.emplace_back([this, thread] { work(thread); });
    }
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (auto &worker : workers_) {
        worker.join();
    }
}

void ThreadPool::begin_step() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        in_step_.store(true);
    }
    wake_.notify_all();
    clock.begin_step();
}

void ThreadPool::end_step() {
    clock.end_step();
    in_step_.store(false);
}

void ThreadPool::publish(int num_tasks, Invoke invoke, const void *body) {
    // Nothing is left to claim here, so no worker can act on a half-written description.
    num_finished_.store(0, std::memory_order_relaxed);
    invoke_.store(invoke, std::memory_order_relaxed);
    body_.store(body, std::memory_order_relaxed);
    const Ticket last{ticket_.load(std::memory_order_relaxed)};
    ticket_.store(Ticket::of(last.phase() + 1, num_tasks).bits, std::memory_order_release);
    while (claim_and_run(0)) {
    }
    const StepPart part = clock.enter(StepPart::waiting);
    Backoff backoff;
    while (num_finished_.load(std::memory_order_acquire) != num_tasks) {
        backoff.pause();
    }
    clock.enter(part);
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
            num_finished_.fetch_add(1, std::memory_order_acq_rel);
            return true;
        }
    }
    return false;
}

void ThreadPool::work(int thread) {
    while (true) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [this] { return stopping_ || in_step_.load(); });
            if (stopping_) {
                return;
            }
        }
        Backoff backoff;
        while (in_step_.load(std::memory_order_relaxed)) {
            if (claim_and_run(thread)) {
                backoff.reset();
            } else {
                backoff.pause();
            }
        }
    }
}

} // namespace headrace
