#include "cpu/peers.h"
#include "collectives/shm_all_reduce.h"

#include <algorithm>

namespace headrace {

namespace {

void check(Verdict verdict) {
    if (!verdict.ok()) {
        throw PeerLost();
    }
}

} // namespace

int Peers::max_tokens() const {
    int most = 0;
    for (int other = 0; other < num_ranks(); ++other) {
        most = std::max(most, num_tokens_of(other));
    }
    return most;
}

void Peers::sum(float *numbers, size_t n) const {
    if (!alone()) {
        check(group->all_reduce(numbers, n));
    }
}

void Peers::gather(const float *numbers, size_t n, float *all) const {
    check(group->all_gather(numbers, all, n * sizeof(float)));
}

} // namespace headrace
