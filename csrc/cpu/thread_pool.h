// Threads that run one step after another, each step a sequence of short parallel phases.
//
// Inside a step a phase lasts 20 to 500 us, so waiting threads spin, then yield. A thread that
// waits longer sleeps: on shared cores another one needs the time. Between steps workers sleep.
// Tasks are claimed one by one, and finished tasks are counted, not arrived threads. A worker that
// the system has descheduled holds up nothing but the task it is in. Every other thread claims from
// the last task on. Where tasks are rows in their order, most rows meet in each phase the core that
// has them in its cache.
#pragma once
#include "cpu/step_clock.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace headrace {

class ThreadPool {
public:
    explicit ThreadPool(int num_threads); // the caller of `run` is one of them
    ~ThreadPool();

    int num_threads() const { return int(workers_.size()) + 1; }
    // Whether a thread claims from the last task on.
    static constexpr bool descends(int thread) { return thread % 2 != 0; }

    StepClock clock;

    // The workers are awake while one of these lives: around a step.
    class Awake {
    public:
        explicit Awake(ThreadPool &pool) : pool_(pool) { pool_.begin_step(); }
        ~Awake() { pool_.end_step(); }

    private:
        ThreadPool &pool_;
    };

    // Call body(task, thread) for every task in [0, num_tasks); returns when all have finished.
    template <class Body> void run(int num_tasks, const Body &body) {
        if (num_tasks <= 1 || workers_.empty()) {
            for (int task = 0; task < num_tasks; ++task) {
                body(task, 0);
            }
            return;
        }
        for (int first = 0; first < num_tasks; first += max_tasks) {
            const auto part = [&](int task, int thread) { body(first + task, thread); };
            publish(
                std::min(max_tasks, num_tasks - first),
                [](const void *self, int task, int thread) {
                    (*static_cast<decltype(part) *>(self))(task, thread);
                },
                &part);
        }
    }

private:
    static constexpr int task_bits = 16, max_tasks = (1 << task_bits) - 1;

    using Invoke = void (*)(const void *body, int task, int thread);

    void begin_step();
    void end_step();
    void publish(int num_tasks, Invoke invoke, const void *body);
    void open_phase(int num_tasks);
    void await_tasks(int num_tasks);
    bool claim_and_run(int thread); // false: nothing was left to claim
    void work(int thread);

    // Threads that sleep until a word changes. Where there are none, `wake` is no system call.
    class Sleepers {
    public:
        void sleep(const void *word, uint32_t seen); // returns at times before the word changes
        void wake(const void *word);                 // which has changed, in sequential consistency

    private:
        std::atomic<int> num_{0};
    };

    // What is left to claim of which phase. A claim is one compare-and-swap of all three, so a late
    // worker cannot take a task of a phase it did not read.
    struct Ticket {
        uint64_t bits;

        static Ticket of(uint64_t phase, int num_tasks) {
            return {phase << 2 * task_bits | uint64_t(num_tasks)};
        }
        uint64_t phase() const { return bits >> 2 * task_bits; }
        int first() const { return int(bits >> task_bits & max_tasks); }
        int end() const { return int(bits & max_tasks); }
        Ticket without_first() const { return {bits + (uint64_t(1) << task_bits)}; }
        Ticket without_last() const { return {bits - 1}; }
    };

    // Workers sleep on the phase, the upper half of the ticket.
    static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
    const void *phase_word() const { return reinterpret_cast<const uint32_t *>(&ticket_) + 1; }

    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> num_finished_{0};
    Sleepers caller_; // until tasks are finished
    alignas(64) std::atomic<Invoke> invoke_{nullptr};
    std::atomic<const void *> body_{nullptr};
    Sleepers idle_; // workers, until the next phase

    std::atomic<bool> in_step_{false};
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> workers_;
};

} // namespace headrace
