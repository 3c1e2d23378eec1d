// The products of gemm_int16.h for many rows by Intel's tiles (AMX): sixteen rows by sixteen
// columns.
//
// Bytes are multiplied by bytes, and a number of 16 bits is two of them. Sums of high and of low
// bytes are added as integers. So the dot of a group is the same number as there, and what follows
// is in the same order. A row has the same bits. Where groups have integer scales, weights are
// multiplied by them, and sums stay in the tiles through all 256 columns of a unit.
//
// A product of tiles takes 16 cycles, whatever its steps of k: 64 at most. Storing a tile takes as
// many, in which a core does little but multiply other tiles (Xeon, family 6 model 207).
#if defined(__x86_64__)
#include "cpu/operands.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

// GCC 12 takes the undefined operand of its own intrinsics for a variable of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-int8")
#include "cpu/kernels.h"
#include "cpu/kernels_amx.h"
#include "cpu/tile_panels.h"

namespace headrace {

namespace {

// Vectors are faster below: they read int8 as it is, and multiply scales that are integers for 32
// columns at once.
template <class W, int num_bytes> constexpr int fewest_tile_rows() {
    if constexpr (std::is_same_v<W, Int8Bytes<V>>) {
        return num_bytes == 1 ? 16 : 14;
    } else if constexpr (W::has_steps) {
        return UnitPanel<W>::num_bytes == 1 ? 5 : parts_of<W> == 1 ? 8 : 10;
    } else {
        return W::sign == 0 ? 12 : 14;
    }
}

template <class W, int num_bytes> bool suits_tiles(int rows) {
    // Sums of both bytes leave one tile.
    constexpr bool suits_few = !W::has_steps && W::sign == 0 && !std::is_same_v<W, Int8Bytes<V>>;
    const bool is_few = rows == few_tile_rows - 1 || rows == few_tile_rows;
    return rows >= fewest_tile_rows<W, num_bytes>() || (suits_few && is_few);
}

// The compiler does not see that the instructions read memory.
void fence() {
    asm volatile("" ::: "memory");
}

// Tiles 0 to 3 have sums, 4 and 5 the high and the low bytes of rows, 6 and 7 weights.
struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    explicit Shape(int columns) {
        for (int tile = 0; tile < 8; ++tile) {
            row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? columns : 64);
            rows[tile] = uint8_t(tile < 6 ? tile_rows : columns / 4);
        }
    }
};

// Tiles are told apart by number: the compiler's own functions take literals alone.
template <int tile> void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int tile> void load(const void *from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(tile), "r"(from), "r"(stride));
}
// What is loaded once does not go into the nearest cache.
template <int tile> void load_past_cache(const void *from, int64_t stride) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(tile), "r"(from), "r"(stride));
}
template <int tile> void store(void *to) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(tile), "r"(to), "r"(int64_t(64))
                 : "memory");
}
template <int sum, int x, int weights, bool is_signed = true> void add_bytes() {
    if constexpr (is_signed) {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(x), "i"(weights));
    } else {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(x), "i"(weights));
    }
}

// Sums in tiles, as stored: of low bytes, of those a byte higher, and so on. Of four, the last two
// are `bits` higher than the first two.
template <int num_sums, int bits = 0> struct Dots {
    alignas(64) int32_t sums[num_sums][tile_rows][lanes];

    // Of tiles from `first` on.
    template <int first> __attribute__((always_inline)) void take() {
        store<first>(sums[0]);
        if constexpr (num_sums > 1) {
            store<first + 1>(sums[1]);
        }
        if constexpr (num_sums > 2) {
            store<first + 2>(sums[2]);
        }
        if constexpr (num_sums > 3) {
            store<first + 3>(sums[3]);
        }
    }
    void *tile(int i) { return sums[i]; }
    __attribute__((always_inline)) V::Ints whole(int m) const {
        if constexpr (num_sums == 4) {
            return V::plus(_mm512_slli_epi32(from(m, 3, 2), bits), from(m, 1, 0));
        }
        return from(m, num_sums - 1, 0);
    }

private:
    __attribute__((always_inline)) V::Ints from(int m, int last, int first) const {
        V::Ints dots = _mm512_load_si512(sums[last][m]);
        for (int i = last - 1; i >= first; --i) {
            dots = V::plus(_mm512_slli_epi32(dots, 8), _mm512_load_si512(sums[i][m]));
        }
        return dots;
    }
};

