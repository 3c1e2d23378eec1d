// Sleep until a 32-bit word changes, in memory of this process or shared with others.
#pragma once
#include <cstdint>

namespace headrace {

// Sleep while the word has the value `seen`, for `timeout_us` at most; without end by default.
// Returns before that after a signal.
void sleep_while(const void *word, uint32_t seen, int64_t timeout_us = -1);

// Wake all threads that sleep on the word.
void wake_all(const void *word);

} // namespace headrace
