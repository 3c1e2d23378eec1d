// out[rows, 16 * blocks] = x[rows, cols] . packed quantized blocks, where `x` is up to 16 bits in
// groups of 32 or 256 columns with a scale (`Rounding`). Logits are then those of fp32 (KL below
// 0.00001, where 8 bits cost 0.004). Beside int8 weights it may be 8 bits, as W8A8 has it: numbers
// whose high byte is zero.
//
// One token takes about what memory takes: in 8 bits it took 8 % less at most. The dot product of
// columns under one scale is an integer, so its order is free. What follows is added along k in
// order (block_sum.h). A row thus has the same bits in every tile. Some rows take arithmetic, and
// go by tiles of integers of 16 bits (gemm_scaled.h), many by panels of them (gemm_panels.h).
#pragma once
#include "cpu/gemm_panels.h"
#include "cpu/gemm_scaled.h"
#include "cpu/rows.h"

namespace headrace {

// Where groups have scales of their own, the dot of a group fits 32 bits: bytes times 15 bits.
static_assert(quantized_group * 255LL * rounding_of(Format::q8_0, 16).most_steps <= INT32_MAX);

// The sizes of `n` numbers in steps, summed up. It is exact, in any order: below 2^24.
template <class V> int sum_of_steps(const float *x, int n, float inverse) {
    const auto zero = V::set(0.0f);
    auto sizes = zero;
    for (int i = 0; i < n; i += lanes) {
        const auto steps = V::round(V::mul(load_of<V>(x, i, n), V::set(inverse)));
        sizes = V::add(sizes, V::max(steps, V::sub(zero, steps)));
    }
    return int(V::sum(sizes));
}

// Round up to 32 numbers of a row. What lies behind its end is not part of it.
template <class V>
void quantize_group(const float *x, int n, float scale, float inverse, Int16Group &group) {
    const auto steps = [&](int first) {
        const auto numbers = first < n ? load_of<V>(x, first, n) : V::set(0.0f);
        return V::round(V::mul(numbers, V::set(inverse)));
    };
    const auto low = steps(0), high = steps(lanes);
    const float first = V::sum(low), all = first + V::sum(high);
    group.scale = scale;
    group.sum = scale * all;
    group.first_sum = scale * first;
    group.offset = -128 * int32_t(all);
    group.first_offset = -128 * int32_t(first);
    V::store_steps(group, 0, low);
    V::store_steps(group, lanes, high);
}

template <class V> void quantize_row(const float *x, int cols, Rounding to, Int16Group *groups) {
    for (int k = 0; k < cols; k += to.columns) {
        const int end = cols - k < to.columns ? cols : k + to.columns;
        const float largest = largest_of<V>(x + k, end - k);
        const auto inverse_of = [&](int steps) {
            return largest > 0.0f ? float(steps) / largest : 0.0f;
        };
        int steps = to.most_steps;
        if (to.may_exceed()) {
            steps = to.fitting_steps(sum_of_steps<V>(x + k, end - k, inverse_of(steps)));
        }
        const float scale = largest / float(steps), inverse = inverse_of(steps);
        for (int i = k; i < end; i += quantized_group, ++groups) {
            const int n = end - i < quantized_group ? end - i : quantized_group;
            quantize_group<V>(x + i, n, scale, inverse, *groups);
        }
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

// How far ahead of the columns of a group weights are fetched, in bytes.
struct FetchAhead {
    const Int16Group *last_x; // from which on it is what comes next
    ptrdiff_t within, to_next;

    // So many bytes in each whole block. Behind the end of a block lies what its neighbour has
    // read, so prefetches go on in what comes next.
    static FetchAhead in_order(const Int16Operands &o, int ahead) {
        const auto bytes = ptrdiff_t(o.block_bytes);
        return {o.x + o.num_groups - ahead * o.num_groups / bytes, ahead,
                o.next - o.blocks - bytes + ahead};
    }
    // Of a slab it is the next tile, which lies as far behind this one everywhere. Several slabs
    // are read in order, further ahead than one row's: fewer blocks are read side by side.
    static FetchAhead of_rows(const Int16Operands &o) {
        constexpr int further_ahead = 3072;
        return o.num_groups <= slab_groups ? FetchAhead{o.x, 0, o.next - o.blocks}
                                           : in_order(o, further_ahead);
    }

    // `x`: of the first row.
    ptrdiff_t from(const Int16Group *x) const { return x < last_x ? within : to_next; }
};

// One row: sums stay in registers, and as many blocks are read side by side as suits memory.
template <class V, class W, int num_blocks> void multiply_row(const Int16Operands &o) {
    BlockSum<V, W> sums[num_blocks];
    for (auto &sum : sums) {
        sum.total = V::set(0.0f);
    }
    const FetchAhead fetch = FetchAhead::in_order(o, prefetch_bytes);
    const auto add_group = [&](const uint8_t *unit, int g, const Int16Group &x) {
        const ptrdiff_t ahead = fetch.from(&x);
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
                sums[n].add_part(dots[n], own, x);
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
            sums[n].end_unit(typename W::Scales(unit + n * o.block_bytes, 0), *x);
        }
    });
    for (int n = 0; n < num_blocks; ++n) {
        V::store(o.out + n * lanes, sums[n].total);
    }
}

// Activations of so many rows and columns stay in the nearest cache while all blocks pass by.
constexpr int max_tall_rows = 32, most_near_groups = max_tall_rows * slab_groups;

// Whether all columns of these rows do. Then weights are read in the order of memory.
inline bool is_in_order(int rows, int num_groups) {
    return rows * num_groups <= most_near_groups;
}

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
                sums[m][n].add_part(dots[m][n], own, x[m * x_stride]);
            }
        }
    });
}

