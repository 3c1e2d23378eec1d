// A sequence's id is its request's, and its number in the request in the lowest bits (messages.py).
#pragma once
#include <cstdint>

namespace headrace {

constexpr int SEQUENCE_BITS = 16;
constexpr uint64_t INDEX_MASK = (uint64_t(1) << SEQUENCE_BITS) - 1;

} // namespace headrace
