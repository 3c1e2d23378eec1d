#if defined(__aarch64__)
#include "cpu/operands.h"

#include <cstring>

#include <arm_neon.h>
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#include "cpu/kernels_neon.h"
#include "cpu/neon_dots.h"

namespace headrace {

namespace {

using V = NeonByteDot; // whose sums are one integer for each lane

constexpr int octet = 8; // columns that an instruction multiplies, of two rows and two lanes
constexpr int num_octets = quantized_group / octet;
constexpr int lane_pairs = lanes / 2;

using Octet = int8x16_t[lane_pairs]; // eight columns of two lanes in each

// Vectors of four columns of four lanes become ones of eight columns of two.
void pair_lanes(const V::Fours &first, const V::Fours &second, Octet &out) {
    for (int i = 0; i < 4; ++i) {
        const int32x4_t low = vreinterpretq_s32_s8(first.part[i]);
        const int32x4_t high = vreinterpretq_s32_s8(second.part[i]);
        out[2 * i] = vreinterpretq_s8_s32(vzip1q_s32(low, high));
        out[2 * i + 1] = vreinterpretq_s8_s32(vzip2q_s32(low, high));
    }
}

int8x16_t two_rows(const uint8_t *first, const uint8_t *second) {
    return vreinterpretq_s8_u8(vcombine_u8(vld1_u8(first), vld1_u8(second)));
}

// Add the products of two rows and some octets to the sums of each.
template <bool is_int8, int count>
inline __attribute__((always_inline)) void add_octets(const Octet *weights, const Int16Group &x,
                                                      const Int16Group &y, int first_octet,
                                                      V::Dots &x_sums, V::Dots &y_sums) {
    int32x4_t low[lane_pairs], high[lane_pairs];
#pragma GCC unroll 8
    for (int i = 0; i < lane_pairs; ++i) {
        low[i] = high[i] = vdupq_n_s32(0);
    }
#pragma GCC unroll 4
    for (int o = 0; o < count; ++o) {
        const int k = (first_octet + o) * octet, low_k = quantized_group + k;
        const int8x16_t low_numbers = two_rows(x.numbers + low_k, y.numbers + low_k);
#pragma GCC unroll 8
        for (int i = 0; i < lane_pairs; ++i) {
            low[i] = vmmlaq_s32(low[i], low_numbers, weights[o][i]);
        }
        if constexpr (!is_int8) {
            const int8x16_t high_numbers = two_rows(x.numbers + k, y.numbers + k);
#pragma GCC unroll 8
            for (int i = 0; i < lane_pairs; ++i) {
                high[i] = vmmlaq_s32(high[i], high_numbers, weights[o][i]);
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const auto whole = [&](int pair) {
            return vreinterpretq_s64_s32(vaddq_s32(vshlq_n_s32(high[pair], 8), low[pair]));
        };
        const int64x2_t first = whole(2 * i), second = whole(2 * i + 1);
        x_sums.part[i] =
            vaddq_s32(x_sums.part[i], vreinterpretq_s32_s64(vzip1q_s64(first, second)));
        y_sums.part[i] =
            vaddq_s32(y_sums.part[i], vreinterpretq_s32_s64(vzip2q_s64(first, second)));
    }
}

// The columns of a group, for two rows, which may be the same.
template <class W, bool is_int8>
void add_row_pair(const Octet (&weights)[num_octets], const GroupScales<W> &scales,
                  const Int16Group &x, const Int16Group &y, BlockSum<V, W> *sums) {
    each_fours<W>([&](auto part, int first, int) {
        constexpr int count = num_octets / parts_of<W>;
        V::Dots x_dots = W::start(x, part), y_dots = W::start(y, part);
        add_octets<is_int8, count>(weights + first / 2, x, y, first / 2, x_dots, y_dots);
        const auto &own = part == 0 ? scales.first : scales.last;
        sums[0].add_part(x_dots, own, x);
        sums[1].add_part(y_dots, own, y);
        if constexpr (has_floors<W>) {
            sums[0].template add_floor<part>(own.floor, x);
            sums[1].template add_floor<part>(own.floor, y);
        }
    });
}

template <class W, bool is_int8> void multiply_block(const Int16Operands &o, int rows) {
    const FetchAhead fetch = FetchAhead::of_rows(o);
    const int even_rows = (rows + 1) / 2 * 2;
    BlockSum<V, W> sums[max_tall_rows];
    for (int m = 0; m < even_rows; ++m) {
        const bool goes_on = o.accumulate && m < rows;
        sums[m].total = goes_on ? V::load(o.out + size_t(m) * o.out_stride) : V::set(0.0f);
    }
    const auto add_group = [&](const uint8_t *unit, int g, const Int16Group *x) {
        const ptrdiff_t ahead = fetch.from(x);
        const GroupScales<W> scales(unit, g);
        Octet weights[num_octets];
        for (int i = 0; i < num_octets; ++i) {
            fetch_part<W>(unit, g, 2 * i, ahead);
            fetch_part<W>(unit, g, 2 * i + 1, ahead);
            pair_lanes(four_of<W>(unit, g, 2 * i), four_of<W>(unit, g, 2 * i + 1), weights[i]);
        }
        for (int m = 0; m < rows; m += 2) {
            const int other = m + 1 < rows ? m + 1 : m;
            add_row_pair<W, is_int8>(weights, scales, x[size_t(m) * o.x_stride],
                                     x[size_t(other) * o.x_stride], sums + m);
        }
    };
    each_unit<W>(o, [&](const uint8_t *unit, const Int16Group *x) {
        for (int m = 0; m < even_rows; ++m) {
            sums[m].begin_unit();
        }
        for (int g = 0; g < W::unit / quantized_group; ++g) {
            add_group(unit, g, x + g);
        }
        const typename W::Scales scales(unit, 0);
        for (int m = 0; m < rows; ++m) {
            sums[m].end_unit(scales, x[size_t(m) * o.x_stride]);
        }
    });
    for (int m = 0; m < rows; ++m) {
        V::store(o.out + size_t(m) * o.out_stride, sums[m].total);
    }
}

template <class W, bool is_int8>
void multiply_pairs(const Int16Operands &o, int rows, int num_blocks) {
    each_slab<W>(o, rows, [&](const Int16Operands &slab, int count) {
        for (int n = 0; n < num_blocks; ++n) {
            Int16Operands tile = slab.at_block(n);
            tile.next = n + 1 < num_blocks ? tile.blocks + o.block_bytes : slab.next;
            multiply_block<W, is_int8>(tile, count);
        }
    });
}

} // namespace

void gemm_int16_by_matrices(Format format, const Int16Operands &o, int rows, int num_blocks,
                            void *room) {
    if (rows == 1) {
        return gemm_int16_by_dots(format, o, rows, num_blocks, room);
    }
    with_integers<V>(
        format, [&](auto block) { multiply_pairs<decltype(block), false>(o, rows, num_blocks); });
}

void gemm_int8_by_matrices(const Int16Operands &o, int rows, int num_blocks, void *room) {
    if (rows == 1) {
        return gemm_int8_by_dots(o, rows, num_blocks, room);
    }
    multiply_pairs<Int8Bytes<V>, true>(o, rows, num_blocks);
}

} // namespace headrace
#endif
