// The sum of a row and a block in the products of integers (gemm_int16.h). Columns come 32 at a
// time, with their scales, and are added in order.
#pragma once
#include "cpu/gemm.h"

namespace headrace {

// int8 as bytes, four columns of each lane at a time: packed_blocks.h has the other formats. A sum
// of products starts from what `zero` adds up to.
template <class V> struct Int8Bytes {
    static constexpr int unit = quantized_group, group = unit, chunk = 4;
    static constexpr int header_bytes = 32, chunk_bytes = 64, sign = 0, zero = 128;
    static constexpr bool has_steps = false;
    using Scales = typename Q8Block<V>::Scales;
    static auto four(const uint8_t *chunk_start, int) { return V::weights(chunk_start); }
    static auto start(const Int16Group &x, int) { return V::dots(offset_of_128<V>(x.offset)); }
};

// Call body(a block) of a format that `rounds_to_integers`.
template <class V, class Body> void with_integers(Format format, const Body &body) {
    if (format == Format::int8) {
        body(Int8Bytes<V>{});
    } else {
        with_block<V>(format, body);
    }
}

constexpr int num_fours = quantized_group / 4;

// The i-th four columns of the g-th 32 of a unit.
template <class W>
inline __attribute__((always_inline)) auto four_of(const uint8_t *unit_start, int g, int i) {
    constexpr int chunks = quantized_group / W::chunk, fours = W::chunk / 4;
    const uint8_t *chunk = unit_start + W::header_bytes + (g * chunks + i / fours) * W::chunk_bytes;
    return W::four(chunk, i % fours);
}

// Prefetch the i-th part of what the g-th 32 columns of a unit take, with their share of headers,
// so far ahead of them. It goes into the nearest cache (3) or into L2 (2).
template <class W, int locality = 3>
inline __attribute__((always_inline)) void fetch_part(const uint8_t *unit_start, int g, int i,
                                                      ptrdiff_t ahead) {
    constexpr int group_bytes = unit_bytes<W> / (W::unit / quantized_group);
    constexpr int lines = (group_bytes + 63) / 64;
    for (int line = i * lines / num_fours; line < (i + 1) * lines / num_fours; ++line) {
        __builtin_prefetch(unit_start + g * group_bytes + line * 64 + ahead, 0, locality);
    }
}

// Of 32 columns, which have one scale or two.
template <class W> constexpr int parts_of = quantized_group / W::group;

template <class W> struct GroupScales {
    typename W::Scales first, last;

    GroupScales(const uint8_t *unit, int g)
        : first(unit, g * parts_of<W>), last(unit, (g + 1) * parts_of<W> - 1) {}
};

// Minima are integers under a scale of the unit.
template <class W> constexpr bool has_floors = W::has_steps && W::sign != 0;

// Call body(part, first, last) for the parts of a group, with the fours of columns of each.
template <class W, class Body>
inline __attribute__((always_inline)) void each_fours(const Body &body) {
    body(std::integral_constant<int, 0>{}, 0, num_fours / parts_of<W>);
    if constexpr (parts_of<W> == 2) {
        body(std::integral_constant<int, 1>{}, num_fours / 2, num_fours);
    }
}

// A row times one block. Where the scales of groups are integers, so is the dot of a unit. The
// scales of the unit and of its activations come last. `V::to_floats` rounds it.
template <class V, class W> struct BlockSum {
    using Floats = typename V::Floats;
    Floats total;
    typename V::Ints steps; // of this unit
    Floats floors;          // likewise

    void begin_unit() {
        if constexpr (W::has_steps) {
            steps = V::steps(0);
            floors = V::set(0.0f);
        }
    }
    // The numbers of a part of a group, times those of `x`; floors are added apart.
    __attribute__((always_inline)) void
    add_part(const typename V::Dots &dots, const typename W::Scales &scales, const Int16Group &x) {
        if constexpr (W::has_steps) {
            steps = V::plus(steps, V::times(V::to_steps(dots), scales.steps));
        } else {
            add_group(V::to_floats(dots), scales.scale, x);
            if constexpr (W::sign != 0) {
                add_minimum(scales.minimum, x);
            }
        }
    }
    template <class Scales> void end_unit(const Scales &scales, const GroupSums &x) {
        if constexpr (W::has_steps) {
            add_group(V::to_floats(steps), scales.unit_scale, x);
            if constexpr (W::sign != 0) {
                total = V::fma(floors, scales.unit_floor, total);
            }
        }
    }

    template <int part> void add_floor(Floats floor, const GroupSums &x) {
        floors = V::fma(floor, V::set(x.sum_of(part, parts_of<W>)), floors);
    }
    void add_group(Floats dots, Floats scale, const GroupSums &x) {
        total = V::fma(dots, V::mul(scale, V::set(x.scale)), total);
    }
    // Where a unit is a group.
    void add_minimum(Floats minimum, const GroupSums &x) {
        total = V::fma(minimum, V::set(W::sign * x.sum), total);
    }
};

// The part of all columns that begins at group `g`, of at most so many groups.
template <class W>
Int16Operands slab_of(const Int16Operands &o, int g, int most_groups = slab_groups) {
    const auto unit_at = [](int group) {
        return ptrdiff_t(group * quantized_group / W::unit) * unit_bytes<W>;
    };
    Int16Operands slab = o;
    slab.blocks += unit_at(g);
    slab.x += g;
    slab.num_groups = o.num_groups - g < most_groups ? o.num_groups - g : most_groups;
    slab.accumulate = g > 0;
    if (g + most_groups < o.num_groups) {
        slab.next = slab.blocks + unit_at(most_groups);
    }
    return slab;
}

// Rows of a slab as pairs of 16 bits, in room behind that of a panel.
template <class V> const RowPairs *pairs_of(const Int16Operands &slab, int rows, void *room) {
    auto *const pairs =
        reinterpret_cast<RowPairs *>(static_cast<uint8_t *>(room) + most_panel_bytes);
    for (int m = 0; m < rows; ++m) {
        for (int i = 0; i < slab.num_groups; ++i) {
            V::store_pairs(slab.x[size_t(m) * slab.x_stride + i], pairs[m * slab_groups + i]);
        }
    }
    return pairs;
}

} // namespace headrace
