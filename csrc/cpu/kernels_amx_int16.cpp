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

constexpr int few_tile_rows = 8;     // fewer take as long
constexpr int fewest_tile_rows = 16; // vectors are faster below

// The compiler does not see that the instructions read memory.
void fence() {
    asm volatile("" ::: "memory");
}

// Tiles 0 to 3 have sums, 4 and 5 the high and the low bytes of rows, 6 and 7 weights.
struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    Shape(int num_rows, int columns) {
        for (int tile = 0; tile < 8; ++tile) {
            row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? columns : 64);
            rows[tile] = uint8_t(tile < 6 ? num_rows : columns / 4);
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
template <int tile> void store(void *to) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(tile), "r"(to), "r"(int64_t(64))
                 : "memory");
}
template <int sum, int x, int weights> void add_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(x), "i"(weights));
}

// Sums in tiles, as stored: of low bytes, of those a byte higher, and so on.
template <int num_sums> struct Dots {
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
    }
    __attribute__((always_inline)) V::Ints whole(int m) const {
        V::Ints dots = _mm512_load_si512(sums[num_sums - 1][m]);
        for (int i = num_sums - 2; i >= 0; --i) {
            dots = V::plus(_mm512_slli_epi32(dots, 8), _mm512_load_si512(sums[i][m]));
        }
        return dots;
    }
};

// Some rows of a slab and a panel, where each group has a scale: one block after the other. Rows
// have two bytes, or one where activations have 8 bits. The tiles are ahead of the vectors: a group
// is multiplied, the one before it stored, and the one before that added.
template <class W, int num_bytes> struct GroupTiles {
    static constexpr int columns = quantized_group;
    using Panel = GroupPanel<W>;
    template <int num_rows> class Product;
};

template <class W, int num_bytes> template <int num_rows> class GroupTiles<W, num_bytes>::Product {
public:
    Product(const Panel &panel, const RowTile &x, int num_groups)
        : panel_(panel), x_(x), num_groups_(num_groups) {}

    void multiply(const Int16Operands &o, int rows, int num_blocks) {
        for (int n = 0; n < num_blocks; ++n) {
            multiply_block(o.at_block(n), rows, n);
        }
    }

private:
    using Sums = BlockSum<V, W>[num_rows];

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
        load<6>(panel_.weights[n][g], 64);
        load<5>(x_.low_of(g), quarter_columns);
        clear<first>();
        add_bytes<first, 5, 6>();
        if constexpr (num_bytes > 1) {
            load<4>(x_.high_of(g), quarter_columns);
            clear<first + 1>();
            add_bytes<first + 1, 4, 6>();
        }
    }
    // A group that is in tiles from `own` on; the next goes to others.
    template <int own, int next>
    __attribute__((always_inline)) void pass_group(int n, int g, Sums &sums) {
        multiply_group<next>(n, g + 1);
        if (g < num_groups_) {
            dots_[g % 2].template take<own>();
        }
        if (g > 0 && g <= num_groups_) {
            add_dots(dots_[(g - 1) % 2], n, g - 1, sums);
        }
    }
    __attribute__((always_inline)) void add_dots(const Dots<num_bytes> &dots, int n, int g,
                                                 Sums &sums) {
        const auto &scales = panel_.scales[n][g];
        each(sums, [&](auto &sum, int m) __attribute__((always_inline)) {
            const GroupSums &x = x_.sums[g][m];
            sum.add_group(V::to_floats(dots.whole(m)), scales.scale, x);
            if constexpr (W::sign != 0) {
                sum.add_minimum(scales.minimum, x);
            }
        });
    }

    const Panel &panel_;
    const RowTile &x_;
    const int num_groups_;
    Dots<num_bytes> dots_[2];
};

// The same where groups have integer scales. While a block is multiplied, vectors add the one
// before.
template <class W> struct UnitTiles {
    static constexpr int columns = quarter_columns;
    using Panel = UnitPanel<W>;
    template <int num_rows> class Product;
};

template <class W> template <int num_rows> class UnitTiles<W>::Product {
public:
    Product(const Panel &panel, const RowTile &x, int) : panel_(panel), x_(x) {}

    void multiply(const Int16Operands &o, int rows, int num_blocks) {
        for (int n = 0; n <= num_blocks; ++n) {
            for (int quarter = 0; quarter < num_quarters; ++quarter) {
                if (n < num_blocks) {
                    multiply_quarter(n, quarter);
                }
                if (n > 0) {
                    add_rows(o.at_block(n - 1), rows, n - 1, quarter * some_rows);
                }
            }
            if (n < num_blocks) {
                dots_[n % 2].template take<0>();
            }
        }
    }

private:
    static constexpr int some_rows = num_rows / num_quarters;

    __attribute__((always_inline)) void multiply_quarter(int n, int quarter) {
        const auto &weights = panel_.weights[n][quarter];
        load<6>(weights[0], 64);
        load<5>(x_.numbers[quarter][1], quarter_columns);
        load<4>(x_.numbers[quarter][0], quarter_columns);
        if (quarter == 0) {
            clear<0>();
            clear<1>();
            clear<2>();
        }
        add_bytes<0, 5, 6>();
        add_bytes<1, 4, 6>();
        if constexpr (Panel::num_bytes == 2) {
            load<7>(weights[1], 64);
            add_bytes<2, 4, 7>();
            add_bytes<1, 5, 7>();
        }
    }
    __attribute__((always_inline)) void add_rows(const Int16Operands &o, int rows, int n,
                                                 int first) {
        BlockSum<V, W> sums[some_rows];
        for (auto &sum : sums) {
            sum.begin_unit();
        }
        if constexpr (has_floors<W>) {
#pragma GCC unroll 8
            for (int g = 0; g < slab_groups; ++g) {
#pragma GCC unroll 4
                for (int i = 0; i < some_rows; ++i) {
                    const GroupSums &x = x_.sums[g][first + i];
                    sums[i].template add_floor<0>(panel_.floors[n][g][0], x);
                    if constexpr (parts_of<W> == 2) {
                        sums[i].template add_floor<1>(panel_.floors[n][g][1], x);
                    }
                }
            }
        }
        for (int i = 0; i < some_rows && first + i < rows; ++i) {
            const int m = first + i;
            float *out = o.out + size_t(m) * o.out_stride;
            sums[i].total = o.accumulate ? V::load(out) : V::set(0.0f);
            sums[i].steps = dots_[n % 2].whole(m);
            sums[i].end_unit(panel_.scales[n], x_.sums[0][m]);
            V::store(out, sums[i].total);
        }
    }

    const Panel &panel_;
    const RowTile &x_;
    Dots<Panel::num_bytes + 1> dots_[2];
};

