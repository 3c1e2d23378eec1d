// The workers that have the other shares of a model, which sum and gather what each has computed.
#pragma once
#include <cstddef>
#include <vector>

namespace headrace {

class ShmAllReduce;

struct PeerLost {}; // thrown: one of them has ended, or the group was aborted: the group has which

struct Peers {
    ShmAllReduce *group = nullptr; // null: there are none
    int rank = 0;
    std::vector<int> first_tokens{0};    // of the vocabulary, by rank; then how many there are
    int num_heads = 0, num_kv_heads = 0; // of all together
    bool owns_keys = true;               // those of this worker are not another's, too

    bool alone() const { return group == nullptr; }
    int num_ranks() const { return int(first_tokens.size()) - 1; }
    int num_tokens() const { return first_tokens.back(); }
    int first_token() const { return first_tokens[rank]; }
    int num_tokens_of(int other) const { return first_tokens[other + 1] - first_tokens[other]; }
    int max_tokens() const; // that any of them has

    // Replace numbers by their sum over all workers, the same bits everywhere.
    void sum(float *numbers, size_t n) const;
    // Fill `all` with the `n` numbers of each worker, by rank.
    void gather(const float *numbers, size_t n, float *all) const;
};

} // namespace headrace
