// Sixteen lanes of AVX-512, with VNNI and bf16: what the templates of kernels work on. Files
// include it behind their target, and each has types of its own.
#pragma once
#include "cpu/operands.h"

#include <cstring>
#include <immintrin.h>

namespace headrace {

namespace {

// first + step * i, again from the `period`-th on.
struct Sixteen {
    float lane[lanes] = {};
    constexpr Sixteen(int first, int step, int period) {
        for (int i = 0; i < lanes; ++i) {
            lane[i] = float(first + step * (i % period));
        }
    }
};

struct Avx512 {
    using Floats = __m512;
    static constexpr int max_sums = 24;    // of 32 registers; the rest hold weights
    static constexpr int num_unpacked = 2; // blocks whose weights of a group wait in 16 registers
    static constexpr int num_streams = 6;  // blocks that one row reads side by side
    static constexpr int num_together = 2; // rows that share unpacked weights
    static constexpr bool has_bf16 = true;
    static constexpr bool has_signed_bytes = false;

    static Floats set(float x) { return _mm512_set1_ps(x); }
    static Floats load(const float *p) { return _mm512_loadu_ps(p); }
    static void store(float *p, Floats x) { _mm512_storeu_ps(p, x); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
    static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
    static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
    // 1 / x in half the time, with a relative error below 2^-22.
    static Floats inverse(Floats x) {
        const Floats near = _mm512_rcp14_ps(x);
        return _mm512_fmadd_ps(near, _mm512_fnmadd_ps(x, near, set(1.0f)), near);
    }
    static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
    // As fma, but onto the sum: GCC 12 else changes operands, and copies sums for it.
    static void add_product(Floats x, Floats w, Floats &sum) {
        asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
    }
    static Floats fms(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
    static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
    static Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
    static Floats round(Floats x) { return _mm512_roundscale_ps(x, 0); }
    static Floats times_power_of_two(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
    static Floats zero_below(Floats x, float limit, Floats y) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set(limit), _CMP_NLT_UQ), y);
    }
    // A number is 256 * high + low, both signed bytes. All high ones of a group come first, then
    // all low ones, for the instruction that multiplies unsigned by signed bytes.
    static void store_steps(Int16Group &group, int first, Floats x) {
        const __m512i steps = _mm512_cvtps_epi32(x);
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(steps, ints(128)), 8);
        auto *numbers = reinterpret_cast<__m128i *>(group.numbers + first);
        _mm_storeu_si128(numbers, _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128(numbers + quantized_group / lanes, _mm512_cvtepi32_epi8(steps));
    }
    static __m512i ints(int32_t x) { return _mm512_set1_epi32(x); }
    struct Dots {
        __m512i high, low;
    };
    static Dots dots(int32_t start) { return {ints(0), ints(start)}; }
    using Ints = __m512i;
    static Ints to_steps(const Dots &x) {
        return _mm512_add_epi32(_mm512_slli_epi32(x.high, 8), x.low);
    }
    static Ints to_steps(Floats x) { return _mm512_cvtps_epi32(x); }
    static Ints steps(int32_t x) { return ints(x); }
    static Ints int8_steps(const uint8_t *p) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static Ints uint8_steps(const uint8_t *p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static Ints times(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
    static Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
    static Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
    static Floats to_floats(const Dots &x) { return to_floats(to_steps(x)); }
    using Fours = __m512i;
    static Fours weights(const uint8_t *p) { return _mm512_loadu_si512(p); }
    static __m512i four(const uint8_t *p) {
        int32_t numbers;
        std::memcpy(&numbers, p, 4);
        return ints(numbers);
    }
    static Dots dot(const Dots &sum, Fours weights, const Int16Group &x, int k) {
        return {_mm512_dpbusd_epi32(sum.high, weights, four(x.numbers + k)),
                _mm512_dpbusd_epi32(sum.low, weights, four(x.numbers + quantized_group + k))};
    }
    // Of each byte of the words at `p`, the i-th `width` bits, moved to `place`.
    using Bytes = __m512i;
    template <int width, int place = 0> static Bytes bits(const uint8_t *p, int i) {
        const __m512i words = _mm512_loadu_si512(p);
        const int shift = i * width - place;
        const __m512i moved = shift > 0   ? _mm512_srli_epi32(words, shift)
                              : shift < 0 ? _mm512_slli_epi32(words, -shift)
                                          : words;
        return _mm512_and_si512(moved, _mm512_set1_epi8(((1 << width) - 1) << place));
    }
    static Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
    static Bytes look_up(const uint8_t *table, Bytes places) {
        const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i *>(table));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), places);
    }
    static Fours fours(Bytes bytes) { return bytes; }

