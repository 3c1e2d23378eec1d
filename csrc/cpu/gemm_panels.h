// The products of gemm_int16.h for many rows. Weights of some blocks and 256 columns, times the
// scales of their groups where these are integers, become a panel of 16-bit integers. It stays in
// the nearest cache while all rows pass over it.
//
// The dot of columns under one scale is the same integer as in gemm_int16.h, and what follows is in
// the same order. So a row has the same bits, however many rows there are. Two blocks of weights
// take 16 KiB, so the panel and the rows beside it fit 32 KiB. A core of a Xeon (VNNI, no tiles)
// makes 125 to 150 * 10^9 of these products a second. Their own instructions alone would allow 177.
#pragma once
#include "cpu/block_sum.h"

namespace headrace {

template <class V, class W, int num_blocks> struct Panel {
    static constexpr int num_scales = W::has_steps ? 1 : slab_groups;
    typename V::Pairs weights[slab_groups][num_pairs][num_blocks];
    typename V::Floats scales[num_scales][num_blocks];
    // Minima, or integers beside `unit_floors`, of groups or of their halves.
    typename V::Floats floors[slab_groups][parts_of<W>][num_blocks];
    typename V::Floats unit_floors[num_blocks];

    struct UnitScales {
        typename V::Floats unit_scale, unit_floor;
    };
    UnitScales scales_of_unit(int n) const { return {scales[0][n], unit_floors[n]}; }

    // Of blocks from `blocks` on. Those `ahead` of them are fetched.
    void decode(const uint8_t *blocks, size_t block_bytes, int num_groups, ptrdiff_t ahead) {
        for (int n = 0; n < num_blocks; ++n) {
            const uint8_t *unit = blocks + n * block_bytes;
            for (int group = 0; group < num_groups; ++group) {
                constexpr int unit_groups = W::unit / quantized_group;
                decode_group(unit + group / unit_groups * unit_bytes<W>, group % unit_groups, group,
                             n, ahead);
            }
        }
    }

private:
    void decode_group(const uint8_t *unit, int g, int group, int n, ptrdiff_t ahead) {
        const GroupScales<W> from(unit, g);
#pragma GCC unroll 8
        for (int i = 0; i < num_fours; ++i) {
            fetch_part<W>(unit, g, i, ahead);
            auto *const pairs = &weights[group][2 * i][n];
            V::template to_pairs<W::zero>(four_of<W>(unit, g, i), pairs[0], pairs[num_blocks]);
            if constexpr (W::has_steps) {
                const auto steps = V::both((4 * i < W::group ? from.first : from.last).steps);
                pairs[0] = V::times_pairs(pairs[0], steps);
                pairs[num_blocks] = V::times_pairs(pairs[num_blocks], steps);
            }
        }
        if constexpr (W::has_steps) {
            scales[0][n] = from.first.unit_scale;
        } else {
            scales[group][n] = from.first.scale;
        }
        if constexpr (has_floors<W>) {
            unit_floors[n] = from.first.unit_floor;
            floors[group][0][n] = from.first.floor;
            floors[group][parts_of<W> - 1][n] = from.last.floor;
        } else if constexpr (W::sign != 0) {
            floors[group][0][n] = from.first.minimum;
        }
    }
};

// Rows and blocks whose sums stay in registers.
template <class V, class W, int num_rows, int num_blocks> class PanelTile {
public:
    // Of one panel: `pairs` and `o.x` begin at its first group.
    static void multiply(const Panel<V, W, num_blocks> &panel, const RowPairs *pairs,
                         const Int16Operands &o) {
        BlockSum<V, W> sums[num_rows][num_blocks];
        each(sums, [&](auto &sum, int m, int n) {
            const float *out = o.out + size_t(m) * o.out_stride + n * lanes;
            sum.total = o.accumulate ? V::load(out) : V::set(0.0f);
            sum.begin_unit();
        });
        for (int g = 0; g < o.num_groups; g += num_groups) {
            add_groups(panel, pairs, o, g, sums);
        }
        if constexpr (has_floors<W>) {
            add_floors(panel, o, sums);
        }
        each(sums, [&](auto &sum, int m, int n) {
            sum.end_unit(panel.scales_of_unit(n), o.x[m * o.x_stride]);
            V::store(o.out + size_t(m) * o.out_stride + n * lanes, sum.total);
        });
    }

private:
    static constexpr int num_groups = W::unit / quantized_group; // whose dots are added as integers

    template <class Body>
    static __attribute__((always_inline)) void each(BlockSum<V, W> (&sums)[num_rows][num_blocks],
                                                    const Body &body) {
#pragma GCC unroll 8
        for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 8
            for (int n = 0; n < num_blocks; ++n) {
                body(sums[m][n], m, n);
            }
        }
    }
    static void add_floors(const Panel<V, W, num_blocks> &panel, const Int16Operands &o,
                           BlockSum<V, W> (&sums)[num_rows][num_blocks]) {
        BlockSum<V, W> own[num_rows][num_blocks];
        each(own, [](auto &sum, int, int) { sum.begin_unit(); });
        for (int g = 0; g < slab_groups; ++g) {
            each(own, [&](auto &sum, int m, int n) {
                const Int16Group &x = o.x[m * o.x_stride + g];
                sum.template add_floor<0>(panel.floors[g][0][n], x);
                if constexpr (parts_of<W> == 2) {
                    sum.template add_floor<1>(panel.floors[g][1][n], x);
                }
            });
        }
        each(sums, [&](auto &sum, int m, int n) { sum.floors = own[m][n].floors; });
    }
    // Apart from the sums, which leave no registers to the dots where the compiler sees both.
    static __attribute__((noinline)) void
    multiply_groups(const typename V::Pairs (*weights)[num_blocks], const int32_t *pairs,
                    typename V::Ints (&out)[num_rows][num_blocks]) {
        typename V::Ints dots[num_rows][num_blocks];
#pragma GCC unroll 8
        for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 8
            for (int n = 0; n < num_blocks; ++n) {
                dots[m][n] = V::steps(0);
            }
        }
#pragma GCC unroll 2
        for (int k = 0; k < num_groups * num_pairs; ++k) {
#pragma GCC unroll 8
            for (int m = 0; m < num_rows; ++m) {
                const auto same = V::same_pair(pairs[m * slab_groups * num_pairs + k]);
#pragma GCC unroll 8
                for (int n = 0; n < num_blocks; ++n) {
                    V::add_pairs(dots[m][n], same, weights[k][n]);
                }
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 8
            for (int n = 0; n < num_blocks; ++n) {
                out[m][n] = dots[m][n];
            }
        }
    }
    static void add_groups(const Panel<V, W, num_blocks> &panel, const RowPairs *pairs,
                           const Int16Operands &o, int g,
                           BlockSum<V, W> (&sums)[num_rows][num_blocks]) {
        typename V::Ints dots[num_rows][num_blocks];
        multiply_groups(panel.weights[g], pairs[g], dots);
        each(sums, [&](auto &sum, int m, int n) {
            if constexpr (W::has_steps) {
                sum.steps = dots[m][n];
            } else {
                const Int16Group &x = o.x[m * o.x_stride + g];
                sum.add_group(V::to_floats(dots[m][n]), panel.scales[g][n], x);
                if constexpr (W::sign != 0) {
                    sum.add_minimum(panel.floors[g][0][n], x);
                }
            }
        });
    }
};

