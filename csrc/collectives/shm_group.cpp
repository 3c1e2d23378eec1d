#include "collectives/shm_group.h"

#include "futex.h"

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <new>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace headrace {

namespace {

constexpr size_t header_bytes = 4096;
constexpr uint32_t magic = 0x48524752;
constexpr uint32_t first_round = 0xffffff80; // soon wraps, so that every use is a test of that
constexpr int looks = 100;                   // about 2 us
constexpr int64_t yield_ns = 100'000;
constexpr int64_t check_ns = 50'000'000;
constexpr int32_t has_left = -1; // in the place of a process id

static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "shared between processes");

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t(1'000'000'000) + now.tv_nsec;
}

size_t segment_bytes(int num_ranks, size_t half_bytes) {
    return header_bytes + 2 * num_ranks * half_bytes;
}

// Whether the first round is the second or one after it, less than 2^31 apart.
bool reached(uint32_t round, uint32_t wanted) {
    return int32_t(round - wanted) >= 0;
}

// What /proc says of a process.
struct Process {
    bool runs = false; // or is stopped: neither dead nor about to be
    uint64_t start_time = 0;
};

// A process that ends loses its memory map before the memory is freed, which may take long. It is a
// zombie until its parent reads its exit status. In both states it does not run.
Process process_of(int32_t pid) {
    char path[32], text[1024];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return {};
    }
    const ssize_t length = ::read(fd, text, sizeof text - 1);
    ::close(fd);
    text[length > 0 ? length : 0] = 0;
    const char *after_name = std::strrchr(text, ')'); // names may have blanks and brackets
    char state;
    unsigned long long start_time, virtual_bytes;
    if (!after_name ||
        std::sscanf(after_name,
                    ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
                    "%llu %llu",
                    &state, &start_time, &virtual_bytes) != 3) {
        return {};
    }
    return {state != 'Z' && state != 'X' && virtual_bytes > 0, start_time};
}

// As `reader` should have it: a mismatch names the other rank.
Verdict unpacked(uint32_t word, int reader) {
    const int about = int(word >> 8 & 0xff) - 1, by = int(word >> 16 & 0xff) - 1;
    const Outcome outcome = Outcome(word & 0xff);
    const bool turned = outcome == Outcome::mismatch && about == reader;
    return turned ? Verdict{outcome, by, about} : Verdict{outcome, about, by};
}

// Reserve memory for a part of the segment, or return that there is none. Without this, touching a
// page that cannot be had is a SIGBUS. Returns 0 or an errno.
int reserve(int fd, off_t offset, off_t bytes) {
    int error;
    do {
        error = posix_fallocate(fd, offset, bytes);
    } while (error == EINTR);
    return error;
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

int num_cores() {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : INT_MAX;
}

} // namespace

struct alignas(128) ShmGroup::Line { // processors fetch cache lines in pairs
    std::atomic<uint32_t> round;
    std::atomic<uint32_t> sleepers;
    uint64_t meta[2]; // of each half
    std::atomic<int32_t> pid;
    uint64_t start_time; // of the process; published by `pid`
};

struct ShmGroup::Header {
    uint32_t magic;
    int32_t num_ranks;
    uint64_t half_bytes;
    alignas(128) std::atomic<uint32_t> verdict;
    Line lines[max_ranks];
};

int ShmGroup::create(int num_ranks, size_t half_bytes) {
    static_assert(sizeof(Header) <= header_bytes);
    if (num_ranks < 1 || num_ranks > max_ranks || half_bytes == 0 || half_bytes % 4096) {
        return -EINVAL;
    }
    const int fd = memfd_create("headrace-all-reduce", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        return -errno;
    }
    int error = ftruncate(fd, off_t(segment_bytes(num_ranks, half_bytes))) ? errno : 0;
    error = error ? error : reserve(fd, 0, header_bytes);
    void *base = MAP_FAILED;
    if (!error) {
        base = mmap(nullptr, header_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        error =
            base == MAP_FAILED || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) ? errno : 0;
    }
    if (error) {
        ::close(fd);
        return -error;
    }
    auto &header = *new (base) Header{};
    header.magic = magic;
    header.num_ranks = num_ranks;
    header.half_bytes = half_bytes;
    for (Line &line : header.lines) {
        line.round.store(first_round, std::memory_order_relaxed);
    }
    munmap(base, header_bytes);
    return fd;
}

std::unique_ptr<ShmGroup> ShmGroup::join(int fd, int rank, int num_ranks, int &error,
                                         char *shared) {
    const off_t end = lseek(fd, 0, SEEK_END);
    error = end < 0 ? errno : 0;
    const size_t bytes = error ? 0 : size_t(end);
    if (error || bytes < header_bytes) {
        error = error ? error : EINVAL;
        return nullptr;
    }
    const size_t mapped = shared ? 0 : rank < 0 ? header_bytes : bytes;
    void *base = shared;
    if (!shared) {
        base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) {
            error = errno;
            return nullptr;
        }
    }
    const auto &header = *static_cast<Header *>(base);
    const size_t half_bytes = header.half_bytes;
    if (header.magic != magic || header.num_ranks != num_ranks || rank < -1 || rank >= num_ranks ||
        bytes != segment_bytes(num_ranks, half_bytes)) {
        error = EINVAL;
    } else if (rank >= 0) {
        error = reserve(fd, off_t(segment_bytes(rank, half_bytes)), off_t(2 * half_bytes));
    }
    std::unique_ptr<ShmGroup> group;
    if (!error) {
        group.reset(new (std::nothrow)
                        ShmGroup(static_cast<char *>(base), mapped, rank, num_ranks, half_bytes));
        error = group ? group->enter() : ENOMEM;
    }
    if (!group && mapped) {
        munmap(base, mapped);
    }
    return error ? nullptr : std::move(group);
}

