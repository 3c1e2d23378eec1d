#include "collectives/shm_all_reduce.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

namespace headrace {

namespace {

enum class Collective : uint64_t { all_reduce = 1, all_gather, broadcast };

constexpr size_t slice_align = 64; // bytes
// Sums of this size over the number of ranks, or more, are shared out. That takes a round more, and
// saves reading what the others add up. Two ranks have nothing to gain.
constexpr size_t shared_from = size_t(64) << 10;

// What all ranks have to agree on, in a word. Sizes are below 2^48.
uint64_t meta_of(Collective collective, size_t size, int detail = 0) {
    return uint64_t(collective) << 60 | uint64_t(detail) << 48 | uint64_t(size);
}

} // namespace

// A part of a sum, cut into a slice per rank: the one that this rank adds up.
struct ShmAllReduce::Chunk {
    size_t first; // byte
    size_t bytes;
    size_t slice_bytes; // of all but the last slices

    Chunk(size_t first, size_t bytes, int num_ranks) : first(first), bytes(bytes) {
        const size_t share = (bytes + num_ranks - 1) / num_ranks;
        slice_bytes = (share + slice_align - 1) / slice_align * slice_align;
    }
    size_t begin(int rank) const { return std::min(rank * slice_bytes, bytes); }
    size_t size(int rank) const { return begin(rank + 1) - begin(rank); }
};

int ShmAllReduce::create(int num_ranks, size_t half_bytes) {
    return ShmGroup::create(num_ranks, half_bytes);
}

std::unique_ptr<ShmAllReduce> ShmAllReduce::join(int fd, int rank, int num_ranks, int &error,
                                                 Isa isa, char *shared) {
    const RankSums *sums = find_rank_sums(isa);
    if (!sums) {
        error = ENOTSUP;
        return nullptr;
    }
    auto group = ShmGroup::join(fd, rank, num_ranks, error, shared);
    if (!group) {
        return nullptr;
    }
    auto *collectives = new (std::nothrow) ShmAllReduce(std::move(group), *sums);
    error = collectives ? 0 : ENOMEM;
    return std::unique_ptr<ShmAllReduce>(collectives);
}

Verdict ShmAllReduce::all_reduce(void *data, size_t n, Number number) {
    if (group_->num_ranks() == 1) {
        return group_->verdict();
    }
    const uint64_t meta = meta_of(Collective::all_reduce, n, int(number));
    const size_t bytes = n * bytes_of(number);
    auto *numbers = static_cast<char *>(data);
    const bool shares = group_->num_ranks() > 2 && bytes >= shared_from / group_->num_ranks();
    return shares ? add_shares(numbers, bytes, number, meta)
                  : add_all(numbers, bytes, number, meta);
}

// A round per piece: every rank publishes and adds all of it.
Verdict ShmAllReduce::add_all(char *data, size_t bytes, Number number, uint64_t meta) {
    size_t first = 0;
    do {
        const size_t piece = std::min(group_->half_bytes(), bytes - first);
        std::memcpy(group_->own_half(), data + first, piece);
        const Verdict met = group_->meet(meta);
        if (!met.ok()) {
            return met;
        }
        const void *terms[max_ranks];
        for (int rank = 0; rank < group_->num_ranks(); ++rank) {
            terms[rank] = rank == group_->rank() ? data + first : group_->half_of(rank);
        }
        sums_.add(number, terms, group_->num_ranks(), piece / bytes_of(number), data + first);
        first += piece;
    } while (first < bytes);
    return {};
}

// A round per chunk and one more. In each, a rank publishes the slices of a chunk that the others
// add up. Behind them is its own slice of the chunk before, which is summed by then.
Verdict ShmAllReduce::add_shares(char *data, size_t bytes, Number number, uint64_t meta) {
    const int num_ranks = group_->num_ranks(), own = group_->rank();
    const size_t max_slice = group_->half_bytes() / (num_ranks + 1) / slice_align * slice_align;
    const size_t chunk_bytes = max_slice * num_ranks, sum_at = chunk_bytes;
    Chunk before(0, 0, num_ranks);
    for (size_t first = 0; first < bytes || before.bytes > 0;) {
        const Chunk chunk(first, std::min(chunk_bytes, bytes - first), num_ranks);
        for (int rank = 0; rank < num_ranks; ++rank) {
            if (rank != own) {
                std::memcpy(group_->own_half() + chunk.begin(rank),
                            data + first + chunk.begin(rank), chunk.size(rank));
            }
        }
        const Verdict met = group_->meet(meta);
        if (!met.ok()) {
            return met;
        }
        for (int rank = 0; rank < num_ranks; ++rank) {
            std::memcpy(data + before.first + before.begin(rank), group_->half_of(rank) + sum_at,
                        before.size(rank));
        }
        const void *terms[max_ranks];
        for (int rank = 0; rank < num_ranks; ++rank) {
            const char *whole = rank == own ? data + first : group_->half_of(rank);
            terms[rank] = whole + chunk.begin(own);
        }
        sums_.add(number, terms, num_ranks, chunk.size(own) / bytes_of(number),
                  group_->own_half() + sum_at);
        before = chunk;
        first += chunk.bytes;
    }
    return {};
}

Verdict ShmAllReduce::all_gather(const void *in, void *out, size_t bytes) {
    const uint64_t meta = meta_of(Collective::all_gather, bytes);
    size_t first = 0;
    do {
        const size_t piece = std::min(group_->half_bytes(), bytes - first);
        std::memcpy(group_->own_half(), static_cast<const char *>(in) + first, piece);
        const Verdict met = group_->meet(meta);
        if (!met.ok()) {
            return met;
        }
        for (int rank = 0; rank < group_->num_ranks(); ++rank) {
            std::memcpy(static_cast<char *>(out) + rank * bytes + first, group_->half_of(rank),
                        piece);
        }
        first += piece;
    } while (first < bytes);
    return {};
}

Verdict ShmAllReduce::broadcast(void *data, size_t bytes, int root) {
    const uint64_t meta = meta_of(Collective::broadcast, bytes, root);
    size_t first = 0;
    do {
        const size_t piece = std::min(group_->half_bytes(), bytes - first);
        char *part = static_cast<char *>(data) + first;
        if (group_->rank() == root) {
            std::memcpy(group_->own_half(), part, piece);
        }
        const Verdict met = group_->meet(meta);
        if (!met.ok()) {
            return met;
        }
        if (group_->rank() != root) {
            std::memcpy(part, group_->half_of(root), piece);
        }
        first += piece;
    } while (first < bytes);
    return {};
}

} // namespace headrace

