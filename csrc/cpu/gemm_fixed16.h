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
        constexpr int chains = 4; // an addition waits for the one before
        typename V::Floats highest[chains] = {zero, zero, zero, zero};
        typename V::Floats sums[chains] = {zero, zero, zero, zero};
        for (int i = 0; i < n; i += chains * lanes) {
#pragma GCC unroll 4
            for (int c = 0; c < chains; ++c) {
                const auto numbers = load_of<V>(x, i + c * lanes, n);
                const auto sizes = V::max(numbers, V::sub(zero, numbers));
                highest[c] = V::max(highest[c], sizes);
                sums[c] = V::add(sums[c], sizes);
            }
        }
        const float most =
            V::highest(V::max(V::max(highest[0], highest[1]), V::max(highest[2], highest[3])));
        const float sum = V::sum(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
        const float steps = most > 0.0f ? fixed16_steps_for(sum / most) : 1.0f;
        *out = std::isfinite(sum) ? most / steps : __builtin_nanf("");
        const auto inverse = V::set(most > 0.0f ? steps / most : 0.0f);
        auto *numbers = reinterpret_cast<int16_t *>(out + 1);
        for (int i = 0; i < n; i += lanes) {
            V::store_int16(numbers + i, V::mul(load_of<V>(x, i, n), inverse));
        }
    }
}

// Add the u-th unit of some blocks, and of rows from `row` on, to `o.out`. Their dots stay in
// registers. A call of a function of its own takes a tenth as long as the tile.
template <class V, int num_rows, int num_blocks>
inline __attribute__((always_inline)) void fixed16_tile(const Operands &o, int row, int u) {
    alignas(64) static constexpr float zeros[lanes * num_blocks] = {};
    const int cols = o.cols - u * fixed16_unit;
    const bool is_first = u == 0 && !o.accumulate, is_last = cols <= fixed16_unit;
    const int num_pairs = is_last ? (cols + 1) / 2 : fixed16_unit / 2;
    const uint8_t *unit = o.blocks + u * fixed16_unit_bytes;
    const uint8_t *weights = unit + fixed16_header_bytes;
    const float *x = o.x + size_t(row) * o.x_stride + u * fixed16_unit_words;
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
    float *out = o.out + size_t(row) * o.out_stride;
    const float *before = is_first ? zeros : out, *bias = is_last && o.bias ? o.bias : zeros;
    const ptrdiff_t before_stride = is_first ? 0 : o.out_stride;
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

// A unit of blocks that are next, fetched part by part.
template <class V, int num_blocks> struct NextUnit {
    static constexpr int line = 64, lines = int(fixed16_unit_bytes) / line;
    const uint8_t *line_of_first;
    size_t block_bytes;
    int lines_left;

    NextUnit(const uint8_t *unit, size_t bytes)
        : line_of_first(unit), block_bytes(bytes), lines_left(lines) {}
    void fetch(int num_lines) {
        num_lines = num_lines < lines_left ? num_lines : lines_left;
        lines_left -= num_lines;
        for (; num_lines > 0; --num_lines, line_of_first += line) {
            for (int n = 0; n < num_blocks; ++n) {
                __builtin_prefetch(line_of_first + n * block_bytes, 0, 2);
            }
        }
    }
};

// Blocks of one width, all rows, one unit after the other: those of a tile, and the rows beside
// them, fit the nearest cache. Returns the first block not done.
template <class V, int num_blocks>
int multiply_fixed16(const Operands &o, int rows, int n, int blocks) {
    const int lines_per_row = rows < NextUnit<V, num_blocks>::lines ? 2 : 1;
    for (; n + num_blocks <= blocks; n += num_blocks) {
        const Operands own = o.at_block(n);
        for (int u = 0; u < units_of(o.cols); ++u) {
            const bool is_last = u + 1 == units_of(o.cols);
            NextUnit<V, num_blocks> next(is_last ? own.blocks + num_blocks * o.block_bytes
                                                 : own.blocks + (u + 1) * fixed16_unit_bytes,
                                         o.block_bytes);
            int m = 0;
            const auto add_rows = [&](auto count) {
                constexpr int num_rows = decltype(count)::value;
                for (; m + num_rows <= rows; m += num_rows) {
                    next.fetch(lines_per_row * num_rows);
                    fixed16_tile<V, num_rows, num_blocks>(own, m, u);
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