// The same of few rows: sums of high bytes, and of low ones. Those of a second tile are `bits`
// higher.
template <int num_weights, int bits = 0> struct FewDots {
    alignas(64) int32_t sums[num_weights][2][few_tile_rows][lanes];

    // Of tiles from `first` on.
    template <int first> __attribute__((always_inline)) void take() {
        store<first>(sums[0]);
        if constexpr (num_weights > 1) {
            store<first + 1>(sums[1]);
        }
    }
    void *tile(int i) { return sums[i]; }
    __attribute__((always_inline)) V::Ints whole(int m) const {
        if constexpr (num_weights > 1) {
            return V::plus(_mm512_slli_epi32(from(1, m), bits), from(0, m));
        }
        return from(0, m);
    }

private:
    __attribute__((always_inline)) V::Ints from(int i, int m) const {
        return V::plus(_mm512_slli_epi32(_mm512_load_si512(sums[i][0][m]), 8),
                       _mm512_load_si512(sums[i][1][m]));
    }
};

// Some rows of a slab and a panel, where each group has a scale: one block after the other. Rows
// have two bytes, or one where activations have 8 bits. The tiles are ahead of the vectors: a group
// is multiplied, the one before it stored, and the one before that added.
template <class W, int num_bytes> struct GroupTiles {
    static constexpr int columns = quantized_group;
    using Panel = GroupPanel<W>;
    using Stream = PanelStream<W, Panel>;
    static constexpr bool ends_with_few = true; // the last rows of many, if eight suffice
    static int turns(int num_groups) { return num_groups; } // of a block and a tile of rows
    template <int num_rows> class Product;
};

template <class W, int num_bytes> template <int num_rows> class GroupTiles<W, num_bytes>::Product {
public:
    explicit Product(Stream &stream) : stream_(stream) {}

    // By a panel, whose blocks begin with those of `o`.
    void multiply(const Panel &panel, const RowTile *x, const Int16Operands &o, int rows,
                  int num_blocks) {
        panel_ = &panel;
        scales_ = &stream_.scales();
        num_groups_ = o.num_groups;
        for (int m = 0; m < rows; m += num_rows, ++x) {
            x_ = x;
            for (int n = 0; n < num_blocks; ++n) {
                multiply_block(o.at_row(m).at_block(n), rows - m, n);
            }
        }
    }
    void finish() {}

private:
    static constexpr bool is_few = num_rows == few_tile_rows; // both bytes are multiplied at once
    using Sums = BlockSum<V, W>[num_rows];
    using GroupDots = std::conditional_t<is_few, FewDots<1>, Dots<num_bytes>>;

    void multiply_block(const Int16Operands &o, int rows, int n) {
        Sums sums;
        each(sums, [&](auto &sum, int m) __attribute__((always_inline)) {
            const bool adds = o.accumulate && m < rows;
            sum.total = adds ? V::load(o.out + size_t(m) * o.out_stride) : V::set(0.0f);
        });
        multiply_group<0>(n, 0);
        for (int g = 0; g <= num_groups_; g += 2) {
            pass_group<0, 2>(n, g, sums);
            pass_group<2, 0>(n, g + 1, sums);
        }
        each(sums, [&](auto &sum, int m) __attribute__((always_inline)) {
            if (m < rows) {
                V::store(o.out + size_t(m) * o.out_stride, sum.total);
            }
        });
    }
    template <class Body>
    static __attribute__((always_inline)) void each(Sums &sums, const Body &body) {
#pragma GCC unroll 16
        for (int m = 0; m < num_rows; ++m) {
            body(sums[m], m);
        }
    }
    // Into tiles from `first` on.
    template <int first> __attribute__((always_inline)) void multiply_group(int n, int g) {
        if (g >= num_groups_) {
            return;
        }
        load<6>(panel_->weights[n][g], 64);
        load<5>(is_few ? x_->high_of(g) : x_->low_of(g), quarter_columns);
        clear<first>();
        add_bytes<first, 5, 6>();
        if constexpr (num_bytes > 1 && !is_few) {
            load<4>(x_->high_of(g), quarter_columns);
            clear<first + 1>();
            add_bytes<first + 1, 4, 6>();
        }
    }
    // A group that is in tiles from `own` on; the next goes to others.
    template <int own, int next>
    __attribute__((always_inline)) void pass_group(int n, int g, Sums &sums) {
        multiply_group<next>(n, g + 1);
        if (g < num_groups_) {
            stream_.turn();
            dots_[g % 2].template take<own>();
        }
        if (g > 0 && g <= num_groups_) {
            add_dots(dots_[(g - 1) % 2], n, g - 1, sums);
        }
    }
    __attribute__((always_inline)) void add_dots(const GroupDots &dots, int n, int g, Sums &sums) {
        const auto &scales = scales_->groups[n][g];
        each(sums, [&](auto &sum, int m) __attribute__((always_inline)) {
            const GroupSums &x = x_->sums[g][m];
            sum.add_group(V::to_floats(dots.whole(m)), scales.scale, x);
            if constexpr (W::sign != 0) {
                sum.add_minimum(scales.minimum, x);
            }
        });
    }

    const Panel *panel_;
    const typename Panel::Scales *scales_;
    const RowTile *x_;
    int num_groups_;
    Stream &stream_;
    GroupDots dots_[2];
};

