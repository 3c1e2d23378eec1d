#if defined(__x86_64__)
#include "cpu/operands.h"

#include <climits>
#include <cstring>

#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,avxvnni")
#include "cpu/avx2_vectors.h"
#include "cpu/kernels_avx_vnni.h"

namespace headrace {

namespace {

// A number of `x` is 256 * high + low, both signed bytes: all high ones of a group come first.
struct AvxVnni : Avx2 {
    static constexpr int num_streams = 2;
    // A dot takes five cycles, and two begin in each: rows have eight sums, panels twelve. Two rows
    // share bytes as they are, so panels pay late, and only beside integer scales.
    static constexpr int num_together = 2, panel_rows = 6;
    static constexpr int fewest_panel_rows[] = {INT_MAX, 32, 12};

    struct Dots {
        Ints high, low;
    };
    static Dots dots(int32_t start) { return {steps(0), steps(start)}; }
    using Avx2::to_floats;
    using Avx2::to_steps;
    static Ints to_steps(const Dots &x) {
        return plus({_mm256_slli_epi32(x.high.low, 8), _mm256_slli_epi32(x.high.high, 8)}, x.low);
    }
    static Floats to_floats(const Dots &x) { return to_floats(to_steps(x)); }
    using Fours = Bytes;
    static Fours fours(Bytes bytes) { return bytes; }
    static Fours weights(const uint8_t *p) { return {eight_words(p), eight_words(p + 32)}; }
    // Arguments of `asm` are in AT&T's order: GCC 12 copies the sum for the intrinsics.
    static void add_dot(__m256i &sum, __m256i weights, __m256i x) {
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(x));
    }
    static Ints add_dots(Ints sum, const Fours &weights, const uint8_t *four) {
        int32_t numbers;
        std::memcpy(&numbers, four, 4);
        const __m256i x = _mm256_set1_epi32(numbers);
        add_dot(sum.low, weights.low, x);
        add_dot(sum.high, weights.high, x);
        return sum;
    }
    static Dots dot(const Dots &sum, const Fours &weights, const Int16Group &x, int k) {
        return {add_dots(sum.high, weights, x.numbers + k),
                add_dots(sum.low, weights, x.numbers + quantized_group + k)};
    }
    static void store_steps(Int16Group &group, int first, Floats x) {
        const __m256i numbers = to_int16(x);
        const __m256i high =
            _mm256_srai_epi16(_mm256_add_epi16(numbers, _mm256_set1_epi16(128)), 8);
        store_bytes(group.numbers + first, high);
        store_bytes(group.numbers + quantized_group + first,
                    _mm256_srai_epi16(_mm256_slli_epi16(numbers, 8), 8));
    }
    static void store_bytes(uint8_t *p, __m256i numbers) {
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(numbers, numbers), 0xd8);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_castsi256_si128(bytes));
    }

    template <int zero> static void to_pairs(const Fours &fours, Pairs &even, Pairs &odd) {
        Avx2::to_pairs<zero>(Avx2::fours(fours), even, odd);
    }
    template <int zero> struct ScaledPairs : Avx2::ScaledPairs<zero> {
        using Base = Avx2::ScaledPairs<zero>;
        using Base::Base;
        void operator()(const Fours &fours, Pairs &even, Pairs &odd) const {
            Base::operator()(Avx2::fours(fours), even, odd);
        }
    };
    static void add_pair(__m256i &sum, __m256i x, __m256i weights) {
        asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(x), "x"(weights));
    }
    static void add_pairs(Ints &sum, __m256i x, const Pairs &weights) {
        add_pair(sum.low, x, weights.low);
        add_pair(sum.high, x, weights.high);
    }
    static void store_pairs(const Int16Group &x, int32_t *pairs) {
        const auto wide = [&](int first) {
            return _mm256_cvtepi8_epi16(
                _mm_loadu_si128(reinterpret_cast<const __m128i *>(x.numbers + first)));
        };
        for (int i = 0; i < quantized_group; i += 16) {
            const __m256i numbers =
                _mm256_add_epi16(_mm256_slli_epi16(wide(i), 8), wide(quantized_group + i));
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(pairs + i / 2), even_first(numbers));
        }
    }
};

// The low byte alone of each number.
struct AvxVnniByte : AvxVnni {
    static constexpr int panel_rows = 0;
    using Dots = Ints;
    static Dots dots(int32_t start) { return steps(start); }
    using Avx2::to_floats;
    using Avx2::to_steps;
    static Dots dot(const Dots &sum, const Fours &weights, const Int16Group &x, int k) {
        return add_dots(sum, weights, x.numbers + quantized_group + k);
    }
};

} // namespace

// The first three go together: activations have an order of their own.
const Kernels &avx_vnni_kernels() {
    static const Kernels kernels = [] {
        Kernels mixed = avx2_kernels;
        mixed.gemm_int16 = gemm_int16<AvxVnni>;
        mixed.gemm_int8 = gemm_int8<AvxVnniByte>;
        mixed.quantize_row = quantize_row<AvxVnni>;
        mixed.gemm_fixed16 = gemm_fixed16<AvxVnni>;
        mixed.has_fast_fixed16 = true;
        return mixed;
    }();
    return kernels;
}

} // namespace headrace
#endif
