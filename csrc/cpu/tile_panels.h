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

// How 32 columns are multiplied: bytes of weights by the low bytes of rows, or by low and high
// ones. Or weights have two bytes, too.
enum class Kind { byte, two_bytes, wide };

template <class W, int bits>
constexpr Kind kind_of = bits == 8          ? Kind::byte
                         : parts_of<W> == 2 ? Kind::wide
                                            : Kind::two_bytes;

// Rows of a slab, in each group all high bytes before all low ones. There are zeros behind the
// last row.
struct RowTile {
    uint8_t numbers[slab_groups][tile_rows][2][quantized_group];
    GroupSums sums[slab_groups][tile_rows];

    void take(const Int16Operands &slab, int rows) {
        for (int m = 0; m < tile_rows; ++m) {
            for (int g = 0; g < slab.num_groups; ++g) {
                if (m < rows) {
                    const Int16Group &group = slab.x[size_t(m) * slab.x_stride + g];
                    std::memcpy(numbers[g][m], group.numbers, sizeof group.numbers);
                    sums[g][m] = group;
                } else {
                    std::memset(numbers[g][m], 0, sizeof numbers[g][m]);
                    sums[g][m] = {};
                }
            }
        }
    }
};

// Weights of some blocks and the columns of a slab.
template <class W, Kind kind> struct TilePanel {
    static constexpr int num_blocks = 4;
    static constexpr int rows = kind == Kind::wide ? 2 * num_fours : num_fours; // of tiles
    uint8_t weights[num_blocks][slab_groups][rows][64];
    struct Scales {
        V::Floats scale;               // of a group
        V::Ints steps;                 // likewise, where it is an integer
        V::Floats floors[parts_of<W>]; // minima, or integers beside `unit_floor`
    } scales[num_blocks][slab_groups];
    struct UnitScales {
        V::Floats unit_scale, unit_floor;
    } of_unit[num_blocks];

    void decode(const Int16Operands &o, int count) {
        constexpr int unit_groups = W::unit / quantized_group;
        for (int n = 0; n < count; ++n) {
            const uint8_t *block = o.blocks + n * o.block_bytes;
            for (int g = 0; g < o.num_groups; ++g) {
                const uint8_t *unit = block + g / unit_groups * unit_bytes<W>;
                decode_weights(unit, g % unit_groups, weights[n][g]);
                decode_scales({unit, g % unit_groups}, scales[n][g], of_unit[n]);
            }
        }
    }

private:
    static void decode_weights(const uint8_t *unit, int g, uint8_t (&out)[rows][64]) {
        const GroupScales<W> from(unit, g);
#pragma GCC unroll 8
        for (int i = 0; i < num_fours; ++i) {
            const auto four = four_of<W>(unit, g, i);
            if constexpr (kind == Kind::wide) {
                const auto steps = V::both((4 * i < W::group ? from.first : from.last).steps);
                __m512i even, odd;
                V::to_pairs<W::zero>(four, even, odd);
                split(V::times_pairs(even, steps), V::times_pairs(odd, steps), out[i],
                      out[num_fours + i]);
            } else {
                const __m512i zero = _mm512_set1_epi8(char(W::zero));
                _mm512_store_si512(out[i], _mm512_sub_epi8(four, zero));
            }
        }
    }
    // Numbers of 16 bits as bytes, of which the low ones are signed, too.
    static void split(__m512i even, __m512i odd, uint8_t *low, uint8_t *high) {
        const __mmask64 odds = 0xaaaaaaaaaaaaaaaa;
        const __m512i half = _mm512_set1_epi16(128);
        _mm512_store_si512(low, _mm512_mask_blend_epi8(odds, even, _mm512_slli_epi16(odd, 8)));
        even = _mm512_srli_epi16(_mm512_add_epi16(even, half), 8);
        odd = _mm512_add_epi16(odd, half);
        _mm512_store_si512(high, _mm512_mask_blend_epi8(odds, even, odd));
    }
    static void decode_scales(const GroupScales<W> &from, Scales &own, UnitScales &of_unit) {
        if constexpr (W::has_steps) {
            own.steps = from.first.steps;
            of_unit.unit_scale = from.first.unit_scale;
        } else {
            own.scale = from.first.scale;
        }
        if constexpr (has_floors<W>) {
            of_unit.unit_floor = from.first.unit_floor;
            own.floors[0] = from.first.floor;
            own.floors[parts_of<W> - 1] = from.last.floor;
        } else if constexpr (W::sign != 0) {
            own.floors[0] = from.first.minimum;
        }
    }
};

} // namespace

} // namespace headrace
