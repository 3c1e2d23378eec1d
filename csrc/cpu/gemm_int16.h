// out[rows, 16 * blocks] = x[rows, cols] . packed quantized blocks, where `x` is 16 bits in groups
// of 32 with a scale. Logits are then those of fp32 (KL below 0.00001, where 8 bits cost 0.004).
// Beside int8 weights it may be 8 bits, as W8A8 has it: numbers whose high byte is zero.
//
// One token takes about what memory takes: in 8 bits it took 8 % less at most. The dot product of
// two groups is an integer, so its order is free. Products of the two scales and the dot are added
// along k in order. A row thus has the same bits in every tile. Many rows take arithmetic, half as
// much again as 8 bits did. A core of a Xeon (VNNI, no tiles) makes 90 to 129 * 10^9 of
// these products a second. Their own instructions alone would allow 160.
#pragma once
#include "cpu/gemm.h"

namespace headrace {

// Round a row to 8 or 16 bits: the largest number of a group becomes `most_steps` or -`most_steps`.
template <class V> void quantize_row(const float *x, int cols, int bits, Int16Group *groups) {
    const float most_steps = bits == 8 ? 127 : 127 * 256; // no high byte is larger
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

// int8 as bytes, four columns of each lane at a time: packed_blocks.h has the other formats. A sum
// of products starts from what `zero` adds up to.
template <class V> struct Int8Bytes {
    static constexpr int unit = quantized_group, group = unit, chunk = 4;
    static constexpr int header_bytes = 32, chunk_bytes = 64;
    static constexpr bool has_minimum = false;
    using Scales = typename Q8Block<V>::Scales;
    static auto four(const uint8_t *chunk_start, int) { return V::weights(chunk_start); }
    static auto start(const Int16Group &x, int) { return V::dots(x.offset); } // zero is 128
};

constexpr int num_fours = quantized_group / 4;

// The i-th four columns of the g-th 32 of a unit.
template <class W>
inline __attribute__((always_inline)) auto four_of(const uint8_t *unit_start, int g, int i) {
    constexpr int chunks = quantized_group / W::chunk, fours = W::chunk / 4;
    const uint8_t *chunk = unit_start + W::header_bytes + (g * chunks + i / fours) * W::chunk_bytes;
    return W::four(chunk, i % fours);
}

// Prefetch the i-th part of what the g-th 32 columns of a unit take, with their share of headers,
// so far ahead of them.
template <class W>
inline __attribute__((always_inline)) void fetch_part(const uint8_t *unit_start, int g, int i,
                                                      ptrdiff_t ahead) {
    constexpr int group_bytes = unit_bytes<W> / (W::unit / quantized_group);
    constexpr int lines = (group_bytes + 63) / 64;
    for (int line = i * lines / num_fours; line < (i + 1) * lines / num_fours; ++line) {
        __builtin_prefetch(unit_start + g * group_bytes + line * 64 + ahead);
    }
}

// Of 32 columns, which have one scale or two.
template <class W> constexpr int parts_of = quantized_group / W::group;

template <class W> struct GroupScales {
    typename W::Scales first, last;

    GroupScales(const uint8_t *unit, int g)
        : first(unit, g * parts_of<W>), last(unit, (g + 1) * parts_of<W> - 1) {}
};

template <class V, class W> struct GroupDots {
    typename V::Dots first, last;

    void start(const Int16Group &x) {
        first = W::start(x, 0);
        if constexpr (parts_of<W> == 2) {
            last = W::start(x, 1);
        }
    }
    void add(const typename V::Fours &weights, const Int16Group &x, int i) {
        auto &dots = 4 * i < W::group ? first : last;
        dots = V::dot(dots, weights, x, 4 * i);
    }
    // What the columns add to a sum of their row.
    typename V::Floats scaled(const GroupScales<W> &scales, const Int16Group &x,
                              typename V::Floats sum) const {
        if constexpr (parts_of<W> == 1) {
            const auto scale = V::mul(scales.first.scale, V::set(x.scale));
            sum = V::fma(V::to_floats(first), scale, sum);
        } else {
            const auto steps = V::mul(V::to_floats(first), scales.first.scale);
            sum =
                V::fma(V::fma(V::to_floats(last), scales.last.scale, steps), V::set(x.scale), sum);
        }
        if constexpr (W::has_minimum) {
            sum = V::fma(scales.first.minimum, V::set(x.sum_of(0, parts_of<W>)), sum);
            if constexpr (parts_of<W> == 2) {
                sum = V::fma(scales.last.minimum, V::set(x.sum_of(1, 2)), sum);
            }
        }
        return sum;
    }
};

// Call body(unit, g, x) for the columns of each group of `x`, the g-th 32 of a unit.
template <class W, class Body>
inline __attribute__((always_inline)) void each_group(const Int16Operands &o, const Body &body) {
    const uint8_t *unit_start = o.blocks;
    const Int16Group *x = o.x;
    for (int k = 0; k < o.num_groups * quantized_group; k += W::unit, unit_start += unit_bytes<W>) {
        for (int g = 0; g < W::unit / quantized_group; ++g, ++x) {
            body(unit_start, g, x);
        }
    }
}

// One row: sums stay in registers, and as many blocks are read side by side as suits memory. Behind
// the end of a block lies what its neighbour has read, so prefetches go on in what comes next.
template <class V, class W, int num_blocks> void multiply_row(const Int16Operands &o) {
    typename V::Floats sums[num_blocks];
    for (auto &sum : sums) {
        sum = V::set(0.0f);
    }
    const auto bytes = ptrdiff_t(o.block_bytes);
    const Int16Group *last = o.x + o.num_groups - prefetch_bytes * o.num_groups / bytes;
    const ptrdiff_t to_next = o.next - o.blocks - bytes + prefetch_bytes;
    each_group<W>(o, [&](const uint8_t *unit, int g, const Int16Group *x) {
        const ptrdiff_t ahead = x < last ? prefetch_bytes : to_next;
        GroupDots<V, W> dots[num_blocks];
#pragma GCC unroll 8
        for (auto &dot : dots) {
            dot.start(*x);
        }
#pragma GCC unroll 8
        for (int i = 0; i < num_fours; ++i) {
#pragma GCC unroll 8
            for (int n = 0; n < num_blocks; ++n) {
                fetch_part<W>(unit + n * o.block_bytes, g, i, ahead);
                dots[n].add(four_of<W>(unit + n * o.block_bytes, g, i), *x, i);
            }
        }
#pragma GCC unroll 8
        for (int n = 0; n < num_blocks; ++n) {
            sums[n] = dots[n].scaled({unit + n * o.block_bytes, g}, *x, sums[n]);
        }
    });
    for (int n = 0; n < num_blocks; ++n) {
        V::store(o.out + n * lanes, sums[n]);
    }
}

// Activations of so many rows and columns stay in the nearest cache while all blocks pass by.
constexpr int max_tall_rows = 32, slab_groups = super_block / quantized_group;

// Rows that go together hide how long a dot product takes. Their weights are in registers.
template <class V, class W, int num_rows, int num_blocks>
inline __attribute__((always_inline)) void
add_rows(const typename V::Fours (&fours)[num_fours][num_blocks], const GroupScales<W> (&scales)[2],
         const Int16Group *x, int x_stride, typename V::Floats (*sums)[num_blocks]) {
    GroupDots<V, W> dots[num_rows][num_blocks];
#pragma GCC unroll 4
    for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 2
        for (int n = 0; n < num_blocks; ++n) {
            dots[m][n].start(x[m * x_stride]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < num_fours; ++i) {
#pragma GCC unroll 4
        for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 2
            for (int n = 0; n < num_blocks; ++n) {
                dots[m][n].add(fours[i][n], x[m * x_stride], i);
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 2
        for (int n = 0; n < num_blocks; ++n) {
            sums[m][n] = dots[m][n].scaled(scales[n], x[m * x_stride], sums[m][n]);
        }
    }
}

// Two scales take twice the sums, which leave no registers for as many rows.
template <class V, class W>
constexpr int rows_together = parts_of<W> == 1 ? V::num_together : (V::num_together + 1) / 2;

// Some rows: weights are unpacked for all of them. What is prefetched meanwhile is the next tile's:
// it lies as far behind this one's everywhere.
template <class V, class W, int num_blocks> void multiply_rows(const Int16Operands &o, int rows) {
    const ptrdiff_t ahead = o.next - o.blocks;
    typename V::Floats sums[max_tall_rows][num_blocks];
    const auto each_sum = [&](const auto &body) {
        for (int m = 0; m < rows; ++m) {
            for (int n = 0; n < num_blocks; ++n) {
                body(sums[m][n], o.out + size_t(m) * o.out_stride + n * lanes);
            }
        }
    };
    each_sum(
        [&](auto &sum, const float *out) { sum = o.accumulate ? V::load(out) : V::set(0.0f); });
    each_group<W>(o, [&](const uint8_t *unit, int g, const Int16Group *x) {
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
        for (; m + rows_together<V, W> <= rows; m += rows_together<V, W>) {
            add_rows<V, W, rows_together<V, W>>(fours, scales, x + m * o.x_stride, o.x_stride,
                                                sums + m);
        }
        if constexpr (rows_together<V, W> > 2) {
            for (; m + 2 <= rows; m += 2) {
                add_rows<V, W, 2>(fours, scales, x + m * o.x_stride, o.x_stride, sums + m);
            }
        }
        for (; m < rows; ++m) {
            add_rows<V, W, 1>(fours, scales, x + m * o.x_stride, o.x_stride, sums + m);
        }
    });
    each_sum([](const auto &sum, float *out) { V::store(out, sum); });
}

// Call multiply(operands, rows) for parts of all rows and columns, in order along the columns.
template <class W, class Body>
void each_slab(const Int16Operands &o, int rows, const Body &multiply) {
    for (int g = 0; g < o.num_groups; g += slab_groups) {
        Int16Operands slab = o;
        slab.blocks += g * quantized_group / W::unit * unit_bytes<W>;
        slab.x += g;
        slab.num_groups = o.num_groups - g < slab_groups ? o.num_groups - g : slab_groups;
        slab.accumulate = g > 0;
        if (g + slab_groups < o.num_groups) {
            slab.next = slab.blocks + slab_groups * quantized_group / W::unit * unit_bytes<W>;
        }
        for (int m = 0; m < rows; m += max_tall_rows) {
            multiply(slab.at_row(m), rows - m < max_tall_rows ? rows - m : max_tall_rows);
        }
    }
}

template <class V, class W> void multiply_blocks(const Int16Operands &o, int rows, int num_blocks) {
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
template <class V> void gemm_int8(const Int16Operands &o, int rows, int num_blocks) {
    multiply_blocks<V, Int8Bytes<V>>(o, rows, num_blocks);
}

// Of a format that `rounds_to_integers`.
template <class V>
void gemm_int16(Format format, const Int16Operands &o, int rows, int num_blocks) {
    if (format == Format::int8) {
        return multiply_blocks<V, Int8Bytes<V>>(o, rows, num_blocks);
    }
    with_block<V>(format,
                  [&](auto block) { multiply_blocks<V, decltype(block)>(o, rows, num_blocks); });
}

} // namespace headrace