// Weights that come next, to be fetched little by little.
struct Fetch {
    const uint8_t *blocks;
    size_t block_bytes, bytes; // of each block
    int num_blocks;

    void part(int i, int num_parts) const {
        const size_t lines = (bytes + 63) / 64;
        for (int n = 0; n < num_blocks; ++n) {
            for (size_t line = i * lines / num_parts; line < (i + 1) * lines / num_parts; ++line) {
                __builtin_prefetch(blocks + n * block_bytes + line * 64);
            }
        }
    }
};

// All rows, sixteen or eight at a time. The next panel is fetched meanwhile.
template <class Tiles>
void multiply_panel(const typename Tiles::Panel &panel, const Int16Operands &o, int rows,
                    int num_blocks, const RowTile *x, const Fetch &next) {
    const int num_tiles = (rows + tile_rows - 1) / tile_rows;
    const auto multiply = [&](auto count, int m) {
        constexpr int num_rows = decltype(count)::value;
        typename Tiles::template Product<num_rows> product(panel, x[m / tile_rows], o.num_groups);
        next.part(m / tile_rows, num_tiles);
        product.multiply(o.at_row(m), std::min(num_rows, rows - m), num_blocks);
    };
    const auto configure = [](int num_rows) {
        const Shape shape(num_rows, Tiles::columns);
        fence();
        _tile_loadconfig(&shape);
    };
    int m = 0;
    if (rows > few_tile_rows) {
        configure(tile_rows);
    }
    for (; rows - m > few_tile_rows; m += tile_rows) {
        multiply(std::integral_constant<int, tile_rows>{}, m);
    }
    if (m < rows) {
        configure(few_tile_rows);
        multiply(std::integral_constant<int, few_tile_rows>{}, m);
    }
}

template <class W, class Tiles>
void multiply_by_tiles(const Int16Operands &o, int rows, int num_blocks, void *room) {
    using Panel = typename Tiles::Panel;
    static_assert(sizeof(Panel) <= most_panel_bytes);
    static_assert(sizeof(RowTile) <= tile_rows * panel_row_bytes);
    auto &panel = *static_cast<Panel *>(room);
    auto *const x = reinterpret_cast<RowTile *>(static_cast<uint8_t *>(room) + most_panel_bytes);
    for (int g = 0; g < o.num_groups; g += slab_groups) {
        const Int16Operands slab = slab_of<W>(o, g);
        for (int m = 0; m < rows; m += tile_rows) {
            x[m / tile_rows].take(slab.at_row(m), std::min(tile_rows, rows - m));
        }
        const size_t bytes = size_t(slab.num_groups) * quantized_group / W::unit * unit_bytes<W>;
        for (int n = 0; n < num_blocks; n += panel_blocks) {
            const Int16Operands some = slab.at_block(n);
            const int count = std::min(panel_blocks, num_blocks - n);
            const bool is_last = n + count == num_blocks;
            const uint8_t *next = is_last ? slab.next : some.blocks + count * slab.block_bytes;
            panel.decode(some, count);
            fence();
            multiply_panel<Tiles>(panel, some, rows, count, x, {next, o.block_bytes, bytes, count});
        }
    }
    _tile_release();
}

} // namespace

void gemm_int16_by_tiles(Format format, const Int16Operands &o, int rows, int num_blocks,
                         void *room) {
    if (rows < fewest_tile_rows) {
        return avx512_kernels.gemm_int16(format, o, rows, num_blocks, room);
    }
    if (format == Format::int8) {
        using W = Int8Bytes<V>;
        return multiply_by_tiles<W, GroupTiles<W, 2>>(o, rows, num_blocks, room);
    }
    with_block<V>(format, [&](auto block) {
        using W = decltype(block);
        using Tiles = std::conditional_t<W::has_steps, UnitTiles<W>, GroupTiles<W, 2>>;
        multiply_by_tiles<W, Tiles>(o, rows, num_blocks, room);
    });
}

void gemm_int8_by_tiles(const Int16Operands &o, int rows, int num_blocks, void *room) {
    if (rows < fewest_tile_rows) {
        return avx512_kernels.gemm_int8(o, rows, num_blocks, room);
    }
    using W = Int8Bytes<V>;
    multiply_by_tiles<W, GroupTiles<W, 1>>(o, rows, num_blocks, room);
}

} // namespace headrace
#endif
