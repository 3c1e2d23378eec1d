// Ranks as threads of one process, on one mapping of a group, for ThreadSanitizer. Exits with 1
// when a result is wrong; races are ThreadSanitizer's to find. Arguments: ranks, rounds of
// collectives.
#include "collectives/shm_all_reduce.h"

#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

using headrace::Number;
using headrace::ShmAllReduce;

namespace {

constexpr size_t half_bytes = 4096; // small, so that most sums take several chunks

// Whether all collectives of a rank brought what they should.
bool run_rank(ShmAllReduce &group, int rank, int num_ranks, int rounds) {
    for (int round = 0; round < rounds; ++round) {
        const size_t n = 1 + size_t(round) * 37 % 5000;
        std::vector<float> x(n, float(rank + round));
        if (!group.all_reduce(x.data(), n).ok()) {
            return false;
        }
        const float sum = float(num_ranks * round + num_ranks * (num_ranks - 1) / 2);
        for (const float number : x) {
            if (number != sum) {
                return false;
            }
        }
        const int root = round % num_ranks;
        std::vector<int> parts(n * num_ranks, -1), own(n, rank);
        if (!group.all_gather(own.data(), parts.data(), n * sizeof(int)).ok() ||
            !group.broadcast(own.data(), n * sizeof(int), root).ok()) {
            return false;
        }
        for (size_t i = 0; i < parts.size(); ++i) {
            if (parts[i] != int(i / n) || own[i % n] != root) {
                return false;
            }
        }
    }
    return true;
}

} // namespace

int main(int, char **argv) {
    const int num_ranks = std::atoi(argv[1]), rounds = std::atoi(argv[2]);
    const int fd = ShmAllReduce::create(num_ranks, half_bytes);
    struct stat status;
    fstat(fd, &status);
    // One mapping: ThreadSanitizer tells memory apart by its address.
    void *shared = mmap(nullptr, size_t(status.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    std::vector<std::thread> threads;
    std::vector<char> right(num_ranks, 0);
    for (int rank = 0; rank < num_ranks; ++rank) {
        threads.emplace_back([&, rank] {
            int error = 0;
            auto group = ShmAllReduce::join(fd, rank, num_ranks, error, headrace::Isa::best,
                                            static_cast<char *>(shared));
            right[rank] = group && run_rank(*group, rank, num_ranks, rounds);
            if (group && !right[rank]) {
                group->group().abort({headrace::Outcome::aborted, rank, rank});
            }
        });
    }
    int num_right = 0;
    for (int rank = 0; rank < num_ranks; ++rank) {
        threads[rank].join();
        num_right += right[rank];
    }
    std::printf("%d of %d ranks are right\n", num_right, num_ranks);
    return num_right == num_ranks ? 0 : 1;
}
