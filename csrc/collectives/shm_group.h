// Ranks that meet in rounds, through an inherited memfd: processes, or threads of one.
//
// In round s a rank writes its half s % 2, publishes it, waits until all others have published
// theirs, and reads them. It may write that half again in round s + 2: by then all others have
// published round s + 1. A rank that has published s + 1 has read what it needs of round s. Rounds
// are numbered, never reset: no round can be taken for an older or newer one.
//
//   0       header: size and number of ranks; the verdict, which is 0 until an abort
//   256     a line per rank: round published, its `meta`, number of sleepers, process
//   4096    per rank: half 0, half 1
//
// No wait is without end. A rank polls for a while if every rank can have a core, then yields, then
// sleeps. Every 50 ms it checks whether the ranks it waits for are alive. A rank that finds another
// dead, or in another collective, writes the verdict. All waits return then, and the group is
// unusable until it is revived.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace headrace {

constexpr int max_ranks = 16;
constexpr size_t default_half_bytes = size_t(256) << 10; // both fit a core's own cache

enum class Outcome : int32_t { ok, aborted, peer_died, mismatch };

// How a collective ended.
struct Verdict {
    Outcome outcome = Outcome::ok;
    int32_t rank = -1; // the rank that failed; -1: none
    int32_t by = -1; // the rank that found it; in a mismatch, the two called different collectives

    bool ok() const { return outcome == Outcome::ok; }
};

// In 32 bits; 0 is ok.
inline uint32_t packed(Verdict verdict) {
    return uint32_t(verdict.outcome) | uint32_t(verdict.rank + 1) << 8 |
           uint32_t(verdict.by + 1) << 16;
}

// How often one rank has met the others, and what it did while it waited.
struct Waits {
    int64_t rounds = 0;
    int64_t looks = 0;
    int64_t yields = 0;
    int64_t sleeps = 0;
};

class ShmGroup {
public:
    // Make a segment and return its descriptor, or -errno. It has no name, so nothing is left
    // behind however its users end. `half_bytes` is a multiple of 4096.
    static int create(int num_ranks, size_t half_bytes = default_half_bytes);

    // Join as `rank`, or only map the segment as -1, to watch it and to abort. The rank's own part
    // is reserved here, so that lack of memory is an error and not a SIGBUS later. On failure it is
    // null, with `error` an errno. EINVAL: `fd` is no segment of so many ranks; EBUSY: the rank has
    // been taken; ENOSYS: /proc is missing. `shared` is where threads have mapped it.
    static std::unique_ptr<ShmGroup> join(int fd, int rank, int num_ranks, int &error,
                                          char *shared = nullptr);

    ~ShmGroup(); // does not wait; ranks that still need this one find it gone
    ShmGroup(const ShmGroup &) = delete;
    ShmGroup &operator=(const ShmGroup &) = delete;

    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }
    size_t half_bytes() const { return half_bytes_; }
    const Waits &waits() const { return waits_; }

    char *own_half() { return half(rank_, round_ + 1); }         // of the round that comes next
    const char *half_of(int rank) { return half(rank, round_); } // of the round that was last

    // Publish `own_half` as a part of the collective that `meta` describes, and wait for the
    // others. `meta` is the same on all ranks or this is a mismatch. Once it has failed, it
    // fails until the group is revived.
    Verdict meet(uint64_t meta);

    // What a rank said it does in the last round it published.
    uint64_t meta_of(int rank) const;

    // End all waits, from any thread of any process that has mapped the segment. The first wins.
    void abort(Verdict);

    Verdict verdict() const;

    // Make the group usable again after an abort. No rank may be in a collective; before the next,
    // every rank rejoins.
    void revive();
    void rejoin();

private:
    struct Line;
    struct Header;

    ShmGroup(char *base, size_t mapped, int rank, int num_ranks, size_t half_bytes);

    int enter();
    Header &header() const;
    Line &line(int rank) const;
    char *half(int rank, uint32_t round) const;
    void publish(uint64_t meta);
    bool has_published(const Line &) const; // this rank's round
    Verdict wait_for(int peer);
    void sleep_on(Line &);
    void look_for_dead();

    char *const base_;
    const size_t mapped_; // bytes to unmap
    const int rank_;
    const int num_ranks_;
    const size_t half_bytes_;
    const int looks_before_yield_;
    uint32_t round_;
    bool entered_ = false;
    Waits waits_;
};

} // namespace headrace
