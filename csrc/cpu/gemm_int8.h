// out[rows, 16 * blocks] = x[rows, cols] . packed quantized blocks, where `x`, too, is 8 bits in
// groups of 32 with a scale.
//
// One token takes what memory takes. The dot product of two groups is an integer, so its order is
// free; products of the two scales and the dot are added along k in order. A row thus has the same
// bits in every tile.
#pragma once
#include "cpu/gemm.h"

namespace headrace {

// Round a row to 8 bits: the largest number of a group becomes 127 or -127.
template <class V> void quantize_row(const float *x, int cols, Int8Group *groups) {
    for (int k = 0; k < cols; k += quantized_group, ++groups) {
        float padded_group[quantized_group] = {};
        const float *numbers = x + k;
        if (k + quantized_group > cols) { // what lies behind the row is not part of it
            for (int j = 0; k + j < cols; ++j) {
                padded_group[j] = numbers[j];
            }
            numbers = padded_group;
        }
        const auto low = V::load(numbers), high = V::load(numbers + lanes);
        const auto zero = V::set(0.0f);
        const auto sizes = V::max(V::max(low, V::sub(zero, low)), V::max(high, V::sub(zero, high)));
        const float largest = V::highest(sizes);
        const auto inverse = V::set(largest > 0.0f ? 127.0f / largest : 0.0f);
        const auto low_steps = V::round(V::mul(low, inverse));
        const auto high_steps = V::round(V::mul(high, inverse));
        const float first = V::sum(low_steps), all = first + V::sum(high_steps);
        groups->scale = largest / 127.0f;
        groups->sum = groups->scale * all;
        groups->offset = -128 * int32_t(all);
        groups->first_offset = -128 * int32_t(first);
        V::store_int8(groups->numbers, low_steps);
        V::store_int8(groups->numbers + lanes, high_steps);
    }
}

// How to read a packed block as bytes, four columns of each lane at a time, beyond what gemm.h says
// of it. A chunk is whole fours. The number is scale * (byte - zero) + sign * minimum: a sum of
// products starts from what `zero` adds up to.
template <class V> struct Int8Bytes {
    static constexpr int unit = quantized_group, group = unit, chunk = 4;
    static constexpr int header_bytes = 32, chunk_bytes = 64, sign = 0;
    using Scales = typename Q8Block<V>::Scales;
    static auto four(const uint8_t *chunk_start, int) { return V::weights(chunk_start); }
    static auto start(const Int8Group &x, int) { return V::dot_start(x.offset); } // zero is 128
};

template <class V> struct Q40Bytes : Q40Block<V> {
    static constexpr int sign = 0;
    static auto four(const uint8_t *chunk_start, int i) { return V::nibbles(chunk_start, i); }
    static auto start(const Int8Group &x, int) { return V::ints(x.offset / 16); } // zero is 8
};

template <class V> struct Q41Bytes : Q41Block<V> {
    static constexpr int sign = 1;
    static auto four(const uint8_t *chunk_start, int i) { return V::nibbles(chunk_start, i); }
    static auto start(const Int8Group &, int) { return V::ints(0); }
};

template <class V> struct Q4KBytes : Q4KBlock<V> {
    static constexpr int sign = -1;
    static auto four(const uint8_t *chunk_start, int i) { return V::nibbles(chunk_start, i); }
    static auto start(const Int8Group &, int) { return V::ints(0); }
};

template <class V> struct Q6KBytes : Q6KBlock<V> { // zero is 32; scales are for half of a group
    static constexpr int sign = 0;
    static auto four(const uint8_t *chunk_start, int i) { return V::six_bit_bytes(chunk_start, i); }
    static auto start(const Int8Group &x, int half) {
        return V::ints((half == 0 ? x.first_offset : x.offset - x.first_offset) / 4);
    }
};

// Add the products along columns under one scale, the g-th of a unit.
template <class V, class W, int num_rows, int num_blocks>
inline __attribute__((always_inline)) void
add_group(const Int8Operands &o, const uint8_t *unit_start, const Int8Group *x, int g,
          typename V::Floats (&sums)[num_rows][num_blocks]) {
    constexpr int chunks = W::group / W::chunk;
    const int part = g % (quantized_group / W::group); // of a group of `x`
    const auto row = [&](int m) -> const Int8Group & { return x[size_t(m) * o.num_groups]; };
    typename V::Ints dots[num_rows][num_blocks];
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < num_blocks; ++n) {
            dots[m][n] = W::start(row(m), part);
        }
    }
    const uint8_t *chunk = unit_start + W::header_bytes + g * chunks * W::chunk_bytes;
