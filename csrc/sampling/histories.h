// What penalties look at: the tokens of sequences, in slots that stay from step to step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace headrace {

// Tokens to be put into a slot, at one of its places or right behind its last; what was there goes.
struct HistoryUpdate { // worker_messages.Step.history_updates
    int32_t slot, start, count;
};

class Histories {
public:
    // Whether each update has a slot and leaves no gap, and all together have `num_tokens`.
    // Otherwise only some of them are made. Slots come to be as they are named.
    bool update(const HistoryUpdate *updates, int32_t num_updates, const int32_t *tokens,
                int64_t num_tokens);

    // Whether a slot has so many tokens.
    bool have(int32_t slot, int32_t count) const;

    const int32_t *tokens_of(int32_t slot) const { return slots_[size_t(slot)].data(); }

private:
    std::vector<std::vector<int32_t>> slots_;
};

} // namespace headrace
