// What Intel's tiles multiply in kernels_amx_int16.cpp: rows and weights of some columns, as their
// instructions read them. Files include it behind their target.
#pragma once
#include "cpu/avx512_vectors.h"
#include "cpu/gemm_int16.h"

#include <algorithm>
#include <cstring>

namespace headrace {

namespace {

using V = Avx512;

constexpr int tile_rows = 16;

// Columns that one instruction multiplies, of sixteen rows.
constexpr int quarter_columns = 64, num_quarters = super_block / quarter_columns;
constexpr int quarter_groups = quarter_columns / quantized_group;

// Rows of a slab: sixteen times 64 high bytes, then the low ones, for each 64 columns. There are
// zeros behind the last row.
struct RowTile {
    uint8_t numbers[num_quarters][2][tile_rows][quarter_columns];
    GroupSums sums[slab_groups][tile_rows];

    void take(const Int16Operands &slab, int rows) {
        for (int m = 0; m < tile_rows; ++m) {
            for (int g = 0; g < slab.num_groups; ++g) {
                static constexpr Int16Group none{};
                const Int16Group &group = m < rows ? slab.x[size_t(m) * slab.x_stride + g] : none;
                std::memcpy(high_of(g) + m * quarter_columns, group.numbers, quantized_group);
                std::memcpy(low_of(g) + m * quarter_columns, group.numbers + quantized_group,
                            quantized_group);
                sums[g][m] = group;
            }
        }
    }
    // Of a group, in the first row.
    uint8_t *high_of(int g) { return bytes_of(g, 0); }
    uint8_t *low_of(int g) { return bytes_of(g, 1); }
    const uint8_t *high_of(int g) const { return const_cast<RowTile *>(this)->bytes_of(g, 0); }
    const uint8_t *low_of(int g) const { return const_cast<RowTile *>(this)->bytes_of(g, 1); }

private:
    uint8_t *bytes_of(int g, int byte) {
        return numbers[g / quarter_groups][byte][0] + g % quarter_groups * quantized_group;
    }
};

constexpr int panel_blocks = 4;

// Weights of some blocks and the columns of a slab, where each group has a scale of its own.
template <class W> struct GroupPanel {
    uint8_t weights[panel_blocks][slab_groups][num_fours][64];
    struct Scales {
        V::Floats scale, minimum;
    } scales[panel_blocks][slab_groups];

    void decode(const Int16Operands &o, int count) {
        for (int n = 0; n < count; ++n) {
            const uint8_t *unit = o.blocks + n * o.block_bytes;
            for (int g = 0; g < o.num_groups; ++g, unit += unit_bytes<W>) {
                const __m512i zero = _mm512_set1_epi8(char(W::zero));
#pragma GCC unroll 8
                for (int i = 0; i < num_fours; ++i) {
                    _mm512_store_si512(weights[n][g][i],
                                       _mm512_sub_epi8(four_of<W>(unit, 0, i), zero));
                }
                const typename W::Scales from(unit, 0);
                scales[n][g].scale = from.scale;
                if constexpr (W::sign != 0) {
                    scales[n][g].minimum = from.minimum;
                }
            }
        }
    }
};

// The same where groups have integer scales: weights are multiplied by them. They are two bytes
// then, if one is too few: all low ones of 64 columns before all high ones.
template <class W> struct UnitPanel {
    static constexpr int num_bytes = W::packing.most_weight() < 128 ? 1 : 2;
    uint8_t weights[panel_blocks][num_quarters][num_bytes][tile_rows][64];
    V::Floats floors[panel_blocks][slab_groups][parts_of<W>]; // integers beside `unit_floor`
    struct UnitScales {
        V::Floats unit_scale, unit_floor;
    } scales[panel_blocks];

    void decode(const Int16Operands &o, int count) {
        for (int n = 0; n < count; ++n) {
            const uint8_t *unit = o.blocks + n * o.block_bytes;
            for (int g = 0; g < slab_groups; ++g) {
                decode_group(unit, g, n);
            }
        }
    }

private:
    void decode_group(const uint8_t *unit, int g, int n) {
        const GroupScales<W> from(unit, g);
        auto &quarter = weights[n][g / quarter_groups];
        const int first = g % quarter_groups * num_fours;
#pragma GCC unroll 8
        for (int i = 0; i < num_fours; ++i) {
            const auto steps = V::both((4 * i < W::group ? from.first : from.last).steps);
            __m512i even, odd;
            V::to_pairs<W::zero>(four_of<W>(unit, g, i), even, odd);
            even = V::times_pairs(even, steps);
            odd = V::times_pairs(odd, steps);
            _mm512_store_si512(quarter[0][first + i], low_bytes(even, odd));
            if constexpr (num_bytes == 2) {
                _mm512_store_si512(quarter[1][first + i], high_bytes(even, odd));
            }
        }
        scales[n].unit_scale = from.first.unit_scale;
        if constexpr (has_floors<W>) {
            scales[n].unit_floor = from.first.unit_floor;
            floors[n][g][0] = from.first.floor;
            floors[n][g][parts_of<W> - 1] = from.last.floor;
        }
    }
    // Of numbers of 16 bits; low ones are signed, too.
    static __m512i low_bytes(__m512i even, __m512i odd) {
        return _mm512_mask_blend_epi8(odds, even, _mm512_slli_epi16(odd, 8));
    }
    static __m512i high_bytes(__m512i even, __m512i odd) {
        const __m512i half = _mm512_set1_epi16(128);
        even = _mm512_srli_epi16(_mm512_add_epi16(even, half), 8);
        return _mm512_mask_blend_epi8(odds, even, _mm512_add_epi16(odd, half));
    }
    static constexpr __mmask64 odds = 0xaaaaaaaaaaaaaaaa;
};

} // namespace

} // namespace headrace
