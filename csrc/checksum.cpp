// A checksum that tells apart records with any one word changed, at the speed of memory.
#include <cstdint>
#include <cstring>

namespace {

constexpr uint64_t odd = 0x9e3779b97f4a7c15;
constexpr int num_lanes = 8;
constexpr size_t block_bytes = num_lanes * sizeof(uint64_t);

// One to one in each argument: a word that differs is never lost.
uint64_t mix(uint64_t sum, uint64_t word) {
    const uint64_t both = sum ^ word;
    return (both << 29 | both >> 35) * odd;
}

void mix_block(uint64_t *lanes, const uint8_t *data) {
    uint64_t words[num_lanes];
    std::memcpy(words, data, block_bytes);
    for (int lane = 0; lane < num_lanes; ++lane) {
        lanes[lane] = mix(lanes[lane], words[lane]);
    }
}

} // namespace

extern "C" uint64_t headrace_checksum(const uint8_t *data, uint64_t size) {
    uint64_t lanes[num_lanes] = {1, 2, 3, 4, 5, 6, 7, 8};
    uint64_t done = 0;
    for (; done + block_bytes <= size; done += block_bytes) {
        mix_block(lanes, data + done);
    }
    uint8_t rest[block_bytes] = {};
    std::memcpy(rest, data + done, size - done);
    mix_block(lanes, rest);
    uint64_t sum = size;
    for (const uint64_t lane : lanes) {
        sum = mix(sum, lane);
    }
    return sum ^ sum >> 32;
}
