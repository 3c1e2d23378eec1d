// Plain loops over 16 lanes, compiled once for each instruction set.
#pragma GCC optimize("fp-contract=off", "no-trapping-math") // for every function below
#include "sampling/sampler_kernels.h"

#include <cmath>
#include <cstring>

#define INLINED inline __attribute__((always_inline))

namespace headrace {

namespace {

constexpr int num_lanes = 16;

INLINED double from_bits(uint64_t bits) {
    double number;
    std::memcpy(&number, &bits, 8);
    return number;
}

INLINED uint64_t to_bits(double number) {
    uint64_t bits;
    std::memcpy(&bits, &number, 8);
    return bits;
}

// exp(x) for x in [-700, 0]: 2^n times Taylor's polynomial of what is left, |r| <= ln(2) / 2.
INLINED double exp_of(double x) {
    const double rounder = 0x1.8p52; // a sum with it has the nearest integer in its low bits
    const double shifted = x * 0x1.71547652b82fep0 + rounder;
    const double n = shifted - rounder;
    const double r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33; // ln 2 in two parts
    double p = 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return p * from_bits((to_bits(shifted) + 1023) << 52);
}

INLINED double weight_of(float logit, const Softmax &softmax) {
    const double below = softmax.score(logit) - softmax.highest;
    const double weight = exp_of(below > -700 ? below : -700); // so for minus infinity and NaN
    return below < softmax.floor ? 0 : weight;
}

INLINED int count_above(const float *logits, int n, float limit) {
    int count = 0;
    for (int i = 0; i < n; ++i) {
        count += logits[i] > limit;
    }
    return count;
}

INLINED uint64_t bits_above(const float *logits, int n, float limit) {
    if (n < block_tokens) {
        uint64_t bits = 0;
        for (int i = 0; i < n; ++i) {
            bits |= uint64_t(logits[i] > limit) << i;
        }
        return bits;
    }
    uint32_t low = 0, high = 0; // lanes as wide as the logits
    for (int i = 0; i < block_tokens / 2; ++i) {
        low |= uint32_t(logits[i] > limit) << i;
        high |= uint32_t(logits[block_tokens / 2 + i] > limit) << i;
    }
    return uint64_t(high) << 32 | low;
}

INLINED void mask(const float *logits, const uint32_t *bits, int n, float *masked) {
    int first = 0;
    for (; first + mask_tokens <= n; first += mask_tokens) {
        const uint32_t word = bits[first / mask_tokens];
        for (int i = 0; i < mask_tokens; ++i) {
            masked[first + i] = word >> i & 1 ? logits[first + i] : -INFINITY;
        }
    }
    for (int i = first; i < n; ++i) {
        masked[i] = bits[first / mask_tokens] >> (i - first) & 1 ? logits[i] : -INFINITY;
    }
}

INLINED void weigh(const float *logits, int n, const Softmax &softmax, double *weights) {
    const Softmax local = softmax; // `weights` cannot alias it
    for (int i = 0; i < n; ++i) {
        weights[i] = weight_of(logits[i], local);
    }
}

INLINED double sum_weights(const float *logits, int n, const Softmax &softmax) {
    const Softmax local = softmax;
    double sums[num_lanes] = {};
    const float *const end = logits + n;
    for (; end - logits >= num_lanes; logits += num_lanes) { // no sum of indices that might wrap
        for (int lane = 0; lane < num_lanes; ++lane) {
            sums[lane] += weight_of(logits[lane], local);
        }
    }
    for (int lane = 0; lane < end - logits; ++lane) {
        sums[lane] += weight_of(logits[lane], local);
    }
    for (int half = num_lanes / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) {
            sums[lane] += sums[lane + half];
        }
    }
    return sums[0];
}

INLINED bool any_within(uint64_t key, uint64_t distance) {
    uint64_t num_beyond = 0;
    for (uint64_t i = 0; i < block_tokens; ++i) {
        num_beyond += (distance - (~mix(key + i) >> 12)) >> 63;
    }
    return num_beyond < block_tokens;
}

} // namespace

// One set of kernels: the functions above, inlined into ones that may use more instructions.
#define KERNELS(name, ...)                                                                         \
    namespace name {                                                                               \
    __VA_ARGS__ int count_above(const float *logits, int n, float limit) {                         \
        return headrace::count_above(logits, n, limit);                                            \
    }                                                                                              \
    __VA_ARGS__ uint64_t bits_above(const float *logits, int n, float limit) {                     \
        return headrace::bits_above(logits, n, limit);                                             \
    }                                                                                              \
    __VA_ARGS__ void weigh(const float *logits, int n, const Softmax &softmax, double *weights) {  \
        headrace::weigh(logits, n, softmax, weights);                                              \
    }                                                                                              \
    __VA_ARGS__ double sum_weights(const float *logits, int n, const Softmax &softmax) {           \
        return headrace::sum_weights(logits, n, softmax);                                          \
    }                                                                                              \
    __VA_ARGS__ void mask(const float *logits, const uint32_t *bits, int n, float *masked) {       \
        headrace::mask(logits, bits, n, masked);                                                   \
    }                                                                                              \
    __VA_ARGS__ bool any_within(uint64_t key, uint64_t distance) {                                 \
        return headrace::any_within(key, distance);                                                \
    }                                                                                              \
    const SamplerKernels kernels = {Isa::name,   count_above, bits_above, weigh,                   \
                                    sum_weights, mask,        any_within};                         \
    }

namespace {

KERNELS(portable)
#if defined(__x86_64__)
KERNELS(avx2, __attribute__((target("avx2"))))
KERNELS(avx512, __attribute__((target("avx512f,avx512dq,avx512vl,prefer-vector-width=512"))))
#elif defined(__aarch64__)
KERNELS(neon) // which every processor has: as portable
#endif

} // namespace

const SamplerKernels *find_sampler_kernels(Isa isa) {
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vl");
    if (isa == Isa::avx512 || (isa == Isa::best && has_avx512)) {
        return has_avx512 ? &avx512::kernels : nullptr;
    }
    if (isa == Isa::avx2 || (isa == Isa::best && has_avx2)) {
        return has_avx2 ? &avx2::kernels : nullptr;
    }
#elif defined(__aarch64__)
    if (isa == Isa::neon || isa == Isa::best) {
        return &neon::kernels;
    }
#endif
    return isa == Isa::best || isa == Isa::portable ? &portable::kernels : nullptr;
}

} // namespace headrace
