// Plain loops over 64 lanes, compiled once for each instruction set.
#pragma GCC optimize("fp-contract=off", "no-trapping-math") // for every function below
#include "collectives/rank_sums.h"
#include "cpu/numbers.h"

#define INLINED inline __attribute__((always_inline))

namespace headrace {

namespace {

constexpr int num_lanes = 64;

struct Fp32 {
    using Stored = float;
    static INLINED float load(float x) { return x; }
    static INLINED float store(float x) { return x; }
};

struct Bf16 {
    using Stored = uint16_t;
    static INLINED float load(uint16_t x) { return from_bf16(x); }
    static INLINED uint16_t store(float x) { return to_bf16(x); }
};

struct Fp16 {
    using Stored = uint16_t;
    static INLINED float load(uint16_t x) {
        const uint32_t sign = uint32_t(x & 0x8000) << 16;
        const uint32_t magnitude = uint32_t(x & 0x7fff) << 13;
        // Moved into place the exponent is 112 too small; of infinities and NaNs it stays highest.
        const uint32_t finite = to_bits(from_bits(magnitude) * 0x1p112f);
        const uint32_t special = 0x7f800000 | magnitude;
        return from_bits(sign | (magnitude >= 0x0f800000 ? special : finite));
    }
    // To nearest, ties to even.
    static INLINED uint16_t store(float x) {
        const uint32_t magnitude = to_bits(x) & 0x7fffffff;
        const uint32_t sign = to_bits(x) >> 16 & 0x8000;
        const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
        // The unit of 0.5's last place is the smallest subnormal: the sum rounds to a multiple.
        const uint32_t subnormal = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
        uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
        half = half > 0x7c00 ? 0x7c00 : half;
        half = magnitude > 0x7f800000 ? 0x7e00 : half;
        return uint16_t(sign | half);
    }
};

INLINED float with_one_nan(float x) {
    return x == x ? x : __builtin_nanf("");
}

template <class Format, int lanes>
INLINED void add_lanes(const void *const *terms, int num_terms, size_t first, void *out) {
    using Stored = typename Format::Stored;
    float sums[lanes];
    for (int lane = 0; lane < lanes; ++lane) {
        sums[lane] = Format::load(static_cast<const Stored *>(terms[0])[first + lane]);
    }
    for (int term = 1; term < num_terms; ++term) {
        const Stored *x = static_cast<const Stored *>(terms[term]) + first;
        for (int lane = 0; lane < lanes; ++lane) {
            sums[lane] += Format::load(x[lane]);
        }
    }
    Stored *to = static_cast<Stored *>(out) + first;
    for (int lane = 0; lane < lanes; ++lane) {
        to[lane] = Format::store(with_one_nan(sums[lane]));
    }
}

template <class Format>
INLINED void add(const void *const *terms, int num_terms, size_t n, void *out) {
    size_t first = 0;
    for (; n - first >= num_lanes; first += num_lanes) {
        add_lanes<Format, num_lanes>(terms, num_terms, first, out);
    }
    for (; first < n; ++first) {
        add_lanes<Format, 1>(terms, num_terms, first, out);
    }
}

INLINED void add(Number number, const void *const *terms, int num_terms, size_t n, void *out) {
    switch (number) {
    case Number::fp32:
        return add<Fp32>(terms, num_terms, n, out);
    case Number::fp16:
        return add<Fp16>(terms, num_terms, n, out);
    case Number::bf16:
        return add<Bf16>(terms, num_terms, n, out);
    }
}

} // namespace

// One set: the functions above, inlined into ones that may use more instructions.
#define RANK_SUMS(name, ...)                                                                       \
    namespace name {                                                                               \
    __VA_ARGS__ void add(Number number, const void *const *terms, int num_terms, size_t n,         \
                         void *out) {                                                              \
        headrace::add(number, terms, num_terms, n, out);                                           \
    }                                                                                              \
    const RankSums sums = {Isa::name, add};                                                        \
    }

namespace {

RANK_SUMS(portable)
#if defined(__x86_64__)
RANK_SUMS(avx2, __attribute__((target("avx2"))))
RANK_SUMS(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512"))))
#elif defined(__aarch64__)
RANK_SUMS(neon) // which every processor has: as portable
#endif

} // namespace

const RankSums *find_rank_sums(Isa isa) {
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl");
    if (isa == Isa::avx512 || (isa == Isa::best && has_avx512)) {
        return has_avx512 ? &avx512::sums : nullptr;
    }
    if (isa == Isa::avx2 || (isa == Isa::best && has_avx2)) {
        return has_avx2 ? &avx2::sums : nullptr;
    }
#elif defined(__aarch64__)
    if (isa == Isa::neon || isa == Isa::best) {
        return &neon::sums;
    }
#endif
    return isa == Isa::best || isa == Isa::portable ? &portable::sums : nullptr;
}

} // namespace headrace
