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

constexpr int tile_rows = band_rows;
constexpr int few_tile_rows = 8; // whose high and low bytes are the rows of one tile

// Columns that one instruction multiplies, of sixteen rows.
constexpr int quarter_columns = 64, num_quarters = super_block / quarter_columns;
constexpr int quarter_groups = quarter_columns / quantized_group;

// Weights are fetched so many panels before they are decoded, into L2: in the nearest cache they
// would push out what the tiles load.
constexpr int panels_ahead = 2, panel_locality = 2;

// Rows of a slab: sixteen times 64 high bytes, then the low ones, for each 64 columns. Of eight
// rows both are in one tile. There are zeros behind the last row.
struct RowTile {
    uint8_t numbers[num_quarters][2][tile_rows][quarter_columns];
    GroupSums sums[slab_groups][tile_rows];

    // Of few rows, `few_tile_rows` are read.
    void take(const Int16Operands &slab, int rows) {
        const int tile = rows > few_tile_rows ? tile_rows : few_tile_rows;
        for (int m = 0; m < tile; ++m) {
            for (int g = 0; g < slab.num_groups; ++g) {
                static constexpr Int16Group none{};
                const Int16Group &group = m < rows ? slab.x[size_t(m) * slab.x_stride + g] : none;
                uint8_t *const high = bytes_of(g) + m * quarter_columns;
                std::memcpy(high, group.numbers, quantized_group);
                std::memcpy(high + tile * quarter_columns, group.numbers + quantized_group,
                            quantized_group);
                sums[g][m] = group;
            }
        }
    }
    // Of a group, in the first row: high ones, which the low ones follow.
    const uint8_t *high_of(int g) const { return const_cast<RowTile *>(this)->bytes_of(g); }
    const uint8_t *low_of(int g) const { return high_of(g) + sizeof numbers[0][0]; }

private:
    uint8_t *bytes_of(int g) {
        return numbers[g / quarter_groups][0][0] + g % quarter_groups * quantized_group;
    }
};

static_assert(sizeof(RowTile) == slab_band_bytes);

// Weights of some blocks and the columns of a slab, where each group has a scale of its own.
template <class W> struct GroupPanel {
    static constexpr int num_blocks = 2;
    uint8_t weights[num_blocks][slab_groups][num_fours][64];
    struct Scales {
        struct {
            V::Floats scale, minimum;
        } groups[num_blocks][slab_groups];

        __attribute__((always_inline)) void decode(const uint8_t *units, int g, int n) {
            const typename W::Scales from(units + g * unit_bytes<W>, 0);
            groups[n][g].scale = from.scale;
            if constexpr (W::sign != 0) {
                groups[n][g].minimum = from.minimum;
            }
        }
    };

    // Weights of the g-th group of the n-th block, of which a slab begins at `units`. What lies
    // `ahead` of it is fetched.
    __attribute__((always_inline)) void decode(const uint8_t *units, int g, int n,
                                               ptrdiff_t ahead) {
        const uint8_t *unit = units + g * unit_bytes<W>;
        const __m512i zero = _mm512_set1_epi8(char(W::zero));
#pragma GCC unroll 8
        for (int i = 0; i < num_fours; ++i) {
            fetch_part<W, panel_locality>(unit, 0, i, ahead);
            _mm512_store_si512(weights[n][g][i], _mm512_sub_epi8(four_of<W>(unit, 0, i), zero));
        }
    }
};

