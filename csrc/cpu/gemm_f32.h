// Products of many rows with fp32 blocks, in tiles of eight rows and three blocks. They take fewer
// loads and instructions for each product than those of gemm.h, in the same order. A guest's core
// of a Xeon (AVX-512) makes 175 GFLOP/s in a loop without loads. It mostly makes 129 here, where
// tiles of twelve rows and two blocks make 112. At times both make 165.
#pragma once
#include "cpu/operands.h"

namespace headrace {

constexpr int f32_rows = 8, f32_blocks = 3;

// Rows of `x` in a tile. Three have one address, which the compiler shall not take apart: else each
// row's is a register, of which there are too few.
template <int num_rows> struct RowAddresses {
    static constexpr int together = 3, count = (num_rows + together - 1) / together;
    const float *addresses[count];
    ptrdiff_t stride;

    RowAddresses(const float *x, int x_stride) : stride(x_stride) {
        for (int i = 0; i < count; ++i) {
            addresses[i] = x + i * together * stride;
            asm("" : "+r"(addresses[i]));
        }
    }
    float at(int row, int column) const {
        return addresses[row / together][row % together * stride + column];
    }
    void advance(int columns) {
        for (int i = 0; i < count; ++i) {
            addresses[i] += columns;
        }
    }
};

// The outer products of `columns` columns of rows, and rows of blocks.
template <class V, int columns>
inline __attribute__((always_inline)) void
add_columns(const Operands &o, const uint8_t *block, const RowAddresses<f32_rows> &x,
            typename V::Floats (&sums)[f32_rows][f32_blocks]) {
#pragma GCC unroll 2
    for (int j = 0; j < columns; ++j) {
        typename V::Floats weights[f32_blocks];
#pragma GCC unroll 3
        for (int n = 0; n < f32_blocks; ++n) {
            const uint8_t *place = block + n * o.block_bytes + j * sizeof(weights[n]);
            weights[n] = V::load(reinterpret_cast<const float *>(place));
            __builtin_prefetch(place + o.ahead);
        }
#pragma GCC unroll 8
        for (int m = 0; m < f32_rows; ++m) {
            const auto factor = V::set(x.at(m, j));
#pragma GCC unroll 3
            for (int n = 0; n < f32_blocks; ++n) {
                V::add_product(factor, weights[n], sums[m][n]);
            }
        }
    }
}

// What a tile starts with.
template <class V, int num_rows, int num_blocks>
inline __attribute__((always_inline)) void
start_sums(const Operands &o, typename V::Floats (&sums)[num_rows][num_blocks]) {
#pragma GCC unroll 12
    for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 6
        for (int n = 0; n < num_blocks; ++n) {
            sums[m][n] =
                o.accumulate ? V::load(o.out + size_t(m) * o.out_stride + n * lanes) : V::set(0.0f);
        }
    }
}

// What it ends with.
template <class V, int num_rows, int num_blocks>
inline __attribute__((always_inline)) void
store_sums(const Operands &o, const typename V::Floats (&sums)[num_rows][num_blocks]) {
#pragma GCC unroll 12
    for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 6
        for (int n = 0; n < num_blocks; ++n) {
            const auto sum = o.bias ? V::add(sums[m][n], V::load(o.bias + n * lanes)) : sums[m][n];
            V::store(o.out + size_t(m) * o.out_stride + n * lanes, sum);
        }
    }
}

template <class V> void f32_tile(const Operands &o) {
    typename V::Floats sums[f32_rows][f32_blocks];
    start_sums<V>(o, sums);
    constexpr int step = 2; // columns
    constexpr size_t step_bytes = step * sizeof(sums[0][0]);
    RowAddresses<f32_rows> x(o.x, o.x_stride);
    const uint8_t *block = o.blocks;
    for (const uint8_t *end = block + o.cols / step * step_bytes; block != end;
         block += step_bytes) {
        add_columns<V, step>(o, block, x, sums);
        x.advance(step);
    }
    if (o.cols % step != 0) {
        add_columns<V, 1>(o, block, x, sums);
    }
    store_sums<V>(o, sums);
}

} // namespace headrace
