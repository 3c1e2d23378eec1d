// futex: publish a 32-bit word in shared memory and wait for it to change.
//   The word is a message counter of a step channel; writer and reader are different processes.
//   A waiter may first look for a while: a futex round trip costs tens of microseconds on a virtual
//   machine. It yields between looks, so that with too few cores the other side gets to run.

#include "futex.h"

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

int64_t now_us() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t(1000000) + now.tv_nsec / 1000;
}

std::atomic<uint32_t> *word_at(void *address) {
    return reinterpret_cast<std::atomic<uint32_t> *>(address);
}

static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

} // namespace

namespace headrace {

void sleep_while(const void *word, uint32_t seen, int64_t timeout_us) {
    const timespec timeout = {timeout_us / 1000000, timeout_us % 1000000 * 1000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, timeout_us < 0 ? nullptr : &timeout, nullptr, 0);
}

void wake_all(const void *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

} // namespace headrace

extern "C" {

// Store `value` and wake all threads that wait for it. They see all writes made before.
void headrace_publish(void *address, uint32_t value) {
    word_at(address)->store(value, std::memory_order_seq_cst);
    headrace::wake_all(address);
}

uint32_t headrace_load(void *address) {
    return word_at(address)->load(std::memory_order_acquire);
}

// Wait until the word differs from `seen`: `look_us` awake, then at most `timeout_us` asleep.
// Return its value, `seen` on timeout or a signal.
uint32_t headrace_wait(void *address, uint32_t seen, int64_t look_us, int64_t timeout_us) {
    const int64_t end = now_us() + look_us;
    while (headrace_load(address) == seen && now_us() < end)
        sched_yield();
    if (headrace_load(address) == seen)
        headrace::sleep_while(address, seen, timeout_us);
    return headrace_load(address);
}
}