// The same of one block where groups have integer scales: weights are multiplied by them. Where one
// byte is too few, they are two: all low ones of 64 columns, which are unsigned, before all high
// ones. Two panels fit the nearest cache beside a tile of rows: stores that miss it take longer
// than all else.
//
// Codes that are unsigned are multiplied as they are, two in a word: no product leaves its byte.
// Where the scale has six bits, these are three and three, of a product each.
template <class W> struct UnitPanel {
    static constexpr int num_blocks = 1;
    static constexpr bool has_plain_codes = W::zero == 0 && !W::packing.has_table();
    static constexpr int num_bytes = W::packing.most_weight() < 128 ? 1 : 2;
    static_assert(has_plain_codes || num_bytes == 2); // low bytes are multiplied as unsigned
    static constexpr int byte_bits = has_plain_codes ? 3 : 8; // from the low one to the high one
    uint8_t weights[num_quarters][num_bytes][tile_rows][64];
    struct Scales {
        V::Floats floors[slab_groups][parts_of<W>]; // integers beside `unit_floor`
        V::Floats unit_scale, unit_floor;

        __attribute__((always_inline)) void decode(const uint8_t *unit, int g, int) {
            const GroupScales<W> from(unit, g);
            unit_scale = from.first.unit_scale;
            if constexpr (has_floors<W>) {
                unit_floor = from.first.unit_floor;
                floors[g][0] = from.first.floor;
                floors[g][parts_of<W> - 1] = from.last.floor;
            }
        }
    };

    __attribute__((always_inline)) void decode(const uint8_t *unit, int g, int, ptrdiff_t ahead) {
        const GroupScales<W> from(unit, g);
        const Scaled first(from.first.steps), last(from.last.steps);
        uint8_t *const low = weights[g / quarter_groups][0][g % quarter_groups * num_fours];
#pragma GCC unroll 8
        for (int i = 0; i < num_fours; ++i) {
            fetch_part<W, panel_locality>(unit, g, i, ahead);
            const Bytes bytes = (4 * i < W::group ? first : last)(four_of<W>(unit, g, i));
            _mm512_store_si512(low + i * 64, bytes.low);
            if constexpr (num_bytes == 2) {
                _mm512_store_si512(low + (tile_rows + i) * 64, bytes.high);
            }
        }
    }

private:
    struct Bytes {
        __m512i low, high;
    };

    // Codes times the integer scale of their group.
    struct ScaledCodes {
        __m512i low_steps, high_steps;

        explicit ScaledCodes(__m512i steps) {
            const __m512i both = V::lowest_bytes(steps),
                          bits = _mm512_set1_epi16((1 << byte_bits) - 1);
            low_steps = num_bytes == 1 ? both : _mm512_and_si512(both, bits);
            high_steps = _mm512_srli_epi16(both, byte_bits);
        }
        Bytes operator()(__m512i codes) const {
            static_assert(num_bytes == 1 || W::packing.most_steps < 1 << 2 * byte_bits);
            return {V::times_pairs(codes, low_steps), V::times_pairs(codes, high_steps)};
        }
    };
    struct ScaledNumbers {
        typename V::template ScaledPairs<W::zero> scaled;

        explicit ScaledNumbers(__m512i steps) : scaled(steps) {}
        Bytes operator()(__m512i codes) const {
            __m512i even, odd;
            scaled(codes, even, odd);
            return {_mm512_mask_blend_epi8(odds, even, _mm512_slli_epi16(odd, 8)),
                    _mm512_mask_blend_epi8(odds, _mm512_srli_epi16(even, 8), odd)};
        }
    };
    using Scaled = std::conditional_t<has_plain_codes, ScaledCodes, ScaledNumbers>;

    static constexpr __mmask64 odds = 0xaaaaaaaaaaaaaaaa;
};

// The panels of all slabs, in the order of their blocks. While the tiles work on one, the next is
// decoded little by little, and what comes behind that is fetched. Where the tiles load each group
// once, the next panel takes its place at once. Scales stay for two panels longer.
template <class W, class Panel> class PanelStream {
public:
    using Scales = typename Panel::Scales;
    struct Room {
        Panel panels[2];
        Scales scales[4];
    };
    static_assert(sizeof(Room) <= most_panel_bytes);

    PanelStream(const Int16Operands &o, int num_blocks, void *room, bool is_read_once)
        : o_(o), num_blocks_(num_blocks), is_read_once_(is_read_once),
          room_(*static_cast<Room *>(room)) {
        begin(0, 1);
    }

    // The next panel, on which the tiles work for so many turns.
    const Panel &next(int turns) {
        while (item_ < num_items_) {
            decode_item();
        }
        begin(index_ + 1, turns);
        return panel(index_ - 1);
    }
    // Of that panel.
    const Scales &scales() const { return room_.scales[(index_ - 1) % 4]; }
    void turn() {
        for (due_ += num_items_; due_ >= turns_; due_ -= turns_) {
            if (item_ < num_items_) {
                decode_item();
            }
        }
    }

private:
    struct Part { // of a slab
        const uint8_t *blocks;
        int num_groups, num_blocks;
    };

    Panel &panel(int index) { return room_.panels[is_read_once_ ? 0 : index % 2]; }
    Part part_of(int index) const {
        const int per_slab = (num_blocks_ + Panel::num_blocks - 1) / Panel::num_blocks;
        const int g = index / per_slab * slab_groups, n = index % per_slab * Panel::num_blocks;
        if (g >= o_.num_groups) {
            return {o_.next + n * o_.block_bytes, 0, 0};
        }
        const Int16Operands slab = slab_of<W>(o_, g);
        return {slab.blocks + n * o_.block_bytes, slab.num_groups,
                std::min(Panel::num_blocks, num_blocks_ - n)};
    }
    void begin(int index, int turns) {
        index_ = index;
        part_ = part_of(index);
        ahead_ = part_of(index + panels_ahead).blocks - part_.blocks;
        num_items_ = part_.num_groups * part_.num_blocks;
        turns_ = turns;
        item_ = due_ = block_ = group_ = 0;
    }
    __attribute__((noinline)) void decode_item() {
        const uint8_t *units = part_.blocks + block_ * o_.block_bytes;
        panel(index_).decode(units, group_, block_, ahead_);
        if (group_ == 0) {
            for (int g = 0; g < part_.num_groups; ++g) {
                room_.scales[index_ % 4].decode(units, g, block_);
            }
        }
        ++item_;
        if (++group_ == part_.num_groups) {
            group_ = 0;
            ++block_;
        }
    }

    const Int16Operands &o_;
    const int num_blocks_;
    const bool is_read_once_;
    Room &room_;
    int index_;
    Part part_;
    ptrdiff_t ahead_;
    int item_, num_items_, turns_, due_;
    int block_, group_; // of the item
};

} // namespace

} // namespace headrace
