// futex: publish a 32-bit word in shared memory and wait for it to change.
//   The word is a message counter of a step channel; writer and reader are different processes.
//   A waiter first spins: between two steps of a busy engine the answer comes within
//   microseconds, and a futex round trip costs tens of them on a virtual machine. It spins for a
//   bounded time only, so that on a machine with too few cores the other side gets to run.

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

std::atomic<uint32_t> *word_at(void *address) {
    return reinterpret_cast<std::atomic<uint32_t> *>(address);
}

static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

} // namespace

extern "C" {

// Store `value` and wake whoever waits for it. What was written before is visible to them.
void headrace_publish(void *address, uint32_t value) {
    word_at(address)->store(value, std::memory_order_seq_cst);
    syscall(SYS_futex, address, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t headrace_load(void *address) {
    return word_at(address)->load(std::memory_order_acquire);
}

// Wait until the word differs from `seen`, at most `timeout_us`; return its value, `seen` on
// timeout or a signal.
uint32_t headrace_wait(void *address, uint32_t seen, uint32_t yields, int64_t timeout_us) {
    for (uint32_t i = 0; i < yields; i++) {
        if (headrace_load(address) != seen)
            return headrace_load(address);
        sched_yield();
    }
    timespec timeout = {timeout_us / 1000000, timeout_us % 1000000 * 1000};
    if (headrace_load(address) == seen)
        syscall(SYS_futex, address, FUTEX_WAIT, seen, &timeout, nullptr, 0);
    return headrace_load(address);
}
}
