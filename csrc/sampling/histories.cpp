#include "sampling/histories.h"

namespace headrace {

namespace {

constexpr int32_t max_slots = 1 << 20; // more than sequences can run at once

} // namespace

bool Histories::update(const HistoryUpdate *updates, int32_t num_updates, const int32_t *tokens,
                       int64_t num_tokens) {
    for (int32_t i = 0; i < num_updates; ++i) {
        const auto [slot, start, count] = updates[i];
        if (slot < 0 || slot >= max_slots || count < 0 || count > num_tokens ||
            !have(slot, start)) {
            return false;
        }
        if (size_t(slot) >= slots_.size()) {
            slots_.resize(size_t(slot) + 1);
        }
        std::vector<int32_t> &own = slots_[size_t(slot)];
        if (start == 0) { // another sequence's: it may be much shorter
            own = std::vector<int32_t>(tokens, tokens + count);
        } else {
            own.resize(size_t(start));
            own.insert(own.end(), tokens, tokens + count);
        }
        tokens += count;
        num_tokens -= count;
    }
    return num_tokens == 0;
}

bool Histories::have(int32_t slot, int32_t count) const {
    if (count <= 0) {
        return count == 0;
    }
    return slot >= 0 && size_t(slot) < slots_.size() &&
           size_t(count) <= slots_[size_t(slot)].size();
}

} // namespace headrace
