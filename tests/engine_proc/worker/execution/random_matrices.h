// Random numbers that are the same everywhere, and matrices of them in every format.
#pragma once
#include "cpu/step.h"
#include "cpu/step_state.h"
#include "sampling/sampler_kernels.h"

#include <cstdlib>
#include <cstring>
#include <vector>

namespace headrace {

class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() { return mix(state_++); }
    int below(int n) { return int(next() % uint64_t(n)); }
    float number() { return float(int64_t(next() >> 40) - (1 << 23)) / float(1 << 23); } // [-1, 1)
    std::vector<float> numbers(size_t n) {
        std::vector<float> result(n);
        for (float &x : result) {
            x = number();
        }
        return result;
    }

private:
    uint64_t state_;
};

// GGUF's blocks: numbers, bytes, and where scales in fp16 lie.
struct Stored {
    const char *name;
    Format format;
    int numbers, bytes;
    std::vector<int> halves;
};

inline const Stored stored[] = {
    {"f32", Format::f32, 1, 4, {}},           {"bf16", Format::bf16, 1, 4, {}},
    {"int8", Format::int8, 1, 4, {}},         {"fixed16", Format::fixed16, 1, 4, {}},
    {"q8_0", Format::q8_0, 32, 34, {0}},      {"q4_0", Format::q4_0, 32, 18, {0}},
    {"q4_1", Format::q4_1, 32, 20, {0, 2}},   {"q5_0", Format::q5_0, 32, 22, {0}},
    {"q5_1", Format::q5_1, 32, 24, {0, 2}},   {"q2_k", Format::q2_k, 256, 84, {80, 82}},
    {"q3_k", Format::q3_k, 256, 110, {108}},  {"q4_k", Format::q4_k, 256, 144, {0, 2}},
    {"q5_k", Format::q5_k, 256, 176, {0, 2}}, {"q6_k", Format::q6_k, 256, 210, {208}},
    {"iq4_nl", Format::iq4_nl, 32, 18, {0}},  {"iq4_xs", Format::iq4_xs, 256, 136, {0}},
    {"mxfp4", Format::mxfp4, 32, 17, {}},
};

inline const Stored &stored_as(Format format) {
    for (const Stored &one : stored) {
        if (one.format == format) {
            return one;
        }
    }
    std::abort();
}

// Floats, or blocks whose scales are between 2^-12 and 2^-8.
inline void fill(Matrix &matrix, Format format, int rows, int cols, Random &random) {
    matrix.allocate(format, rows, cols);
    const Stored &kind = stored_as(format);
    if (kind.numbers == 1) {
        std::vector<float> numbers = random.numbers(size_t(rows) * cols);
        for (float &x : numbers) {
            x *= 0.25f;
        }
        return pack_float(matrix, 0, rows, numbers.data());
    }
    std::vector<uint8_t> blocks(size_t(rows) * cols / kind.numbers * kind.bytes);
    for (uint8_t &byte : blocks) {
        byte = uint8_t(random.next());
    }
    for (size_t block = 0; block < blocks.size(); block += kind.bytes) {
        for (const int place : kind.halves) {
            const auto half = uint16_t(0x0c00 + random.below(0x1000));
            std::memcpy(&blocks[block + place], &half, 2);
        }
        if (format == Format::mxfp4) {
            blocks[block] = uint8_t(118 + random.below(6));
        }
    }
    pack_stored(matrix, 0, rows, blocks.data());
}

} // namespace headrace
