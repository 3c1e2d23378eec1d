// The passes over a whole vocabulary that sampling needs, once per instruction set.
//
// Every pass gives the same bits on every instruction set. It adds in 16 fixed lanes, in double
// precision, and the compiler may not fuse a product with a sum.
#pragma once
#include "cpu/kernels.h" // Isa, block_tokens

#include <cstdint>

namespace headrace {

constexpr int mask_tokens = 32; // of a word

// Logits as weights in (0, 1], the largest logit's being 1.
struct Softmax {
    double inverse_temperature;
    double highest; // score
    double floor;   // scores further below the highest than this, a number <= 0, weigh nothing

    double score(float logit) const { return double(logit) * inverse_temperature; }
};

// SplitMix64's step (Steele, Lea and Flood, 2014): a counter made into random bits.
inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

struct SamplerKernels {
    Isa isa;
    int (*count_above)(const float *logits, int n, float limit);
    uint64_t (*bits_above)(const float *logits, int n, float limit); // n <= 64
    // exp(score - highest), relative error below 1e-13; 1e-304 stands for all that is less.
    void (*weigh)(const float *logits, int n, const Softmax &, double *weights);
    double (*sum_weights)(const float *logits, int n, const Softmax &);
    // The logits whose bit is set; minus infinity for the others.
    void (*mask)(const float *logits, const uint32_t *bits, int n, float *masked);
    // Whether one of the 64 counters from `key` on is near the largest. Its upper 52 random bits,
    // as a number, are then at most `distance` below.
    bool (*any_within)(uint64_t key, uint64_t distance);
};

// Null when this processor, or this build, lacks the instruction set.
const SamplerKernels *find_sampler_kernels(Isa isa);

} // namespace headrace