// Some rows: weights are unpacked for all of them.
template <class V, class W, int num_blocks> void multiply_rows(const Int16Operands &o, int rows) {
    const FetchAhead fetch = FetchAhead::of_rows(o);
    BlockSum<V, W> sums[max_tall_rows][num_blocks];
    const auto each_sum = [&](const auto &body) {
        for (int m = 0; m < rows; ++m) {
            for (int n = 0; n < num_blocks; ++n) {
                body(sums[m][n], m, n);
            }
        }
    };
    const auto out = [&](int m, int n) { return o.out + size_t(m) * o.out_stride + n * lanes; };
    const auto add_group = [&](const uint8_t *unit, int g, const Int16Group *x) {
        const uint8_t *last = unit + (num_blocks - 1) * o.block_bytes;
        const ptrdiff_t ahead = fetch.from(x);
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
    each_sum([&](auto &sum, int m, int n) {
        sum.total = o.accumulate ? V::load(out(m, n)) : V::set(0.0f);
    });
    each_unit<W>(o, [&](const uint8_t *unit, const Int16Group *x) {
        each_sum([](auto &sum, int, int) { sum.begin_unit(); });
        for (int g = 0; g < W::unit / quantized_group; ++g) {
            add_group(unit, g, x + g);
        }
        if constexpr (has_floors<W>) {
            for (int n = 0; n < num_blocks; ++n) {
                add_floors<V, W>(unit + n * o.block_bytes, n, x, o.x_stride, rows, sums);
            }
        }
        each_sum([&](auto &sum, int m, int n) {
            sum.end_unit(typename W::Scales(unit + n * o.block_bytes, 0), x[m * o.x_stride]);
        });
    });
    each_sum([&](const auto &sum, int m, int n) { V::store(out(m, n), sum.total); });
}

// Call multiply(operands, rows) for parts of all rows and columns, in order along the columns.
template <class W, class Body>
void each_slab(const Int16Operands &o, int rows, const Body &multiply) {
    const int step = is_in_order(rows, o.num_groups) ? o.num_groups : slab_groups;
    for (int g = 0; g < o.num_groups; g += step) {
        const Int16Operands slab = slab_of<W>(o, g, step);
        for (int m = 0; m < rows; m += max_tall_rows) {
            multiply(slab.at_row(m), rows - m < max_tall_rows ? rows - m : max_tall_rows);
        }
    }
}

template <class V, class W>
void multiply_blocks(const Int16Operands &o, int rows, int num_blocks, void *room) {
    if constexpr (V::panel_rows > 0) {
        if (rows >= V::fewest_panel_rows[W::has_steps ? parts_of<W> : 0]) {
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
    if constexpr (W::has_steps && V::scaled_rows > 0) {
        if (rows >= V::fewest_scaled_rows) {
            for (int g = 0; g < o.num_groups; g += slab_groups) {
                const Int16Operands slab = slab_of<W>(o, g);
                const RowPairs *pairs = pairs_of<V>(slab, rows, room);
                const auto scaled = [&](const auto &multiply) {
                    return [&](const Int16Operands &tile) { multiply(tile, rows, pairs); };
                };
                each_tile(slab, V::num_unpacked, scaled(multiply_scaled<V, W, V::num_unpacked>),
                          scaled(multiply_scaled<V, W, 1>));
            }
            return;
        }
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
    with_integers<V>(format, [&](auto block) {
        multiply_blocks<V, decltype(block)>(o, rows, num_blocks, room);
    });
}

} // namespace headrace