    // Of panels: two columns of each lane, in 16 bits. The first and the third of four are one
    // pair. Panels pay from so many rows on: where scales are no integers, or those of 32 columns,
    // or of 16. Before, tiles of gemm_scaled.h do.
    static constexpr int panel_rows = 8, panel_blocks = 3, fewest_panel_rows[] = {40, 25, 13};
    static constexpr int scaled_rows = 12, fewest_scaled_rows = 4;
    using Pairs = __m512i;
    template <int zero> static void to_pairs(Fours fours, Pairs &even, Pairs &odd) {
        const __m512i center = _mm512_set1_epi16(zero);
        even = _mm512_sub_epi16(_mm512_and_si512(fours, _mm512_set1_epi16(255)), center);
        odd = _mm512_sub_epi16(_mm512_srli_epi16(fours, 8), center);
    }
    static Pairs times_pairs(Pairs a, Pairs b) { return _mm512_mullo_epi16(a, b); }
    // The lowest byte of each lane, in both of its halves.
    static Pairs lowest_bytes(Ints x) {
        const __m512i places =
            _mm512_set4_epi32(int(0x800c800c), int(0x80088008), int(0x80048004), int(0x80008000));
        return _mm512_shuffle_epi8(x, places);
    }
    // What `to_pairs` gives, times integers of at most 8 bits. The byte beside the one that counts
    // has factor 0.
    template <int zero> struct ScaledPairs {
        __m512i even_factors, odd_factors, center;
        ScaledPairs() = default;
        explicit ScaledPairs(Ints steps)
            : even_factors(lowest_bytes(steps)), odd_factors(_mm512_slli_epi16(even_factors, 8)),
              center(_mm512_maddubs_epi16(_mm512_set1_epi8(char(zero)), even_factors)) {}
        void operator()(Fours fours, Pairs &even, Pairs &odd) const {
            even = centered(_mm512_maddubs_epi16(fours, even_factors));
            odd = centered(_mm512_maddubs_epi16(fours, odd_factors));
        }

    private:
        Pairs centered(Pairs products) const {
            return zero == 0 ? products : _mm512_sub_epi16(products, center);
        }
    };
    static Pairs same_pair(int32_t pair) { return ints(pair); }
    // GCC 12 copies the sum for the intrinsic.
    static void add_pairs(Ints &sum, Pairs x, Pairs weights) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weights));
    }
    static constexpr int fixed16_rows = 6, fixed16_blocks = 4;
    // It is in a register here, and nothing behind it comes before.
    static void hold(Ints &x) { asm volatile("" : "+v"(x) : : "memory"); }
    static Pairs load_pairs(const uint8_t *p) { return _mm512_loadu_si512(p); }
    static void store_int16(int16_t *p, Floats x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p),
                            _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
    }
    static void store_pairs(const Int16Group &x, int32_t *pairs) {
        const auto wide = [&](int first) {
            return _mm512_cvtepi8_epi16(
                _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x.numbers + first)));
        };
        const __m512i numbers =
            _mm512_add_epi16(_mm512_slli_epi16(wide(0), 8), wide(quantized_group));
        _mm512_storeu_si512(pairs, paired(numbers));
    }
    // Of each four numbers, the first and the third, then the others.
    static __m512i paired(__m512i numbers) {
        const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
        return _mm512_shuffle_epi8(numbers, _mm512_broadcast_i32x4(order));
    }
    static float sum(Floats x) { return _mm512_reduce_add_ps(x); }
    static float highest(Floats x) { return _mm512_reduce_max_ps(x); }

    // Pairs of bf16 in the place of floats. The order of the two additions is the processor's.
    static Floats add_dot(Floats x, Floats w, Floats sum) {
        return _mm512_dpbf16_ps(sum, __m512bh(x), __m512bh(w));
    }
    static Floats first_of_pairs(Floats pairs) {
        return _mm512_castsi512_ps(
            _mm512_and_si512(_mm512_castps_si512(pairs), _mm512_set1_epi32(0xffff)));
    }
    static void store_bf16(float *p, Floats low, Floats high) {
        _mm512_storeu_ps(p, Floats(_mm512_cvtne2ps_pbh(high, low)));
    }
    static Floats bf16_even(const uint8_t *p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
    }
    static Floats bf16_odd(const uint8_t *p) {
        return _mm512_castsi512_ps(
            _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000))));
    }
    static Floats fp16(const uint8_t *p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static Floats int8(const uint8_t *p) { return to_floats(int8_steps(p)); }
    static Floats uint8(const uint8_t *p) { return to_floats(uint8_steps(p)); }
    // first + step * code, of `width` bits, of the j-th column of the words at `p`. The permutation
    // reads four bits of each lane, so it masks and converts in one instruction.
    template <int width, int first = 0, int step = 1>
    static Floats number(const uint8_t *p, int j) {
        alignas(64) static constexpr Sixteen numbers(first, step, 1 << width);
        return look_up(numbers.lane, p, j % 4 * 8 + j / 4 * width);
    }
    // As table[code], of four bits.
    static Floats number_in(const float *table, const uint8_t *p, int j) {
        return look_up(table, p, j % 4 * 8 + j / 4 * 4);
    }
    static Floats look_up(const float *table, const uint8_t *p, int place) {
        const __m512i shifted = _mm512_srlv_epi32(_mm512_loadu_si512(p), _mm512_set1_epi32(place));
        return _mm512_permutexvar_ps(shifted, _mm512_load_ps(table));
    }
    // 2^(byte - 128), whose exponent is 0 at the lowest two.
    static Floats half_power(const uint8_t *p) {
        const __m512i bytes =
            _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(bytes, ints(1)), 23);
        const __m512i lowest = _mm512_slli_epi32(_mm512_add_epi32(bytes, ints(1)), 21);
        return _mm512_castsi512_ps(_mm512_max_epi32(normal, lowest));
    }
};

// The low byte alone of each number.
struct Avx512Byte : Avx512 {
    static constexpr int panel_rows = 0;
    using Dots = __m512i;
    static Dots dots(int32_t start) { return ints(start); }
    static Dots dot(Dots sum, Fours weights, const Int16Group &x, int k) {
        return _mm512_dpbusd_epi32(sum, weights, four(x.numbers + quantized_group + k));
    }
};

} // namespace

} // namespace headrace
