// The products of gemm_int16.h for many rows by Intel's tiles (AMX): sixteen rows by sixteen
// columns, 32 steps of k at a time.
//
// Bytes are multiplied by bytes, and a number of 16 bits is two of them. Sums of high and of low
// bytes are added as integers. So the dot of a group is the same number as there, and what follows
// is in the same order. A row has the same bits. Weights with a scale for 16 columns are multiplied
// by it, and are two bytes then.
//
// A product of tiles takes 16 cycles, whatever its steps of k. Storing a tile takes as many, in
// which a core does little but multiply other tiles (Xeon, family 6 model 207).
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

    explicit Shape(int num_rows) {
        for (int tile = 0; tile < 8; ++tile) {
            row_bytes[tile] = tile == 4 || tile == 5 ? quantized_group : 64;
            rows[tile] = uint8_t(tile < 6 ? num_rows : num_fours);
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

// Sums of a group in tiles, and as stored.
template <Kind kind> struct Dots {
    static constexpr int num_sums = kind == Kind::wide ? 3 : kind == Kind::two_bytes ? 2 : 1;
    static constexpr int other_set = num_sums > 2 ? 0 : 2; // of tiles
    alignas(64) int32_t sums[num_sums][tile_rows][lanes];

    // Into tiles from `first` on.
    template <int first>
    static __attribute__((always_inline)) void multiply(const uint8_t *x, const uint8_t *weights) {
        load<6>(weights, 64);
        load<5>(x + quantized_group, 2 * quantized_group);
        clear<first>();
        add_bytes<first, 5, 6>();
        if constexpr (num_sums > 1) {
            load<4>(x, 2 * quantized_group);
            clear<first + 1>();
            add_bytes<first + 1, 4, 6>();
        }
        if constexpr (num_sums > 2) {
            load<7>(weights + num_fours * 64, 64);
            clear<first + 2>();
            add_bytes<first + 2, 4, 7>();
            add_bytes<first + 1, 5, 7>();
        }
    }
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

// Some rows of a slab and a panel, one block after the other. The tiles are ahead of the vectors: a
// group is multiplied, the one before it stored, and the one before that added.
template <class W, Kind kind, int num_rows> class TileProduct {
public:
    TileProduct(const TilePanel<W, kind> &panel, const RowTile &x, int num_groups)
        : panel_(panel), x_(x), num_groups_(num_groups) {}

    void multiply(const Int16Operands &o, int rows, int n) {
        Sums sums;
        each(sums, [&](auto &sum, int m) __attribute__((always_inline)) {
            const bool adds = o.accumulate && m < rows;
            sum.total = adds ? V::load(o.out + size_t(m) * o.out_stride) : V::set(0.0f);
            sum.begin_unit();
        });
        multiply_group<0>(n, 0);
        for (int g = 0; g <= num_groups_; g += 2) {
            pass_group<0, Dots<kind>::other_set>(n, g, sums);
            pass_group<Dots<kind>::other_set, 0>(n, g + 1, sums);
        }
        if constexpr (has_floors<W>) {
            add_floors(n, sums);
        }
        each(sums, [&](auto &sum, int m) __attribute__((always_inline)) {
            sum.end_unit(panel_.of_unit[n]);
            if (m < rows) {
                V::store(o.out + size_t(m) * o.out_stride, sum.total);
            }
        });
    }

private:
    using Sums = BlockSum<V, W>[num_rows];

    template <class Body>
    static __attribute__((always_inline)) void each(Sums &sums, const Body &body) {
#pragma GCC unroll 16
        for (int m = 0; m < num_rows; ++m) {
            body(sums[m], m);
        }
    }
    template <int set> __attribute__((always_inline)) void multiply_group(int n, int g) {
        if (g < num_groups_) {
            Dots<kind>::template multiply<set>(x_.numbers[g][0][0], panel_.weights[n][g][0]);
        }
    }
    // A group that is in tiles from `own` on; the next goes to others, if there are enough.
    template <int own, int next>
    __attribute__((always_inline)) void pass_group(int n, int g, Sums &sums) {
        if (own != next) {
            multiply_group<next>(n, g + 1);
        }
        if (g < num_groups_) {
            dots_[g % 2].template take<own>();
        }
        if (own == next) {
            multiply_group<next>(n, g + 1);
        }
        if (g > 0 && g <= num_groups_) {
            add_dots(dots_[(g - 1) % 2], n, g - 1, sums);
        }
    }
    __attribute__((always_inline)) void add_dots(const Dots<kind> &dots, int n, int g, Sums &sums) {
        const auto &scales = panel_.scales[n][g];
        each(sums, [&](auto &sum, int m) __attribute__((always_inline)) {
            const GroupSums &x = x_.sums[g][m];
            const V::Ints whole = dots.whole(m);
            if constexpr (kind == Kind::wide) {
                sum.add_steps(V::to_floats(whole), x);
            } else if constexpr (W::has_steps) {
                sum.add_steps(V::to_floats(V::times(whole, scales.steps)), x);
            } else {
                sum.add_group(V::to_floats(whole), scales.scale, x);
                if constexpr (W::sign != 0) {
                    sum.add_minimum(scales.floors[0], x);
                }
            }
        });
    }
    __attribute__((always_inline)) void add_floors(int n, Sums &sums) {
        for (int g = 0; g < num_groups_; ++g) {
            const auto &floors = panel_.scales[n][g].floors;
            each(sums, [&](auto &sum, int m) __attribute__((always_inline)) {
                sum.template add_floor<0>(floors[0], x_.sums[g][m]);
                if constexpr (parts_of<W> == 2) {
                    sum.template add_floor<1>(floors[1], x_.sums[g][m]);
                }
            });
        }
    }

    const TilePanel<W, kind> &panel_;
    const RowTile &x_;
    const int num_groups_;
    Dots<kind> dots_[2];
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
template <class W, Kind kind>
void multiply_panel(const TilePanel<W, kind> &panel, const Int16Operands &o, int rows,
                    int num_blocks, const RowTile *x, const Fetch &next) {
    const int num_tiles = (rows + tile_rows - 1) / tile_rows;
    const auto multiply = [&](auto count, int m) {
        constexpr int num_rows = decltype(count)::value;
        TileProduct<W, kind, num_rows> product(panel, x[m / tile_rows], o.num_groups);
        next.part(m / tile_rows, num_tiles);
        for (int n = 0; n < num_blocks; ++n) {
            product.multiply(o.at_row(m).at_block(n), std::min(num_rows, rows - m), n);
        }
    };
    const auto configure = [](int num_rows) {
        const Shape shape(num_rows);
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

template <class W, int bits>
void multiply_by_tiles(const Int16Operands &o, int rows, int num_blocks, void *room) {
    using Panel = TilePanel<W, kind_of<W, bits>>;
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
        for (int n = 0; n < num_blocks; n += Panel::num_blocks) {
            const Int16Operands some = slab.at_block(n);
            const int count = std::min(Panel::num_blocks, num_blocks - n);
            const bool is_last = n + count == num_blocks;
            const uint8_t *next = is_last ? slab.next : some.blocks + count * slab.block_bytes;
            panel.decode(some, count);
            fence();
            multiply_panel(panel, some, rows, count, x, {next, o.block_bytes, bytes, count});
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
        return multiply_by_tiles<Int8Bytes<V>, 16>(o, rows, num_blocks, room);
    }
    with_block<V>(format, [&](auto block) {
        multiply_by_tiles<decltype(block), 16>(o, rows, num_blocks, room);
    });
}

void gemm_int8_by_tiles(const Int16Operands &o, int rows, int num_blocks, void *room) {
    if (rows < fewest_tile_rows) {
        return avx512_kernels.gemm_int8(o, rows, num_blocks, room);
    }
    multiply_by_tiles<Int8Bytes<V>, 8>(o, rows, num_blocks, room);
}

} // namespace headrace
#endif
