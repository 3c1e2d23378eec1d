// Collectives of ranks on one machine, through shared memory.
//
// A sum adds the ranks' numbers in the order of the ranks, in fp32, and rounds once. It has the
// same bits on every rank and instruction set, whatever its size. A NaN is 0x7fc00000, or what that
// is in 16 bits.
//
// One thread of a rank at a time. All ranks call the same collectives in the same order, each with
// the same sizes; one that does not gets and causes a mismatch. Nothing is thrown, and no call
// waits for ever: see shm_group.h. After a failure the contents of `data` and `out` are undefined.
#pragma once
#include "collectives/rank_sums.h"
#include "collectives/shm_group.h"

namespace headrace {

class ShmAllReduce {
public:
    // As ShmGroup::create and ShmGroup::join. `isa` is for tests of the paths; all give equal bits.
    static int create(int num_ranks, size_t half_bytes = default_half_bytes);
    static std::unique_ptr<ShmAllReduce> join(int fd, int rank, int num_ranks, int &error,
                                              Isa isa = Isa::best, char *shared = nullptr);

    ShmGroup &group() { return *group_; }

    // In place, `n` numbers.
    Verdict all_reduce(void *data, size_t n, Number);
    Verdict all_reduce(float *data, size_t n) { return all_reduce(data, n, Number::fp32); }

    // `out` has room for `bytes` from every rank. `in` may be this rank's own part of it.
    Verdict all_gather(const void *in, void *out, size_t bytes);

    Verdict broadcast(void *data, size_t bytes, int root);

private:
    struct Chunk;

    ShmAllReduce(std::unique_ptr<ShmGroup> group, const RankSums &sums)
        : group_(std::move(group)), sums_(sums) {}

    Verdict add_all(char *data, size_t bytes, Number, uint64_t meta);
    Verdict add_shares(char *data, size_t bytes, Number, uint64_t meta);

    std::unique_ptr<ShmGroup> group_;
    const RankSums &sums_;
};

} // namespace headrace
