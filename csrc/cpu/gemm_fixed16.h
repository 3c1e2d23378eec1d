// out[rows, 16 * blocks] = x[rows, cols] . packed blocks of fixed16, where `x` is fixed16 as well:
// integers under a scale of each 256 columns. Weights have 13 bits. Activations have as many as
// leave the dot of a unit in 32: 13 or 14 of normally distributed numbers, 16 beside an
// outlier. That is about the precision of fp16.
//
// The dot of a unit is an integer, so its order is free. Units are added in order, so a row has the
// same bits in every tile. A core of a Xeon (VNNI) makes 165 * 10^9 of these products a second, of
// 188 in registers.
#pragma once
#include "cpu/gemm_f32.h"
#include "cpu/rows.h"

#include <type_traits>

namespace headrace {

// A unit of a row: the scale, then pairs of numbers.
constexpr int fixed16_unit_words = 1 + fixed16_unit / 2;

// The most steps of the largest number of a unit whose dots fit, where the sizes of all add up to
// `sum` times it. Each is rounded by half a step at most.
inline float fixed16_steps_for(float sum) {
    constexpr int most_sum = INT32_MAX / fixed16_steps - fixed16_unit;
    const float fitting = std::floor(float(most_sum) / sum);
    return fitting < float(INT16_MAX) ? fitting : float(INT16_MAX);
}

// Round a row to units, which take no more room than its floats and a vector.
template <class V> void round_to_fixed16(const float *x, int cols, float *out) {
    const auto zero = V::set(0.0f);
    for (int k = 0; k < cols; k += fixed16_unit, x += fixed16_unit, out += fixed16_unit_words) {
        const int n = cols - k < fixed16_unit ? cols - k : fixed16_unit;
        auto largest = zero, sum = zero;
        for (int i = 0; i < n; i += lanes) {
            const auto numbers = load_of<V>(x, i, n);
            const auto sizes = V::max(numbers, V::sub(zero, numbers));
            largest = V::max(largest, sizes);
            sum = V::add(sum, sizes);
        }
        const float most = V::highest(largest);
        const float steps = most > 0.0f ? fixed16_steps_for(V::sum(sum) / most) : 1.0f;
        *out = std::isfinite(V::sum(sum)) ? most / steps : __builtin_nanf("");
        const auto inverse = V::set(most > 0.0f ? steps / most : 0.0f);
        auto *numbers = reinterpret_cast<int16_t *>(out + 1);
        for (int i = 0; i < n; i += lanes) {
            V::store_int16(numbers + i, V::mul(load_of<V>(x, i, n), inverse));
        }
    }
}

// Add the u-th unit of some rows and blocks to `o.out`. Their dots stay in registers.
template <class V, int num_rows, int num_blocks> void fixed16_tile(const Operands &o, int u) {
    alignas(64) static constexpr float zeros[lanes * num_blocks] = {};
    const int cols = o.cols - u * fixed16_unit;
    const bool is_first = u == 0 && !o.accumulate, is_last = cols <= fixed16_unit;
    const int num_pairs = is_last ? (cols + 1) / 2 : fixed16_unit / 2;
    const uint8_t *unit = o.blocks + u * fixed16_unit_bytes;
    const uint8_t *weights = unit + fixed16_header_bytes;
    const float *x = o.x + u * fixed16_unit_words;
    const size_t bytes = o.block_bytes;
    typename V::Ints dots[num_rows][num_blocks];
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < num_blocks; ++n) {
            dots[m][n] = V::steps(0);
        }
    }
    RowAddresses<num_rows> rows(x + 1, o.x_stride);
    const uint8_t *const end = weights + num_pairs * fixed16_pair_bytes;
    do {
        typename V::Pairs own[num_blocks];
#pragma GCC unroll 8
        for (int n = 0; n < num_blocks; ++n) {
            own[n] = V::load_pairs(weights + n * bytes);
        }
#pragma GCC unroll 8
        for (int m = 0; m < num_rows; ++m) {
            const auto same = V::same_pair(int32_t(to_bits(rows.at(m, 0))));
#pragma GCC unroll 8
            for (int n = 0; n < num_blocks; ++n) {
                V::add_pairs(dots[m][n], same, own[n]);
            }
        }
        rows.advance(1);
        weights += fixed16_pair_bytes;
    } while (weights != end);
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < num_blocks; ++n) {
            V::hold(dots[m][n]);
        }
    }
    const float *before = is_first ? zeros : o.out, *bias = is_last && o.bias ? o.bias : zeros;
    const ptrdiff_t before_stride = is_first ? 0 : o.out_stride;
    float *out = o.out;
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; ++m) {
        const auto scale = V::set(x[0]);
#pragma GCC unroll 8
        for (int n = 0; n < num_blocks; ++n) {
            const auto own = V::load(reinterpret_cast<const float *>(unit + n * bytes));
            const auto dot = V::mul(V::to_floats(dots[m][n]), own);
            const auto sum = V::fma(dot, scale, V::load(before + n * lanes));
            V::store(out + n * lanes, V::add(sum, V::load(bias + n * lanes)));
        }
        x += o.x_stride;
        out += o.out_stride;
        before += before_stride;
    }
}

// Blocks of one width, all rows, one unit after the other: those of a tile, and the rows beside
// them, fit the nearest cache. Returns the first block not done.
template <class V, int num_blocks>
int multiply_fixed16(const Operands &o, int rows, int n, int blocks) {
    for (; n + num_blocks <= blocks; n += num_blocks) {
        const Operands own = o.at_block(n);
        for (int u = 0; u < units_of(o.cols); ++u) {
            int m = 0;
            const auto add_rows = [&](auto count) {
                constexpr int num_rows = decltype(count)::value;
                for (; m + num_rows <= rows; m += num_rows) {
                    fixed16_tile<V, num_rows, num_blocks>(own.at_row(m), u);
                }
            };
            add_rows(std::integral_constant<int, V::fixed16_rows>{});
            add_rows(std::integral_constant<int, 4>{});
            add_rows(std::integral_constant<int, 2>{});
            add_rows(std::integral_constant<int, 1>{});
        }
    }
    return n;
}

// `x` and its stride are in words of a rounded row.
template <class V> void gemm_fixed16(const Operands &o, int rows, int num_blocks) {
    const int n = multiply_fixed16<V, V::fixed16_blocks>(o, rows, 0, num_blocks);
    if constexpr (V::fixed16_blocks > 1) {
        multiply_fixed16<V, 1>(o, rows, n, num_blocks);
    }
}

} // namespace headrace
