// thread_pool_threads: csrc/cpu/thread_pool.cpp, with threads that sleep amid a step.
//   Makes a number of steps of random phases, in which tasks and the caller stall at times, for
//   longer than threads are patient. Every task has to run once in its phase. Then it stalls alone
//   and says how much processor time the waiting threads took. Usage: thread_pool_threads THREADS
//   STEPS

#include "cpu/thread_pool.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <vector>

namespace {

constexpr int most_tasks = 40;
constexpr int stall_us = 400, long_stall_us = 100'000;

void stall(int us) {
    const timespec time = {0, us * 1000L};
    nanosleep(&time, nullptr);
}

// Returns whether every task has run once in each phase of a step.
bool is_right(headrace::ThreadPool &pool, std::mt19937 &random) {
    headrace::ThreadPool::Awake awake(pool);
    for (int phase = 0; phase < 10; ++phase) {
        const int num_tasks = int(random() % most_tasks);
        const int slow = random() % 4 == 0 ? int(random() % most_tasks) : -1;
        std::vector<int> runs(num_tasks); // not atomic: a race would show
        pool.run(num_tasks, [&](int task, int) {
            if (task == slow) {
                stall(stall_us);
            }
            ++runs[task];
        });
        for (const int count : runs) {
            if (count != 1) {
                return false;
            }
        }
        if (random() % 8 == 0) {
            stall(stall_us);
        }
    }
    return true;
}

double cpu_ms() {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec * 1e3 + time.tv_nsec / 1e6;
}

} // namespace

int main(int, char **arguments) {
    const int num_threads = std::atoi(arguments[1]), num_steps = std::atoi(arguments[2]);
    headrace::ThreadPool pool(num_threads);
    std::mt19937 random(1);
    int num_right = 0;
    for (int step = 0; step < num_steps; ++step) {
        num_right += is_right(pool, random);
    }
    const double start = cpu_ms();
    {
        headrace::ThreadPool::Awake awake(pool);
        pool.run(num_threads, [](int task, int) { stall(task == 0 ? long_stall_us : 1); });
        stall(long_stall_us);
    }
    std::printf("%d of %d steps are right\n%d ms of waiting\n", num_right, num_steps,
                int(cpu_ms() - start));
    return num_right == num_steps ? 0 : 1;
}