#pragma GCC unroll 8
    for (int c = 0; c < chunks; ++c, chunk += W::chunk_bytes) {
#pragma GCC unroll 8
        for (int n = 0; n < num_blocks; ++n) {
            const uint8_t *own = chunk + n * o.block_bytes;
            for (int b = 0; b < W::chunk_bytes; b += 64) {
                __builtin_prefetch(own + prefetch_bytes + b);
            }
#pragma GCC unroll 4
            for (int i = 0; i < W::chunk / 4; ++i) {
                const auto weights = W::four(own, i);
                const int k = part * W::group + c * W::chunk + 4 * i;
#pragma GCC unroll 8
                for (int m = 0; m < num_rows; ++m) {
                    dots[m][n] = V::dot(dots[m][n], weights, row(m).numbers + k);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < num_blocks; ++n) {
        const typename W::Scales scales(unit_start + n * o.block_bytes, g);
#pragma GCC unroll 8
        for (int m = 0; m < num_rows; ++m) {
            const auto both = V::mul(scales.scale, V::set(row(m).scale));
            sums[m][n] = V::fma(V::to_floats(dots[m][n]), both, sums[m][n]);
            if constexpr (W::sign != 0) {
                sums[m][n] = V::fma(scales.minimum, V::set(W::sign * row(m).sum), sums[m][n]);
            }
        }
    }
}

template <class V, class W, int num_rows, int num_blocks> void int8_tile(const Int8Operands &o) {
    typename V::Floats sums[num_rows][num_blocks];
    for (int m = 0; m < num_rows; ++m) {
        for (int n = 0; n < num_blocks; ++n) {
            sums[m][n] = V::set(0.0f);
        }
    }
    const uint8_t *unit_start = o.blocks;
    for (int k = 0; k < o.num_groups * quantized_group; k += W::unit, unit_start += unit_bytes<W>) {
        for (int g = 0; g < W::unit / W::group; ++g) {
            const Int8Group *x = o.x + (k + g * W::group) / quantized_group;
            add_group<V, W, num_rows, num_blocks>(o, unit_start, x, g, sums);
        }
    }
    for (int m = 0; m < num_rows; ++m) {
        for (int n = 0; n < num_blocks; ++n) {
            V::store(o.out + size_t(m) * o.out_stride + n * lanes, sums[m][n]);
        }
    }
}

// As gemm_rows: rows in tiles of `num_rows`, blocks outside. Returns the first row not done.
template <class V, class W, int num_rows>
int int8_rows(const Int8Operands &o, int first_row, int rows, int num_blocks) {
    if constexpr (num_rows > V::max_dots) {
        return first_row;
    } else {
        constexpr int fitting = V::max_dots / num_rows;
        constexpr int wide = fitting < 6 ? fitting : 6;
        const int last_row = first_row + (rows - first_row) / num_rows * num_rows;
        int n = 0;
        for (; n + wide <= num_blocks; n += wide) {
            for (int m = first_row; m < last_row; m += num_rows) {
                int8_tile<V, W, num_rows, wide>(o.at_block(n).at_row(m));
            }
        }
        for (; n < num_blocks; ++n) {
            for (int m = first_row; m < last_row; m += num_rows) {
                int8_tile<V, W, num_rows, 1>(o.at_block(n).at_row(m));
            }
        }
        return last_row;
    }
}

template <class V, class W> void int8_blocks(const Int8Operands &o, int rows, int num_blocks) {
    int row = int8_rows<V, W, 6>(o, 0, rows, num_blocks);
    row = int8_rows<V, W, 4>(o, row, rows, num_blocks);
    row = int8_rows<V, W, 3>(o, row, rows, num_blocks);
    row = int8_rows<V, W, 2>(o, row, rows, num_blocks);
    int8_rows<V, W, 1>(o, row, rows, num_blocks);
}

// Of a format that `rounds_to_int8`.
template <class V> void gemm_int8(Format format, const Int8Operands &o, int rows, int num_blocks) {
    switch (format) {
    case Format::int8:
        return int8_blocks<V, Int8Bytes<V>>(o, rows, num_blocks);
    case Format::q4_0:
        return int8_blocks<V, Q40Bytes<V>>(o, rows, num_blocks);
    case Format::q4_1:
        return int8_blocks<V, Q41Bytes<V>>(o, rows, num_blocks);
    case Format::q4_k:
        return int8_blocks<V, Q4KBytes<V>>(o, rows, num_blocks);
    case Format::q6_k:
        return int8_blocks<V, Q6KBytes<V>>(o, rows, num_blocks);
    case Format::f32:
    case Format::bf16:
    case Format::q8_0:
    case Format::bf12:
        return; // gemm.h
    }
}

} // namespace headrace
