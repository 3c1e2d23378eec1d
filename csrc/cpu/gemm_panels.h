// The products of gemm_int16.h for many rows. Weights of some blocks and 256 columns, times the
// scales of their groups where these are integers, become a panel of 16-bit integers. It stays in
// the nearest cache while all rows pass over it.
//
// The dot of columns under one scale is the same integer as in gemm_int16.h, and what follows is in
// the same order. So a row has the same bits, however many rows there are. A core of a Xeon (VNNI,
// no tiles) adds 187 * 10^9 products a second in a loop without loads. Tiles of eight rows and
// three blocks make 180 of them, those of six and two 125 to 165. Whole products of 64 rows make
// 142.
#pragma once
#include "cpu/block_sum.h"

#include <utility>

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

    // Of blocks from `blocks` on.
    void decode(const uint8_t *blocks, size_t block_bytes, int num_groups) {
        for (int n = 0; n < num_blocks; ++n) {
            const uint8_t *unit = blocks + n * block_bytes;
            for (int group = 0; group < num_groups; ++group) {
                constexpr int unit_groups = W::unit / quantized_group;
                decode_group(unit + group / unit_groups * unit_bytes<W>, group % unit_groups, group,
                             n);
            }
        }
    }

private:
    void decode_group(const uint8_t *unit, int g, int group, int n) {
        const GroupScales<W> from(unit, g);
        each_fours<W>([&](auto part, int first, int last) {
            const auto decode_fours = [&](const auto &to_pairs) {
#pragma GCC unroll 8
                for (int i = first; i < last; ++i) {
                    auto *const pairs = &weights[group][2 * i][n];
                    to_pairs(four_of<W>(unit, g, i), pairs[0], pairs[num_blocks]);
                }
            };
            if constexpr (W::has_steps) {
                const auto &own = part == 0 ? from.first : from.last;
                decode_fours(typename V::template ScaledPairs<W::zero>(own.steps));
            } else {
                decode_fours(V::template to_pairs<W::zero>);
            }
        });
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

// What is fetched meanwhile: of blocks that come next, so many bytes a step. All at once would fill
// the buffers between caches and memory, and wait for them.
struct Fetch {
    const uint8_t *next;
    size_t block_bytes, step_bytes;

    Fetch past(int steps) const { return {next + steps * step_bytes, block_bytes, step_bytes}; }
};

// The dots of some rows and blocks, which stay in registers along `length`.
template <class V, int length, int num_rows, int num_blocks>
__attribute__((noinline)) void multiply_pairs(const typename V::Pairs (*weights)[num_blocks],
                                              const int32_t *pairs, const Fetch &fetch,
                                              typename V::Ints (*out)[num_blocks]) {
    typename V::Ints dots[num_rows][num_blocks];
#pragma GCC unroll 8
    for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < num_blocks; ++n) {
            dots[m][n] = V::steps(0);
        }
    }
    const uint8_t *next = fetch.next;
    for (int k = 0; k < length; ++k, next += fetch.step_bytes) {
#pragma GCC unroll 8
        for (int n = 0; n < num_blocks; ++n) {
            __builtin_prefetch(next + n * fetch.block_bytes);
        }
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

// The same of up to `V::panel_rows` rows.
template <class V, int length, int num_blocks> struct PairDots {
    using Multiply = void (*)(const typename V::Pairs (*)[num_blocks], const int32_t *,
                              const Fetch &, typename V::Ints (*)[num_blocks]);
    template <int... less>
    static constexpr Multiply by_rows(int rows, std::integer_sequence<int, less...>) {
        constexpr Multiply all[] = {multiply_pairs<V, length, less + 1, num_blocks>...};
        return all[rows - 1];
    }
    static Multiply of(int rows) {
        return by_rows(rows, std::make_integer_sequence<int, V::panel_rows>{});
    }
};

// Some rows, and all blocks of a panel.
template <class V, class W, int num_blocks> class PanelTile {
public:
    // `pairs` and `o.x` begin at the first group of the panel.
    static void multiply(const Panel<V, W, num_blocks> &panel, const RowPairs *pairs,
                         const Int16Operands &o, int rows, const Fetch &fetch) {
        typename V::Ints dots[V::panel_rows][num_blocks];
        const auto multiply_groups = PairDots<V, num_groups * num_pairs, num_blocks>::of(rows);
        BlockSum<V, W> sums[V::panel_rows][num_blocks];
        each(sums, rows, [&](auto &sum, int m, int n) {
            sum.total = o.accumulate ? V::load(out(o, m, n)) : V::set(0.0f);
        });
        for (int g = 0; g < o.num_groups; g += num_groups) {
            multiply_groups(panel.weights[g], pairs[g], fetch.past(g * num_pairs), dots);
            for (int m = 0; m < rows; ++m) {
                add_groups(panel, o.x + m * o.x_stride + g, g, dots[m], sums[m]);
            }
        }
        each(sums, rows, [&](auto &sum, int m, int n) { V::store(out(o, m, n), sum.total); });
    }

private:
    static constexpr int num_groups = W::unit / quantized_group; // whose dots are added as integers

    static float *out(const Int16Operands &o, int m, int n) {
        return o.out + size_t(m) * o.out_stride + n * lanes;
    }
    template <class Body>
    static __attribute__((always_inline)) void
    each(BlockSum<V, W> (&sums)[V::panel_rows][num_blocks], int rows, const Body &body) {
        for (int m = 0; m < rows; ++m) {
#pragma GCC unroll 4
            for (int n = 0; n < num_blocks; ++n) {
                body(sums[m][n], m, n);
            }
        }
    }
    // Those of a row.
    static __attribute__((always_inline)) void
    add_groups(const Panel<V, W, num_blocks> &panel, const Int16Group *x, int g,
               const typename V::Ints (&dots)[num_blocks], BlockSum<V, W> (&sums)[num_blocks]) {
        if constexpr (has_floors<W>) {
            add_floors(panel, x, sums);
        }
#pragma GCC unroll 4
        for (int n = 0; n < num_blocks; ++n) {
            if constexpr (W::has_steps) {
                sums[n].steps = dots[n];
                sums[n].end_unit(panel.scales_of_unit(n), *x);
            } else {
                sums[n].add_group(V::to_floats(dots[n]), panel.scales[g][n], *x);
                if constexpr (W::sign != 0) {
                    sums[n].add_minimum(panel.floors[g][0][n], *x);
                }
            }
        }
    }
    static __attribute__((always_inline)) void add_floors(const Panel<V, W, num_blocks> &panel,
                                                          const Int16Group *x,
                                                          BlockSum<V, W> (&sums)[num_blocks]) {
        typename V::Floats floors[num_blocks];
#pragma GCC unroll 4
        for (auto &floor : floors) {
            floor = V::set(0.0f);
        }
#pragma GCC unroll 8
        for (int g = 0; g < slab_groups; ++g) {
#pragma GCC unroll 2
            for (int part = 0; part < parts_of<W>; ++part) {
                const auto sum = V::set(x[g].sum_of(part, parts_of<W>));
#pragma GCC unroll 4
                for (int n = 0; n < num_blocks; ++n) {
                    floors[n] = V::fma(panel.floors[g][part][n], sum, floors[n]);
                }
            }
        }
        for (int n = 0; n < num_blocks; ++n) {
            sums[n].floors = floors[n];
        }
    }
};

// Blocks of one width, all rows, one panel after the other along the columns.
template <class V, class W, int num_blocks>
void multiply_slab(const Int16Operands &slab, int rows, int blocks, const RowPairs *pairs,
                   Panel<V, W, num_blocks> &panel) {
    const int num_tiles = (rows + V::panel_rows - 1) / V::panel_rows;
    const size_t slab_bytes =
        slab.num_groups * quantized_group / W::unit * unit_bytes<W>; // of a block
    for (int n = 0; n + num_blocks <= blocks; n += num_blocks) {
        const Int16Operands blocks_from = slab.at_block(n);
        const bool is_last = n + 2 * num_blocks > blocks;
        const uint8_t *next =
            is_last ? slab.next : blocks_from.blocks + num_blocks * slab.block_bytes;
        const int num_steps = slab.num_groups * num_pairs;
        const Fetch fetch{next, slab.block_bytes, slab_bytes / (num_tiles * num_steps) + 1};
        panel.decode(blocks_from.blocks, slab.block_bytes, slab.num_groups);
        for (int tile = 0; tile < num_tiles; ++tile) { // of nearly the same height
            const int m = tile * rows / num_tiles, end = (tile + 1) * rows / num_tiles;
            PanelTile<V, W, num_blocks>::multiply(panel, pairs + m * slab_groups,
                                                  blocks_from.at_row(m), end - m,
                                                  fetch.past(tile * num_steps));
        }
    }
}

template <class V, class W>
void multiply_panels(const Int16Operands &o, int rows, int num_blocks, void *room) {
    using Wide = Panel<V, W, V::panel_blocks>;
    using Single = Panel<V, W, 1>;
    static_assert(sizeof(Wide) <= most_panel_bytes);
    const int num_wide = num_blocks / V::panel_blocks * V::panel_blocks;
    for (int g = 0; g < o.num_groups; g += slab_groups) {
        const Int16Operands slab = slab_of<W>(o, g);
        const RowPairs *pairs = pairs_of<V>(slab, rows, room);
        multiply_slab(slab, rows, num_wide, pairs, *static_cast<Wide *>(room));
        if constexpr (V::panel_blocks > 1) {
            multiply_slab(slab.at_block(num_wide), rows, num_blocks - num_wide, pairs,
                          *static_cast<Single *>(room));
        }
    }
}

} // namespace headrace