// The same where groups have integer scales. While a block is multiplied, vectors add the one
// before the last. Its sums have left the tiles by then: a load that waits for a tile's store holds
// up what comes next.
template <class W> struct UnitTiles {
    static constexpr int columns = quarter_columns;
    using Panel = UnitPanel<W>;
    using Stream = PanelStream<W, Panel>;
    static constexpr bool ends_with_few = false;
    static int turns(int) { return num_quarters; }
    template <int num_rows> class Product;
};

template <class W> template <int num_rows> class UnitTiles<W>::Product {
public:
    explicit Product(Stream &stream) : stream_(stream) {}

    // By a panel. The last sums are added by the next calls, or at the end.
    void multiply(const Panel &panel, const RowTile *x, const Int16Operands &o, int rows, int) {
        const auto accumulated = __mmask16(o.accumulate ? 0xffff : 0);
        const bool is_stream = rows > 2 * num_rows;
        for (int m = 0; m < rows; m += num_rows, ++x) {
            pass<true>({x, &panel, &stream_.scales(), rows - m, is_stream, o.at_row(m).out,
                        o.out_stride, accumulated});
        }
    }
    void finish() {
        if (steps_[1].x) {
            pass<false>({});
            pass<false>({});
        }
    }

private:
    struct Step { // some rows and a block
        const RowTile *x;
        const Panel *panel;
        const typename Panel::Scales *scales;
        int rows;
        bool is_stream; // of more rows than the nearest cache holds
        float *out;
        int64_t stride;
        __mmask16 accumulated;
    };

    template <bool has_own> void pass(const Step &step) {
        const Step before = steps_[0];
        steps_[0] = steps_[1];
        steps_[1] = step;
        std::swap(own_, other_);
        if (!before.x) {
            work<has_own, false, false>(step, before);
        } else if (before.rows >= num_rows) {
            work<has_own, true, true>(step, before);
        } else {
            work<has_own, true, false>(step, before);
        }
    }
    // Tiles multiply `step`, vectors add `before`. The sums between leave the tiles: each where the
    // first product takes its place.
    template <bool has_own, bool has_before, bool is_full>
    __attribute__((noinline)) void work(const Step step, const Step before) {
        Sums &own = *own_;
        const Sums &other = *other_;
        if constexpr (!has_own) {
            own.template take<0>();
        }
#pragma GCC unroll 4
        for (int quarter = 0; quarter < num_quarters; ++quarter) {
            if constexpr (has_own) {
                if (quarter == 0) {
                    multiply_quarter<true>(step, quarter, own);
                } else {
                    multiply_quarter<false>(step, quarter, own);
                }
                decode_more();
            }
            if constexpr (has_before) {
                add_rows<is_full>(before, quarter * some_rows, other);
            }
        }
    }

    static constexpr int some_rows = num_rows / num_quarters;
    static constexpr bool is_few = num_rows == few_tile_rows; // both bytes are multiplied at once
    static constexpr bool is_high_signed = !Panel::has_plain_codes;
    static constexpr int num_sums = Panel::num_bytes == 1   ? 2
                                    : Panel::byte_bits == 8 ? 3
                                                            : 4; // those of one place share one
    using Sums = std::conditional_t<is_few, FewDots<Panel::num_bytes, Panel::byte_bits>,
                                    Dots<num_sums, Panel::byte_bits>>;

    template <bool is_first>
    __attribute__((always_inline)) void multiply_quarter(const Step &step, int quarter, Sums &own) {
        const auto &weights = step.panel->weights[quarter];
        const auto &x = step.x->numbers[quarter];
        load<6>(weights[0], 64);
        load_rows<4>(x[0], step.is_stream);
        if constexpr (is_few) {
            begin<is_first, 0>(own);
            add_bytes<0, 4, 6, false>();
            if constexpr (Panel::num_bytes == 2) {
                load<7>(weights[1], 64);
                begin<is_first, 1>(own);
                add_bytes<1, 4, 7, is_high_signed>();
            }
        } else {
            // Behind high bytes of few rows their low ones follow at once.
            const int low = step.rows > few_tile_rows ? tile_rows : few_tile_rows;
            load_rows<5>(x[0] + low, step.is_stream);
            begin<is_first, 0>(own);
            add_bytes<0, 5, 6, false>();
            begin<is_first, 1>(own);
            add_bytes<1, 4, 6, false>();
            if constexpr (Panel::num_bytes == 2) {
                load<7>(weights[1], 64);
                begin<is_first, num_sums - 1>(own);
                add_bytes<num_sums - 1, 4, 7, is_high_signed>();
                begin<is_first && num_sums == 4, num_sums - 2>(own);
                add_bytes<num_sums - 2, 5, 7, is_high_signed>();
            }
        }
    }
    template <int tile>
    static __attribute__((always_inline)) void load_rows(const void *from, bool is_stream) {
        if (is_stream) {
            load_past_cache<tile>(from, quarter_columns);
        } else {
            load<tile>(from, quarter_columns);
        }
    }
    // It may take the place of what was loaded.
    __attribute__((always_inline)) void decode_more() {
        fence();
        stream_.turn();
    }
    // The tile's sum of the step before is stored, and another begins.
    template <bool is_first, int tile> __attribute__((always_inline)) void begin(Sums &own) {
        if constexpr (is_first) {
            store<tile>(own.tile(tile));
            clear<tile>();
        }
    }
    // What lies behind the last row goes nowhere. All rows take the same way, side by side.
    template <bool is_full>
    __attribute__((always_inline)) void add_rows(const Step &step, int first, const Sums &dots) {
        const GroupSums *const x = step.x->sums[0] + first;
        const auto &scales = *step.scales;
        BlockSum<V, W> sums[some_rows];
        float *out[some_rows];
#pragma GCC unroll 4
        for (int i = 0; i < some_rows; ++i) {
            const int m = first + i;
            out[i] = is_full || m < step.rows ? step.out + m * step.stride : spare_;
            sums[i].begin_unit();
            sums[i].total = _mm512_maskz_loadu_ps(step.accumulated, out[i]);
            sums[i].steps = dots.whole(m);
        }
        if constexpr (has_floors<W>) {
#pragma GCC unroll 8
            for (int g = 0; g < slab_groups; ++g) {
#pragma GCC unroll 4
                for (int i = 0; i < some_rows; ++i) {
                    const GroupSums &own = x[g * tile_rows + i];
                    sums[i].template add_floor<0>(scales.floors[g][0], own);
                    if constexpr (parts_of<W> == 2) {
                        sums[i].template add_floor<1>(scales.floors[g][1], own);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < some_rows; ++i) {
            sums[i].end_unit(scales, x[i]);
            V::store(out[i], sums[i].total);
        }
    }

    // A load waits for an earlier store whose address differs by a multiple of 4 KiB. So the rooms
    // are no such multiple apart.
    struct Rooms {
        Sums first;
        alignas(64) uint8_t between[sizeof(Sums) % 4096 == 0 ? 2048 : 64];
        Sums second;
    };
    static_assert(sizeof(Sums) <= 4096 && offsetof(Rooms, second) % 4096 != 0);

    Stream &stream_;
    Step steps_[2]{}; // the last two, if there were any
    alignas(64) float spare_[lanes] = {};
    Rooms rooms_;
    Sums *own_ = &rooms_.first, *other_ = &rooms_.second;
};

// What the tiles are, until its end.
class Configuration {
public:
    explicit Configuration(int columns) {
        const Shape shape(columns);
        fence();
        _tile_loadconfig(&shape);
    }
    ~Configuration() { _tile_release(); }
};

// All rows of a slab, one band after the other.
void pack_slab(const Int16Operands &slab, int rows, uint8_t *bands) {
    auto *const x = reinterpret_cast<RowTile *>(bands);
    for (int m = 0; m < rows; m += tile_rows) {
        x[m / tile_rows].take(slab.at_row(m), std::min(tile_rows, rows - m));
    }
}

template <class W, class Tiles>
void multiply_by_tiles(const Int16Operands &o, int rows, int num_blocks, void *room) {
    using Panel = typename Tiles::Panel;
    auto *const taken = static_cast<uint8_t *>(room) + most_panel_bytes;
    typename Tiles::Stream panels(o, num_blocks, room, W::has_steps && rows <= tile_rows);
    const Configuration tiles(Tiles::columns);
    typename Tiles::template Product<tile_rows> product(panels);
    typename Tiles::template Product<few_tile_rows> product_of_few(panels);
    // Of the last rows, eight suffice where no more are left.
    const int rest = rows % tile_rows;
    const bool has_few = rest <= few_tile_rows && (Tiles::ends_with_few || rows < tile_rows);
    const int few = has_few ? rest : 0, many = rows - few;
    const int num_tiles = (rows + tile_rows - 1) / tile_rows;
    for (int g = 0; g < o.num_groups; g += slab_groups) {
        const Int16Operands slab = slab_of<W>(o, g);
        const uint8_t *own = o.bands + g / slab_groups * o.slab_bytes;
        if (!o.bands) {
            product.finish(); // with the rows whose place others take
            product_of_few.finish();
            pack_slab(slab, rows, taken);
            own = taken;
        }
        const auto *const x = reinterpret_cast<const RowTile *>(own);
        for (int n = 0; n < num_blocks; n += Panel::num_blocks) {
            const Int16Operands some = slab.at_block(n);
            const int count = std::min(Panel::num_blocks, num_blocks - n);
            const Panel &panel = panels.next(num_tiles * count * Tiles::turns(slab.num_groups));
            fence();
            if (many > 0) {
                product.multiply(panel, x, some, many, count);
            }
            if (few > 0) {
                product_of_few.multiply(panel, x + many / tile_rows, some.at_row(many), few, count);
            }
        }
    }
    product.finish();
    product_of_few.finish();
}

} // namespace

void gemm_int16_by_tiles(Format format, const Int16Operands &o, int rows, int num_blocks,
                         void *room) {
    const auto multiply = [&](auto block) {
        using W = decltype(block);
        using Tiles = std::conditional_t<W::has_steps, UnitTiles<W>, GroupTiles<W, 2>>;
        if (suits_tiles<W, 2>(rows)) {
            multiply_by_tiles<W, Tiles>(o, rows, num_blocks, room);
        } else {
            avx512_kernels.gemm_int16(format, o, rows, num_blocks, room);
        }
    };
    with_integers<V>(format, multiply);
}

void gemm_int8_by_tiles(const Int16Operands &o, int rows, int num_blocks, void *room) {
    using W = Int8Bytes<V>;
    if (suits_tiles<W, 1>(rows)) {
        multiply_by_tiles<W, GroupTiles<W, 1>>(o, rows, num_blocks, room);
    } else {
        avx512_kernels.gemm_int8(o, rows, num_blocks, room);
    }
}

void pack_groups_as_tiles(const Int16Group *x, int x_stride, int rows, int num_groups,
                          uint8_t *band) {
    Int16Operands slab{};
    slab.x = x;
    slab.x_stride = x_stride;
    slab.num_groups = num_groups;
    pack_slab(slab, rows, band);
}

bool tiles_read_bands(Format format, int activation_bits, int rows) {
    if (activation_bits == 8) {
        return suits_tiles<Int8Bytes<V>, 1>(rows);
    }
    bool is_read = false;
    with_integers<V>(format, [&](auto block) { is_read = suits_tiles<decltype(block), 2>(rows); });
    return is_read;
}

} // namespace headrace
#endif