using headrace::Isa;
using headrace::Number;
using headrace::Outcome;
using headrace::ShmAllReduce;

namespace {

ShmAllReduce &collectives_of(void *group) {
    return *static_cast<ShmAllReduce *>(group);
}

headrace::ShmGroup &group_of(void *group) {
    return collectives_of(group).group();
}

} // namespace

// The functions that shm_all_reduce.py calls through ctypes. Verdicts are packed.
extern "C" {

int32_t headrace_shm_create(int32_t num_ranks, uint64_t half_bytes) {
    return ShmAllReduce::create(num_ranks, half_bytes ? half_bytes : headrace::default_half_bytes);
}

void *headrace_shm_join(int32_t fd, int32_t rank, int32_t num_ranks, int32_t isa, int32_t *error) {
    return ShmAllReduce::join(fd, rank, num_ranks, *error, Isa(isa)).release();
}

void headrace_shm_leave(void *group) {
    delete &collectives_of(group);
}

uint32_t headrace_shm_all_reduce(void *group, void *data, uint64_t n, int32_t number) {
    return packed(collectives_of(group).all_reduce(data, n, Number(number)));
}

uint32_t headrace_shm_all_gather(void *group, const void *in, void *out, uint64_t bytes) {
    return packed(collectives_of(group).all_gather(in, out, bytes));
}

uint32_t headrace_shm_broadcast(void *group, void *data, uint64_t bytes, int32_t root) {
    return packed(collectives_of(group).broadcast(data, bytes, root));
}

void headrace_shm_abort(void *group, int32_t outcome, int32_t rank) {
    group_of(group).abort({Outcome(outcome), rank, group_of(group).rank()});
}

void headrace_shm_revive(void *group) {
    group_of(group).revive();
}

void headrace_shm_rejoin(void *group) {
    group_of(group).rejoin();
}

uint32_t headrace_shm_verdict(void *group) {
    return packed(group_of(group).verdict());
}

uint64_t headrace_shm_meta(void *group, int32_t rank) {
    return group_of(group).meta_of(rank);
}

// Rounds, looks, yields and sleeps so far.
void headrace_shm_waits(void *group, int64_t *counts) {
    const headrace::Waits &waits = group_of(group).waits();
    counts[0] = waits.rounds;
    counts[1] = waits.looks;
    counts[2] = waits.yields;
    counts[3] = waits.sleeps;
}

} // extern "C"