// Blocks of one width, all rows, one panel after the other along the columns.
template <class V, class W, int num_blocks>
void multiply_slab(const Int16Operands &slab, int rows, int blocks, const RowPairs *pairs,
                   Panel<V, W, num_blocks> &panel) {
    const auto add_rows = [&](auto count, const Int16Operands &tile, int &m) {
        constexpr int num_rows = decltype(count)::value;
        for (; m + num_rows <= rows; m += num_rows) {
            PanelTile<V, W, num_rows, num_blocks>::multiply(panel, pairs + m * slab_groups,
                                                            tile.at_row(m));
        }
    };
    for (int n = 0; n + num_blocks <= blocks; n += num_blocks) {
        const Int16Operands tile = slab.at_block(n);
        const bool is_last = n + 2 * num_blocks > blocks;
        const ptrdiff_t ahead =
            is_last ? slab.next - tile.blocks : ptrdiff_t(num_blocks * slab.block_bytes);
        panel.decode(tile.blocks, tile.block_bytes, tile.num_groups, ahead);
        int m = 0;
        add_rows(std::integral_constant<int, V::panel_rows>{}, tile, m);
        add_rows(std::integral_constant<int, 2>{}, tile, m);
        add_rows(std::integral_constant<int, 1>{}, tile, m);
    }
}

template <class V, class W>
void multiply_panels(const Int16Operands &o, int rows, int num_blocks, void *room) {
    using Wide = Panel<V, W, V::panel_blocks>;
    using Single = Panel<V, W, 1>;
    static_assert(sizeof(Wide) <= most_panel_bytes);
    auto *const panel = static_cast<uint8_t *>(room);
    auto *const pairs = reinterpret_cast<RowPairs *>(panel + most_panel_bytes);
    const int num_wide = num_blocks / V::panel_blocks * V::panel_blocks;
    for (int g = 0; g < o.num_groups; g += slab_groups) {
        const Int16Operands slab = slab_of<W>(o, g);
        for (int m = 0; m < rows; ++m) {
            for (int i = 0; i < slab.num_groups; ++i) {
                V::store_pairs(slab.x[size_t(m) * o.x_stride + i], pairs[m * slab_groups + i]);
            }
        }
        multiply_slab(slab, rows, num_wide, pairs, *reinterpret_cast<Wide *>(panel));
        if constexpr (V::panel_blocks > 1) {
            multiply_slab(slab.at_block(num_wide), rows, num_blocks - num_wide, pairs,
                          *reinterpret_cast<Single *>(panel));
        }
    }
}

} // namespace headrace
