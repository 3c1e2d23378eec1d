// Vectors of AVX2, two for the lanes of a block; the target has FMA and F16C beside it.
#pragma once
#include "cpu/kernels.h"

namespace headrace {

namespace {

struct Avx2 {
    struct Floats {
        __m256 low, high;
    };
    struct Dots {
        __m256i low, high;
    };
    static constexpr int max_sums = 6; // two of 16 registers each
    static constexpr int num_unpacked = 1;
    static constexpr int num_streams = 6;
    static constexpr int num_together = 1;
    static constexpr bool has_bf16 = false;
    static constexpr bool has_signed_bytes = false;

    static Floats set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static Floats load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static void store(float *p, Floats x) {
        _mm256_storeu_ps(p, x.low);
        _mm256_storeu_ps(p + 8, x.high);
    }
    static Floats add(Floats a, Floats b) {
        return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
    }
    static Floats sub(Floats a, Floats b) {
        return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
    }
    static Floats mul(Floats a, Floats b) {
        return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
    }
    static Floats div(Floats a, Floats b) {
        return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
    }
    static Floats inverse(Floats x) { return div(set(1.0f), x); }
    static Floats fma(Floats a, Floats b, Floats c) {
        return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
    }
    static Floats fms(Floats a, Floats b, Floats c) {
        return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
    }
    static Floats max(Floats a, Floats b) {
        return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
    }
    static Floats min(Floats a, Floats b) {
        return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
    }
    static Floats round(Floats x) {
        return {_mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    }
    static __m256 power_of_two(__m256 n) {
        const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    }
    static Floats times_power_of_two(Floats x, Floats n) {
        return mul(x, {power_of_two(n.low), power_of_two(n.high)});
    }
    static Floats zero_below(Floats x, float limit, Floats y) {
        const __m256 bound = _mm256_set1_ps(limit);
        return {_mm256_and_ps(_mm256_cmp_ps(x.low, bound, _CMP_NLT_UQ), y.low),
                _mm256_and_ps(_mm256_cmp_ps(x.high, bound, _CMP_NLT_UQ), y.high)};
    }
    static float sum(Floats x) {
        const __m256 eight = _mm256_add_ps(x.low, x.high);
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        four = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
    }
    static float highest(Floats x) {
        const __m256 eight = _mm256_max_ps(x.low, x.high);
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
    }

    using Ints = Dots;
    static Ints to_steps(Dots x) { return x; }
    static Ints to_steps(Floats x) {
        return {_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)};
    }
    static Ints steps(int32_t x) { return dots(x); }
    static __m256i eight_int8(const uint8_t *p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
    }
    static __m256i eight_uint8(const uint8_t *p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
    }
    static Ints int8_steps(const uint8_t *p) { return {eight_int8(p), eight_int8(p + 8)}; }
    static Ints uint8_steps(const uint8_t *p) { return {eight_uint8(p), eight_uint8(p + 8)}; }
    static Ints times(Ints a, Ints b) {
        return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
    }
    static Ints plus(Ints a, Ints b) {
        return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
    }
    static Floats to_floats(Ints x) {
        return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)};
    }
    // Numbers are 16 bits each, in the order of `Fours`.
    static void store_steps(Int16Group &group, int first, Floats x) {
        auto *numbers = reinterpret_cast<__m256i *>(group.numbers + 2 * first);
        _mm256_storeu_si256(numbers, even_first(to_int16(x)));
    }
    static __m256i to_int16(Floats x) {
        return _mm256_permute4x64_epi64(
            _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high)), 0xd8);
    }
    static __m256i even_first(__m256i fours) {
        return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(fours, 0xd8), 0xd8);
    }
    static Dots dots(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    // Four columns of each of eight lanes: the first and the third, and the others, in 16 bits.
    struct Fours {
        __m256i low_even, low_odd, high_even, high_odd;
    };
    static Fours fours(__m256i low, __m256i high) {
        const __m256i mask = _mm256_set1_epi16(255);
        return {_mm256_and_si256(low, mask), _mm256_srli_epi16(low, 8),
                _mm256_and_si256(high, mask), _mm256_srli_epi16(high, 8)};
    }
    static Fours weights(const uint8_t *p) { return fours(eight_words(p), eight_words(p + 32)); }
    static __m256i dot_of_pairs(__m256i sum, __m256i even, __m256i odd, __m256i x_even,
                                __m256i x_odd) {
        return _mm256_add_epi32(
            sum, _mm256_add_epi32(_mm256_madd_epi16(even, x_even), _mm256_madd_epi16(odd, x_odd)));
    }
    static Dots dot(Dots sum, const Fours &weights, const Int16Group &x, int k) {
        int32_t pairs[2];
        std::memcpy(pairs, x.numbers + 2 * k, 8);
        const __m256i even = _mm256_set1_epi32(pairs[0]), odd = _mm256_set1_epi32(pairs[1]);
        return {dot_of_pairs(sum.low, weights.low_even, weights.low_odd, even, odd),
                dot_of_pairs(sum.high, weights.high_even, weights.high_odd, even, odd)};
    }
    // Of each byte of the words at `p`, the i-th `width` bits, moved to `place`.
    struct Bytes {
        __m256i low, high;
    };
    template <int width, int place> static __m256i bits_of(__m256i words, int i) {
        const int shift = i * width - place;
        const __m256i moved = shift > 0   ? _mm256_srli_epi32(words, shift)
                              : shift < 0 ? _mm256_slli_epi32(words, -shift)
                                          : words;
        return _mm256_and_si256(moved, _mm256_set1_epi8(((1 << width) - 1) << place));
    }
    template <int width, int place = 0> static Bytes bits(const uint8_t *p, int i) {
        return {bits_of<width, place>(eight_words(p), i),
                bits_of<width, place>(eight_words(p + 32), i)};
    }
    static Bytes either(Bytes a, Bytes b) {
        return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
    }
    static Bytes look_up(const uint8_t *table, Bytes places) {
        const __m256i bytes =
            _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(table)));
        return {_mm256_shuffle_epi8(bytes, places.low), _mm256_shuffle_epi8(bytes, places.high)};
    }
    static Fours fours(Bytes bytes) { return fours(bytes.low, bytes.high); }

    // Of panels: two columns of each lane, in 16 bits.
    static constexpr int panel_rows = 4, panel_blocks = 1, fewest_panel_rows[] = {4, 2, 2};
    static constexpr int scaled_rows = 0;
    using Pairs = Dots;
    template <int zero> static void to_pairs(const Fours &fours, Pairs &even, Pairs &odd) {
        const __m256i center = _mm256_set1_epi16(zero);
        even = {_mm256_sub_epi16(fours.low_even, center),
                _mm256_sub_epi16(fours.high_even, center)};
        odd = {_mm256_sub_epi16(fours.low_odd, center), _mm256_sub_epi16(fours.high_odd, center)};
    }
    static __m256i both_of(__m256i x) {
        return _mm256_or_si256(_mm256_slli_epi32(x, 16),
                               _mm256_and_si256(x, _mm256_set1_epi32(0xffff)));
    }
    static Pairs times_pairs(const Pairs &a, const Pairs &b) {
        return {_mm256_mullo_epi16(a.low, b.low), _mm256_mullo_epi16(a.high, b.high)};
    }
    // The same, times integers of at most 8 bits.
    template <int zero> struct ScaledPairs {
        Pairs factors;
        ScaledPairs() = default;
        explicit ScaledPairs(const Ints &steps)
            : factors{both_of(steps.low), both_of(steps.high)} {}
        void operator()(const Fours &fours, Pairs &even, Pairs &odd) const {
            to_pairs<zero>(fours, even, odd);
            even = times_pairs(even, factors);
            odd = times_pairs(odd, factors);
        }
    };
    static __m256i same_pair(int32_t pair) { return _mm256_set1_epi32(pair); }
    static void add_pairs(Ints &sum, __m256i x, const Pairs &weights) {
        sum = plus(sum, {_mm256_madd_epi16(weights.low, x), _mm256_madd_epi16(weights.high, x)});
    }
    static constexpr int fixed16_rows = 4, fixed16_blocks = 1;
    static void hold(Ints &) {}
    static Pairs load_pairs(const uint8_t *p) { return {eight_words(p), eight_words(p + 32)}; }
    static void store_int16(int16_t *p, Floats x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), to_int16(x));
    }
    static void store_pairs(const Int16Group &x, int32_t *pairs) {
        std::memcpy(pairs, x.numbers, sizeof x.numbers);
    }

    static __m256i eight_words(const uint8_t *p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    }
    static Floats bf16_even(const uint8_t *p) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(eight_words(p), 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(eight_words(p + 32), 16))};
    }
    static Floats bf16_odd(const uint8_t *p) {
        const __m256i mask = _mm256_set1_epi32(int(0xffff0000));
        return {_mm256_castsi256_ps(_mm256_and_si256(eight_words(p), mask)),
                _mm256_castsi256_ps(_mm256_and_si256(eight_words(p + 32), mask))};
    }
    static __m256 eight_halves(const uint8_t *p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static Floats fp16(const uint8_t *p) { return {eight_halves(p), eight_halves(p + 16)}; }
    static Floats int8(const uint8_t *p) { return to_floats(int8_steps(p)); }
    static Floats uint8(const uint8_t *p) { return to_floats(uint8_steps(p)); }
    template <int width, int first, int step> static __m256 eight_numbers(const uint8_t *p, int j) {
        const __m256i place = _mm256_set1_epi32(j % 4 * 8 + j / 4 * width);
        const __m256i shifted = _mm256_srlv_epi32(eight_words(p), place);
        const __m256i code = _mm256_and_si256(shifted, _mm256_set1_epi32((1 << width) - 1));
        const __m256 number = _mm256_cvtepi32_ps(code);
        if constexpr (first == 0 && step == 1) {
            return number;
        }
        return _mm256_fmadd_ps(number, _mm256_set1_ps(step), _mm256_set1_ps(first));
    }
    // first + step * code, of `width` bits, of the j-th column of the words at `p`.
    template <int width, int first = 0, int step = 1>
    static Floats number(const uint8_t *p, int j) {
        return {eight_numbers<width, first, step>(p, j),
                eight_numbers<width, first, step>(p + 32, j)};
    }
    static __m256 eight_in(const float *table, const uint8_t *p, int j) {
        const __m256i place = _mm256_set1_epi32(j % 4 * 8 + j / 4 * 4);
        const __m256i code = _mm256_srlv_epi32(eight_words(p), place);
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), code);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), code);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
    }
    // As table[code], of four bits.
    static Floats number_in(const float *table, const uint8_t *p, int j) {
        return {eight_in(table, p, j), eight_in(table, p + 32, j)};
    }
    // 2^(byte - 128), whose exponent is 0 at the lowest two.
    static __m256 eight_half_powers(const uint8_t *p) {
        const __m256i bytes =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
        const __m256i one = _mm256_set1_epi32(1);
        const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(bytes, one), 23);
        const __m256i lowest = _mm256_slli_epi32(_mm256_add_epi32(bytes, one), 21);
        return _mm256_castsi256_ps(_mm256_max_epi32(normal, lowest));
    }
    static Floats half_power(const uint8_t *p) {
        return {eight_half_powers(p), eight_half_powers(p + 8)};
    }
};

} // namespace

} // namespace headrace
