// out[rows, 16 * blocks] = x[rows, cols] . packed quantized blocks, where `x` is 16 bits in groups
// of 32 with a scale. Logits are then those of fp32 (KL below 0.000001, where 8 bits cost 0.004).
// Beside int8 weights it may be 8 bits, as W8A8 has it: numbers whose high byte is zero.
//
// One token takes about what memory takes: in 8 bits it took 8 % less at most. The dot product of
// two groups is an integer, so its order is free. What follows is added along k in order
// (block_sum.h). A row thus has the same bits in every tile. Many rows take arithmetic, and go by
// panels (gemm_panels.h).
#pragma once
#include "cpu/gemm_panels.h"

namespace headrace {

// The dot of a group fits 32 bits: the largest weights are those of Q6_K, times a group's scale.
constexpr int most_int16_steps = 127 * 128, most_weight_steps = 32 * 128;
static_assert(int64_t(quantized_group) * most_weight_steps * most_int16_steps <= INT32_MAX);

// Round a row to 8 or 16 bits: the largest number of a group becomes `most_steps` or -`most_steps`.
template <class V> void quantize_row(const float *x, int cols, int bits, Int16Group *groups) {
    const float most_steps = bits == 8 ? 127 : most_int16_steps;
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
        const auto inverse = V::set(largest > 0.0f ? most_steps / largest : 0.0f);
        const auto low_steps = V::round(V::mul(low, inverse));
        const auto high_steps = V::round(V::mul(high, inverse));
        const float first = V::sum(low_steps), all = first + V::sum(high_steps);
        groups->scale = largest / most_steps;
        groups->sum = groups->scale * all;
        groups->first_sum = groups->scale * first;
        groups->offset = -128 * int32_t(all);
        groups->first_offset = -128 * int32_t(first);
        V::store_steps(*groups, 0, low_steps);
        V::store_steps(*groups, lanes, high_steps);
    }
}

// Call body(unit, x) for the columns of each unit, and the first group of `x` there.
template <class W, class Body>
inline __attribute__((always_inline)) void each_unit(const Int16Operands &o, const Body &body) {
    constexpr int unit_groups = W::unit / quantized_group;
    const uint8_t *unit_start = o.blocks;
    for (int g = 0; g < o.num_groups; g += unit_groups, unit_start += unit_bytes<W>) {
        body(unit_start, o.x + g);
    }
}

// One row: sums stay in registers, and as many blocks are read side by side as suits memory. Behind
// the end of a block lies what its neighbour has read, so prefetches go on in what comes next.
template <class V, class W, int num_blocks> void multiply_row(const Int16Operands &o) {
    BlockSum<V, W> sums[num_blocks];
    for (auto &sum : sums) {
        sum.total = V::set(0.0f);
    }
    const auto bytes = ptrdiff_t(o.block_bytes);
    const Int16Group *last_x = o.x + o.num_groups - prefetch_bytes * o.num_groups / bytes;
    const ptrdiff_t to_next = o.next - o.blocks - bytes + prefetch_bytes;
    const auto add_group = [&](const uint8_t *unit, int g, const Int16Group &x) {
        const ptrdiff_t ahead = &x < last_x ? prefetch_bytes : to_next;
        each_fours<W>([&](auto part, int first, int last) {
            typename V::Dots dots[num_blocks];
#pragma GCC unroll 8
            for (auto &dot : dots) {
                dot = W::start(x, part);
            }
#pragma GCC unroll 8
            for (int i = first; i < last; ++i) {
#pragma GCC unroll 8
                for (int n = 0; n < num_blocks; ++n) {
                    const uint8_t *own = unit + n * o.block_bytes;
                    fetch_part<W>(own, g, i, ahead);
                    dots[n] = V::dot(dots[n], four_of<W>(own, g, i), x, 4 * i);
                }
            }
#pragma GCC unroll 8
            for (int n = 0; n < num_blocks; ++n) {
                const typename W::Scales own(unit + n * o.block_bytes, g * parts_of<W> + part);
                sums[n].template add_part<part>(dots[n], own, x);
                if constexpr (has_floors<W>) {
                    sums[n].template add_floor<part>(own.floor, x);
                }
            }
        });
    };
    each_unit<W>(o, [&](const uint8_t *unit, const Int16Group *x) {
        for (auto &sum : sums) {
            sum.begin_unit();
        }
        for (int g = 0; g < W::unit / quantized_group; ++g) {
            add_group(unit, g, x[g]);
        }
        for (int n = 0; n < num_blocks; ++n) {
            sums[n].end_unit(typename W::Scales(unit + n * o.block_bytes, 0));
        }
    });
    for (int n = 0; n < num_blocks; ++n) {
        V::store(o.out + n * lanes, sums[n].total);
    }
}

// Activations of so many rows and columns stay in the nearest cache while all blocks pass by.
constexpr int max_tall_rows = 32;

// Rows that go together hide how long a dot product takes. Their weights are in registers.
template <class V, class W, int num_rows, int num_blocks>
inline __attribute__((always_inline)) void
add_rows(const typename V::Fours (&fours)[num_fours][num_blocks], const GroupScales<W> (&scales)[2],
         const Int16Group *x, int x_stride, BlockSum<V, W> (*sums)[num_blocks]) {
    each_fours<W>([&](auto part, int first, int last) {
        typename V::Dots dots[num_rows][num_blocks];
#pragma GCC unroll 4
        for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 2
            for (int n = 0; n < num_blocks; ++n) {
                dots[m][n] = W::start(x[m * x_stride], part);
            }
        }
#pragma GCC unroll 8
        for (int i = first; i < last; ++i) {
#pragma GCC unroll 4
            for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 2
                for (int n = 0; n < num_blocks; ++n) {
                    dots[m][n] = V::dot(dots[m][n], fours[i][n], x[m * x_stride], 4 * i);
                }
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 2
            for (int n = 0; n < num_blocks; ++n) {
                const auto &own = part == 0 ? scales[n].first : scales[n].last;
                sums[m][n].template add_part<part>(dots[m][n], own, x[m * x_stride]);
            }
        }
    });
}

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

