// The products of gemm_int16.h for some rows, where the scales of groups are integers. Weights
// times these become integers of 16 bits in registers, and meet a tile of rows there. The dot of a
// unit is the same integer as elsewhere, and what follows is in the same order.
#pragma once
#include "cpu/block_sum.h"

#include <utility>

namespace headrace {

// Floors of a unit, whose sums stay in a register from group to group.
template <class V, class W, int num_blocks>
inline __attribute__((always_inline)) void add_floors(const uint8_t *unit, int n,
                                                      const Int16Group *x, int x_stride, int rows,
                                                      BlockSum<V, W> (*sums)[num_blocks]) {
    constexpr int num_groups = W::unit / quantized_group;
    typename V::Floats floors[num_groups][parts_of<W>];
#pragma GCC unroll 8
    for (int g = 0; g < num_groups; ++g) {
        const GroupScales<W> own(unit, g);
        floors[g][0] = own.first.floor;
        floors[g][parts_of<W> - 1] = own.last.floor;
    }
    for (int m = 0; m < rows; ++m, x += x_stride) {
        auto sum = sums[m][n];
#pragma GCC unroll 8
        for (int g = 0; g < num_groups; ++g) {
            sum.template add_floor<0>(floors[g][0], x[g]);
            if constexpr (parts_of<W> == 2) {
                sum.template add_floor<1>(floors[g][1], x[g]);
            }
        }
        sums[m][n].floors = sum.floors;
    }
}

// Some rows and blocks of a slab. `pairs` are the rows'. What is prefetched meanwhile is the next
// tile's.
template <class V, class W, int num_rows, int num_blocks> class ScaledTile {
public:
    static void multiply(const Int16Operands &o, const RowPairs *pairs, ptrdiff_t ahead) {
        Dots dots;
#pragma GCC unroll 12
        for (auto &row : dots) {
#pragma GCC unroll 2
            for (auto &dot : row) {
                dot = V::steps(0);
            }
        }
        for (int g = 0; g < slab_groups; ++g) {
            each_fours<W>([&](auto part, int first, int last) {
                using Scaled = typename V::template ScaledPairs<W::zero>;
                Scaled scaled[num_blocks];
#pragma GCC unroll 2
                for (int n = 0; n < num_blocks; ++n) {
                    const typename W::Scales own(unit(o, n), g * parts_of<W> + part);
                    scaled[n] = Scaled(own.steps);
                }
#pragma GCC unroll 8
                for (int i = first; i < last; ++i) {
                    Pairs even, odd;
#pragma GCC unroll 2
                    for (int n = 0; n < num_blocks; ++n) {
                        fetch_part<W>(unit(o, n), g, i, ahead);
                        scaled[n](four_of<W>(unit(o, n), g, i), even[n], odd[n]);
                    }
                    add_pairs(&pairs[g][2 * i], even, dots);
                    add_pairs(&pairs[g][2 * i + 1], odd, dots);
                }
            });
        }
        add_units(o, dots);
    }

private:
    using Dots = typename V::Ints[num_rows][num_blocks];
    using Pairs = typename V::Pairs[num_blocks];

    static const uint8_t *unit(const Int16Operands &o, int n) {
        return o.blocks + n * o.block_bytes;
    }
    static __attribute__((always_inline)) void add_pairs(const int32_t *pair, const Pairs &weights,
                                                         Dots &dots) {
#pragma GCC unroll 12
        for (int m = 0; m < num_rows; ++m) {
            const auto same = V::same_pair(pair[m * slab_groups * num_pairs]);
#pragma GCC unroll 2
            for (int n = 0; n < num_blocks; ++n) {
                V::add_pairs(dots[m][n], same, weights[n]);
            }
        }
    }
    static __attribute__((always_inline)) void add_units(const Int16Operands &o, const Dots &dots) {
        BlockSum<V, W> sums[num_rows][num_blocks];
#pragma GCC unroll 2
        for (int n = 0; n < num_blocks; ++n) {
#pragma GCC unroll 12
            for (int m = 0; m < num_rows; ++m) {
                sums[m][n].begin_unit();
                sums[m][n].steps = dots[m][n];
            }
            if constexpr (has_floors<W>) {
                add_floors<V, W>(unit(o, n), n, o.x, o.x_stride, num_rows, sums);
            }
            const typename W::Scales scales(unit(o, n), 0);
#pragma GCC unroll 12
            for (int m = 0; m < num_rows; ++m) {
                float *out = o.out + size_t(m) * o.out_stride + n * lanes;
                sums[m][n].total = o.accumulate ? V::load(out) : V::set(0.0f);
                sums[m][n].end_unit(scales, o.x[m * o.x_stride]);
                V::store(out, sums[m][n].total);
            }
        }
    }
};

// The same of up to `V::scaled_rows` rows.
template <class V, class W, int num_blocks> struct ScaledTiles {
    using Multiply = void (*)(const Int16Operands &, const RowPairs *, ptrdiff_t ahead);
    template <int... more>
    static constexpr Multiply by_rows(int rows, std::integer_sequence<int, more...>) {
        constexpr Multiply all[] = {
            ScaledTile<V, W, V::fewest_scaled_rows + more, num_blocks>::multiply...};
        return all[rows - V::fewest_scaled_rows];
    }
    static Multiply of(int rows) {
        constexpr int num_heights = V::scaled_rows - V::fewest_scaled_rows + 1;
        return by_rows(rows, std::make_integer_sequence<int, num_heights>{});
    }
};

// All rows, in tiles of nearly the same height. Blocks stay in the nearest cache.
template <class V, class W, int num_blocks>
void multiply_scaled(const Int16Operands &o, int rows, const RowPairs *pairs) {
    const int num_tiles = (rows + V::scaled_rows - 1) / V::scaled_rows;
    for (int tile = 0; tile < num_tiles; ++tile) {
        const int m = tile * rows / num_tiles, end = (tile + 1) * rows / num_tiles;
        const auto multiply = ScaledTiles<V, W, num_blocks>::of(end - m);
        multiply(o.at_row(m), pairs + m * slab_groups, o.next - o.blocks);
    }
}

} // namespace headrace