ShmGroup::ShmGroup(char *base, size_t mapped, int rank, int num_ranks, size_t half_bytes)
    : base_(base), mapped_(mapped), rank_(rank), num_ranks_(num_ranks), half_bytes_(half_bytes),
      looks_before_yield_(num_cores() >= num_ranks ? looks : 0), round_(first_round) {}

ShmGroup::~ShmGroup() {
    if (entered_) {
        line(rank_).pid.store(has_left, std::memory_order_release);
    }
    if (mapped_) {
        munmap(base_, mapped_);
    }
}

// Tell the others which process to look after. Returns 0 or an errno.
int ShmGroup::enter() {
    if (rank_ < 0) {
        return 0;
    }
    const Process self = process_of(getpid());
    if (!self.runs) {
        return ENOSYS; // no /proc, so the death of a rank could not be detected
    }
    if (line(rank_).pid.load(std::memory_order_relaxed) != 0) {
        return EBUSY;
    }
    line(rank_).start_time = self.start_time;
    line(rank_).pid.store(getpid(), std::memory_order_release);
    entered_ = true;
    return 0;
}

ShmGroup::Header &ShmGroup::header() const {
    return *reinterpret_cast<Header *>(base_);
}

ShmGroup::Line &ShmGroup::line(int rank) const {
    return header().lines[rank];
}

char *ShmGroup::half(int rank, uint32_t round) const {
    return base_ + segment_bytes(rank, half_bytes_) + (round % 2) * half_bytes_;
}

uint64_t ShmGroup::meta_of(int rank) const {
    const Line &line = this->line(rank);
    return line.meta[line.round.load(std::memory_order_acquire) % 2];
}

Verdict ShmGroup::verdict() const {
    return unpacked(header().verdict.load(std::memory_order_acquire), rank_);
}

void ShmGroup::abort(Verdict verdict) {
    uint32_t none = 0;
    header().verdict.compare_exchange_strong(none, packed(verdict), std::memory_order_acq_rel);
    for (int rank = 0; rank < num_ranks_; ++rank) {
        wake_all(&line(rank).round); // a rank about to sleep misses this, for `check_ns`
    }
}

// Ranks that were in a collective when it ended may be a round apart.
void ShmGroup::revive() {
    uint32_t last = line(0).round.load(std::memory_order_acquire);
    for (int rank = 1; rank < num_ranks_; ++rank) {
        const uint32_t round = line(rank).round.load(std::memory_order_acquire);
        last = reached(round, last) ? round : last;
    }
    for (int rank = 0; rank < num_ranks_; ++rank) {
        line(rank).round.store(last, std::memory_order_release);
    }
    header().verdict.store(0, std::memory_order_release);
}

void ShmGroup::rejoin() {
    round_ = line(rank_).round.load(std::memory_order_acquire);
}

Verdict ShmGroup::meet(uint64_t meta) {
    const Verdict before = verdict();
    if (!before.ok()) {
        return before;
    }
    ++round_;
    ++waits_.rounds;
    publish(meta);
    for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank_) {
            continue;
        }
        const Verdict waited = wait_for(peer);
        if (!waited.ok()) {
            return waited;
        }
        if (line(peer).meta[round_ % 2] != meta) {
            abort({Outcome::mismatch, peer, rank_});
            return verdict();
        }
    }
    return {};
}

// A rank that goes to sleep counts itself, then looks again; this stores, then looks for sleepers.
// Both are sequentially consistent: one of the two sees the other.
void ShmGroup::publish(uint64_t meta) {
    Line &own = line(rank_);
    own.meta[round_ % 2] = meta;
    own.round.store(round_, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst) != 0) {
        wake_all(&own.round);
    }
}

bool ShmGroup::has_published(const Line &line) const {
    return reached(line.round.load(std::memory_order_acquire), round_);
}

Verdict ShmGroup::wait_for(int peer) {
    Line &line = this->line(peer);
    for (int tries = 0; tries < looks_before_yield_; ++tries) {
        if (has_published(line)) {
            return {};
        }
        ++waits_.looks;
        pause();
    }
    const int64_t yields_end = now_ns() + yield_ns;
    int64_t next_check = yields_end + check_ns;
    while (!has_published(line)) {
        const Verdict verdict = this->verdict();
        if (!verdict.ok()) {
            return verdict;
        }
        const int64_t now = now_ns();
        if (now >= next_check) {
            look_for_dead();
            next_check = now + check_ns;
        } else if (now < yields_end) {
            ++waits_.yields;
            sched_yield();
        } else {
            ++waits_.sleeps;
            sleep_on(line);
        }
    }
    return {};
}

void ShmGroup::sleep_on(Line &line) {
    line.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = line.round.load(std::memory_order_seq_cst);
    if (!reached(seen, round_)) {
        sleep_while(&line.round, seen, check_ns / 1000);
    }
    line.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

// Abort if a rank we wait for has died or left. A rank that has not joined yet is waited for.
void ShmGroup::look_for_dead() {
    for (int peer = 0; peer < num_ranks_; ++peer) {
        const Line &line = this->line(peer);
        const int32_t pid = line.pid.load(std::memory_order_acquire);
        if (peer == rank_ || pid == 0) {
            continue;
        }
        const Process process = pid == has_left ? Process{} : process_of(pid);
        const bool lives = process.runs && process.start_time == line.start_time;
        // Its last round is read after its death: it may have published that just before.
        if (!lives && !has_published(line)) {
            abort({Outcome::peer_died, peer, rank_});
        }
    }
}

} // namespace headrace