// Some rows: weights are unpacked for all of them. What is prefetched meanwhile is the next tile's:
// it lies as far behind this one's everywhere.
template <class V, class W, int num_blocks> void multiply_rows(const Int16Operands &o, int rows) {
    const ptrdiff_t ahead = o.next - o.blocks;
    BlockSum<V, W> sums[max_tall_rows][num_blocks];
    const auto each_sum = [&](const auto &body) {
        for (int m = 0; m < rows; ++m) {
            for (int n = 0; n < num_blocks; ++n) {
                body(sums[m][n], o.out + size_t(m) * o.out_stride + n * lanes, n);
            }
        }
    };
    const auto add_group = [&](const uint8_t *unit, int g, const Int16Group *x) {
        const uint8_t *last = unit + (num_blocks - 1) * o.block_bytes;
        const GroupScales<W> scales[2] = {{unit, g}, {last, g}};
        typename V::Fours fours[num_fours][num_blocks];
#pragma GCC unroll 8
        for (int i = 0; i < num_fours; ++i) {
#pragma GCC unroll 2
            for (int n = 0; n < num_blocks; ++n) {
                fetch_part<W>(n == 0 ? unit : last, g, i, ahead);
                fours[i][n] = four_of<W>(n == 0 ? unit : last, g, i);
            }
        }
        int m = 0;
        for (; m + V::num_together <= rows; m += V::num_together) {
            add_rows<V, W, V::num_together>(fours, scales, x + m * o.x_stride, o.x_stride,
                                            sums + m);
        }
        for (; m < rows; ++m) {
            add_rows<V, W, 1>(fours, scales, x + m * o.x_stride, o.x_stride, sums + m);
        }
    };
    each_sum([&](auto &sum, const float *out, int) {
        sum.total = o.accumulate ? V::load(out) : V::set(0.0f);
    });
    each_unit<W>(o, [&](const uint8_t *unit, const Int16Group *x) {
        each_sum([](auto &sum, float *, int) { sum.begin_unit(); });
        for (int g = 0; g < W::unit / quantized_group; ++g) {
            add_group(unit, g, x + g);
        }
        if constexpr (has_floors<W>) {
            for (int n = 0; n < num_blocks; ++n) {
                add_floors<V, W>(unit + n * o.block_bytes, n, x, o.x_stride, rows, sums);
            }
        }
        each_sum([&](auto &sum, float *, int n) {
            sum.end_unit(typename W::Scales(unit + n * o.block_bytes, 0));
        });
    });
    each_sum([](const auto &sum, float *out, int) { V::store(out, sum.total); });
}

// Call multiply(operands, rows) for parts of all rows and columns, in order along the columns.
template <class W, class Body>
void each_slab(const Int16Operands &o, int rows, const Body &multiply) {
    for (int g = 0; g < o.num_groups; g += slab_groups) {
        const Int16Operands slab = slab_of<W>(o, g);
        for (int m = 0; m < rows; m += max_tall_rows) {
            multiply(slab.at_row(m), rows - m < max_tall_rows ? rows - m : max_tall_rows);
        }
    }
}

template <class V, class W>
void multiply_blocks(const Int16Operands &o, int rows, int num_blocks, void *room) {
    if constexpr (V::panel_rows > 0) {
        // Scales that are integers multiply each dot here, and weights in a panel.
        if (rows >= V::fewest_panel_rows / (W::has_steps ? 2 : 1)) {
            return multiply_panels<V, W>(o, rows, num_blocks, room);
        }
    }
    // Blocks in tiles of `wide`, the rest one by one.
    const auto each_tile = [&](const Int16Operands &first, int wide, const auto &multiply_wide,
                               const auto &multiply_single) {
        const auto tile_at = [&](int n, int count) {
            Int16Operands tile = first.at_block(n);
            tile.next =
                n + count < num_blocks ? tile.blocks + count * first.block_bytes : first.next;
            return tile;
        };
        int n = 0;
        for (; n + wide <= num_blocks; n += wide) {
            multiply_wide(tile_at(n, wide));
        }
        for (; n < num_blocks; ++n) {
            multiply_single(tile_at(n, 1));
        }
    };
    if (rows == 1) {
        each_tile(o, V::num_streams, multiply_row<V, W, V::num_streams>, multiply_row<V, W, 1>);
        return;
    }
    each_slab<W>(o, rows, [&](const Int16Operands &slab, int count) {
        const auto tall = [&](const auto &multiply) {
            return [&](const Int16Operands &tile) { multiply(tile, count); };
        };
        each_tile(slab, V::num_unpacked, tall(multiply_rows<V, W, V::num_unpacked>),
                  tall(multiply_rows<V, W, 1>));
    });
}

// Where activations have 8 bits.
template <class V> void gemm_int8(const Int16Operands &o, int rows, int num_blocks, void *room) {
    multiply_blocks<V, Int8Bytes<V>>(o, rows, num_blocks, room);
}

// Of a format that `rounds_to_integers`.
template <class V>
void gemm_int16(Format format, const Int16Operands &o, int rows, int num_blocks, void *room) {
    if (format == Format::int8) {
        return multiply_blocks<V, Int8Bytes<V>>(o, rows, num_blocks, room);
    }
    with_block<V>(format, [&](auto block) {
        multiply_blocks<V, decltype(block)>(o, rows, num_blocks, room);
    });
}

} // namespace headrace
