// out[rows, 16 * blocks] = x[rows, cols] . packed bf16 blocks, both factors bf16, by Intel's tiles
// (AMX): sixteen rows by sixteen columns, 32 steps of k to an instruction.
//
// The second factor of the tiles is a packed block (matrix.h) as it lies. Their first factor is the
// pairs of round_row. Every sum runs over the same 32 steps at a time, in order along k. So a row's
// result has the same bits whatever rows it is batched with.
//
// Up to 32 rows meet each pair of blocks once. More rows pass over slabs: two blocks of weights and
// 512 columns, which stay in the nearest cache. Those in 12 bits have 256 for up to 128 rows.
#if defined(__x86_64__)
#include "cpu/few_rows.h"

#include <algorithm>
#include <cstring>
#include <sys/syscall.h>
#include <unistd.h>

// GCC 12 takes the undefined operand of its own intrinsics for a variable of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vbmi,amx-tile,amx-bf16")
#include "cpu/bf12_vectors.h"
#include "cpu/kernels_amx.h"

namespace headrace {

namespace {

constexpr int request_permission = 0x1023, tile_data = 18; // of arch_prctl(2), Linux 5.16

constexpr int tile_rows = band_rows, tile_pairs = 16; // of a tile; a pair is two steps of k
constexpr int tile_bytes = tile_rows * tile_pairs * 4;
constexpr int chunk_numbers = 256 << 10; // of rows, so that they stay in L2 for all blocks
constexpr int slab_units = 16;           // of 32 columns
constexpr int max_slab_rows = 256;
constexpr int max_short_slab_rows = 128;    // of bf12: slabs half as long are faster
constexpr int ahead_bytes = 4 * tile_bytes; // to prefetch, in each block

// Of two blocks: a slab as bf16, and all sums from slab to slab, tile after tile.
struct alignas(64) SlabRoom {
    uint8_t units[2][slab_units][tile_bytes];
    float sums[max_slab_rows][2 * lanes];
};
static_assert(sizeof(SlabRoom) <= room_of_panels(max_slab_rows));

constexpr int parts_of(int n, int step) {
    return (n + step - 1) / step;
}

// What the tiles are, as the instruction reads it. Tile 2 * m + n has the sums of the m-th rows and
// the n-th block. Tile 4 + m has the rows, tile 6 + n the block.
struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Sums of `first` and `second` rows; without the second, their tiles are left alone. So many
    // pairs are multiplied at a time.
    Shape(int first, int second, int pairs) {
        for (int tile = 0; tile < 8; ++tile) {
            const bool is_second = tile == 2 || tile == 3 || tile == 5;
            row_bytes[tile] = uint16_t(4 * (tile == 4 || tile == 5 ? pairs : lanes));
            rows[tile] = uint8_t(tile >= 6 ? pairs : is_second && second ? second : first);
        }
    }
};

// The compiler does not see that the instructions read memory: what was written must be there.
void fence() {
    asm volatile("" ::: "memory");
}

// The compiler's own functions take literals alone. A stream does not go into the nearest cache.
template <int tile, bool is_stream> void load_tile(const void *from, size_t stride) {
    if constexpr (is_stream) {
        asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(tile), "r"(from), "r"(stride));
    } else {
        asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(tile), "r"(from), "r"(stride));
    }
}

// The last steps of k, where they do not fill a tile: zeros behind them.
struct Rest {
    alignas(64) uint8_t x[2 * tile_bytes] = {}, blocks[2 * tile_bytes] = {};

    Rest(const Operands &o, int rows, int num_blocks) {
        const int done = o.cols / 32 * tile_pairs, num_pairs = (o.cols + 1) / 2 - done;
        for (int m = 0; m < rows; ++m) {
            std::memcpy(x + m * 64, o.x + size_t(m) * o.x_stride + done, num_pairs * 4);
        }
        for (int n = 0; n < num_blocks; ++n) {
            const uint8_t *block = o.blocks + n * o.block_bytes + done * 64;
            std::memcpy(blocks + n * tile_bytes, block, num_pairs * 64);
        }
    }
};

// Two tiles of rows, from some unit of 32 columns on.
struct RowTiles {
    const uint8_t *first, *second;
    size_t row_bytes, unit_bytes;

    static RowTiles of(const Operands &o) {
        const auto *first = reinterpret_cast<const uint8_t *>(o.x);
        const size_t row_bytes = size_t(o.x_stride) * 4;
        return {first, first + tile_rows * row_bytes, row_bytes, tile_pairs * 4};
    }
};

// One tile of k.
template <bool has_second, int num_blocks, bool is_stream = false>
inline __attribute__((always_inline)) void add_tiles(const RowTiles &x, size_t unit,
                                                     const uint8_t *blocks, size_t block_bytes) {
    load_tile<4, is_stream>(x.first + unit * x.unit_bytes, x.row_bytes);
    _tile_loadd(6, blocks, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (num_blocks == 2) {
        _tile_loadd(7, blocks + block_bytes, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (has_second) {
        load_tile<5, is_stream>(x.second + unit * x.unit_bytes, x.row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (num_blocks == 2) {
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

// Fetch a later unit of each block, from L2 as a rule, while the tiles work on this one.
template <int num_blocks> void fetch_ahead(const uint8_t *unit, size_t stride, ptrdiff_t ahead) {
    for (int n = 0; n < num_blocks; ++n) {
        for (int b = 0; b < tile_bytes; b += 64) {
            __builtin_prefetch(unit + n * stride + ahead + b);
        }
    }
}

// Blocks of bf16, as they lie. Behind short ones lies what their caller says.
template <int num_blocks> class StoredUnits {
public:
    explicit StoredUnits(const Operands &o)
        : o_(o), ahead_(o.block_bytes < size_t(ahead_bytes) ? o.ahead : ahead_bytes) {}

    size_t stride() const { return o_.block_bytes; }
    const uint8_t *at(int u) const {
        const uint8_t *unit = o_.blocks + size_t(u) * tile_bytes;
        fetch_ahead<num_blocks>(unit, stride(), ahead_);
        return unit;
    }

private:
    const Operands &o_;
    const ptrdiff_t ahead_;
};

// Blocks of bf12, each unit unpacked while the tiles work on the one before it.
template <int num_blocks> class UnpackedUnits {
public:
    explicit UnpackedUnits(const Operands &o) : o_(o) { unpack(0); }

    static size_t stride() { return bf16_unit_bytes; }
    const uint8_t *at(int u) {
        if ((u + 1) * bf12_cols < o_.cols) {
            unpack(u + 1);
        }
        fence();
        return units_[u % 3][0];
    }

private:
    void unpack(int u) {
        const uint8_t *unit = o_.blocks + bf12_header_bytes(o_.cols) + size_t(u) * bf12_unit_bytes;
        for (int n = 0; n < num_blocks; ++n, unit += o_.block_bytes) {
            const Bf12Header &header = header_of(o_.blocks + n * o_.block_bytes, u);
            __builtin_prefetch(reinterpret_cast<const uint8_t *>(&header) +
                               num_blocks * o_.block_bytes); // of the blocks that come next
            for (int b = 0; b < bf12_unit_bytes; b += 64) {
                __builtin_prefetch(unit + 2 * bf12_ahead + b);
            }
            unpack_unit(header, unit, units_[u % 3][n]);
        }
    }

    const Operands &o_;
    alignas(64) uint8_t units_[3][num_blocks][bf16_unit_bytes];
};

// Where the sums of two tiles of rows and two blocks are, beside the tiles.
template <bool has_second, int num_blocks> struct SumTiles {
    float *first;
    size_t row_bytes;
    ptrdiff_t second_rows, second_block; // numbers from `first` on

    static SumTiles in_rows(const Operands &o) {
        return {o.out, size_t(o.out_stride) * 4, tile_rows * ptrdiff_t(o.out_stride), lanes};
    }
    // One tile after another.
    static SumTiles in_room(float *sums) { return {sums, 64, tile_bytes / 2, tile_bytes / 4}; }

    // Sums go on from what there is, or begin at zero.
    void begin(bool accumulate) const {
        if (accumulate) {
            load();
            return;
        }
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    void store() const {
        _tile_stored(0, first, row_bytes);
        if constexpr (num_blocks == 2) {
            _tile_stored(1, first + second_block, row_bytes);
        }
        if constexpr (has_second) {
            _tile_stored(2, first + second_rows, row_bytes);
        }
        if constexpr (has_second && num_blocks == 2) {
            _tile_stored(3, first + second_rows + second_block, row_bytes);
        }
    }

private:
    void load() const {
        fence();
        load_tile<0, true>(first, row_bytes);
        if constexpr (num_blocks == 2) {
            load_tile<1, true>(first + second_block, row_bytes);
        }
        if constexpr (has_second) {
            load_tile<2, true>(first + second_rows, row_bytes);
        }
        if constexpr (has_second && num_blocks == 2) {
            load_tile<3, true>(first + second_rows + second_block, row_bytes);
        }
    }
};

template <bool has_second, int num_blocks, class Units>
void multiply_tiles(const Operands &o, int rows, Units &&units) {
    const auto sums = SumTiles<has_second, num_blocks>::in_rows(o);
    sums.begin(o.accumulate);
    const RowTiles x = RowTiles::of(o);
    const bool is_narrow = o.cols < 32; // the tiles are as narrow
    for (int u = 0; u < std::max(1, o.cols / 32); ++u) {
        add_tiles<has_second, num_blocks>(x, u, units.at(u), units.stride());
    }
    if (!is_narrow && o.cols % 32 != 0) {
        const Rest rest(o, rows, num_blocks);
        fence();
        const RowTiles last{rest.x, rest.x + tile_bytes, 64, 0};
        add_tiles<has_second, num_blocks>(last, 0, rest.blocks, tile_bytes);
        fence();
    }
    sums.store();
}

// Rows of `o`, at most two tiles of them.
template <int num_blocks, class Units>
void multiply_group(const Operands &o, int rows, Units &&units) {
    if (rows > tile_rows) {
        multiply_tiles<true, num_blocks>(o, rows, units);
    } else {
        multiply_tiles<false, num_blocks>(o, rows, units);
    }
}

// What the tiles are, from its first number of rows until its end. All operands are as wide.
class Configuration {
public:
    ~Configuration() { _tile_release(); }

    void take_rows(int rows, int cols) {
        if (rows != rows_) {
            const Shape shape(std::min(rows, tile_rows), std::max(rows - tile_rows, 0),
                              std::min((cols + 1) / 2, tile_pairs));
            fence();
            _tile_loadconfig(&shape);
            rows_ = rows;
        }
    }

    // Call body(operands, rows) for groups of rows, two tiles of them at a time, in order.
    template <class Body> void each_group(const Operands &o, int rows, const Body &body) {
        for (int m = 0; m < rows; m += 2 * tile_rows) {
            const int count = std::min(2 * tile_rows, rows - m);
            take_rows(count, o.cols);
            body(o.at_row(m), count);
        }
    }

private:
    int rows_ = 0;
};

// Blocks go outside: those of one tile stay in the cache for all rows.
template <template <int> class Units>
void multiply_all_rows(const Operands &o, int rows, int num_blocks) {
    Configuration tiles;
    for (int n = 0; n < num_blocks; n += 2) {
        tiles.each_group(o.at_block(n), rows, [&](const Operands &group, int count) {
            if (n + 2 <= num_blocks) {
                multiply_group<2>(group, count, Units<2>(group));
            } else {
                multiply_group<1>(group, count, Units<1>(group));
            }
        });
    }
}

// The slabs of two blocks, then those of the next two. A packed one is unpacked into the place of
// the one before, while the last rows are multiplied with that. What comes behind is fetched.
template <bool is_packed> class SlabStream {
public:
    // Units from `first` on, of blocks that have `cols` columns in all.
    SlabStream(const Operands &o, int first, int cols, int rows, int num_blocks, SlabRoom &room)
        : o_(o), first_(first), num_units_(o.cols / bf12_cols),
          num_slabs_(parts_of(num_units_, most_units(rows))),
          step_(parts_of(num_units_, num_slabs_)),
          header_bytes_(is_packed ? bf12_header_bytes(cols) : 0), num_blocks_(num_blocks),
          room_(room), next_(part_of(0)) {
        unpack_from(0);
    }

    int num_slabs() const { return num_slabs_; }
    int first_unit(int slab) const { return slab * step_; }
    int units_of(int slab) const { return std::min(step_, num_units_ - slab * step_); }
    size_t stride() const { return is_packed ? sizeof room_.units[0] : o_.block_bytes; }

    // The next slab, which is multiplied by a unit in each turn.
    const uint8_t *next(int turns) {
        const Part own = next_;
        next_ = part_of(++index_);
        behind_ = part_of(index_ + is_packed);
        turns_ = turns;
        fetched_ = due_ = 0;
        fence();
        return is_packed ? room_.units[0][0] : own.units;
    }
    // A unit was multiplied, maybe with the last rows.
    void turn(int unit, bool is_last) {
        for (due_ += behind_.num_units * behind_.num_blocks; due_ >= turns_; due_ -= turns_) {
            fetch(fetched_++);
        }
        if (is_packed && is_last && unit < next_.num_units) {
            fence(); // the tiles have loaded what is written over
            unpack(unit);
        }
    }
    // Unpack the rest of the next slab, which may have more units than the one before.
    void unpack_from(int unit) {
        for (; is_packed && unit < next_.num_units; ++unit) {
            unpack(unit);
        }
    }

private:
    static constexpr int unit_bytes = is_packed ? bf12_unit_bytes : bf16_unit_bytes;
    static constexpr int most_units(int rows) {
        return is_packed && rows <= max_short_slab_rows ? slab_units / 2 : slab_units;
    }

    struct Part { // of the weights; behind the last slab there is none
        const uint8_t *block = nullptr, *units = nullptr;
        int first = 0, num_units = 0, num_blocks = 0;
    };

    Part part_of(int index) const {
        const int n = index / num_slabs_ * 2, slab = index % num_slabs_;
        if (n >= num_blocks_) {
            return {};
        }
        const uint8_t *block = o_.blocks + n * o_.block_bytes;
        const int first = first_ + first_unit(slab);
        return {block, block + header_bytes_ + size_t(first) * unit_bytes, first, units_of(slab),
                std::min(2, num_blocks_ - n)};
    }
    void fetch(int item) const {
        const uint8_t *units = behind_.units + item % behind_.num_blocks * o_.block_bytes;
        for (int b = 0; b < unit_bytes; b += 64) {
            __builtin_prefetch(units + item / behind_.num_blocks * unit_bytes + b, 0, 2);
        }
    }
    void unpack(int unit) {
        for (int n = 0; n < next_.num_blocks; ++n) {
            const size_t block = n * o_.block_bytes;
            unpack_unit(header_of(next_.block + block, next_.first + unit),
                        next_.units + block + unit * unit_bytes, room_.units[n][unit]);
        }
    }

    const Operands &o_;
    const int first_, num_units_, num_slabs_, step_;
    const size_t header_bytes_;
    const int num_blocks_;
    SlabRoom &room_;
    Part next_, behind_;
    int index_ = 0, turns_ = 1, fetched_ = 0, due_ = 0;
};

// Some columns of all rows and blocks, two blocks after another.
template <bool is_packed> class SlabProduct {
public:
    // Units from `first_unit` on, of rows and blocks that have `cols` columns in all.
    SlabProduct(const Operands &o, int first_unit, int cols, int rows, int num_blocks,
                SlabRoom &room)
        : o_(o), first_unit_(first_unit), cols_(cols), rows_(rows), num_blocks_(num_blocks),
          room_(room), stream_(o, first_unit, cols, rows, num_blocks, room) {}

    void multiply() {
        for (int n = 0; n < num_blocks_; n += 2) {
            if (n + 2 <= num_blocks_) {
                multiply_blocks<2>(o_.at_block(n));
            } else {
                multiply_blocks<1>(o_.at_block(n));
            }
        }
    }

private:
    template <int num_blocks> void multiply_blocks(const Operands &o) {
        const int num_groups = parts_of(rows_, 2 * tile_rows);
        for (int slab = 0; slab < stream_.num_slabs(); ++slab) {
            const uint8_t *units = stream_.next(num_groups * stream_.units_of(slab));
            for (int m = 0; m < rows_; m += 2 * tile_rows) {
                const int count = std::min(2 * tile_rows, rows_ - m);
                tiles_.take_rows(count, o_.cols);
                if (count > tile_rows) {
                    multiply_slab<true, num_blocks>(o, m, slab, units);
                } else {
                    multiply_slab<false, num_blocks>(o, m, slab, units);
                }
            }
            stream_.unpack_from(stream_.units_of(slab));
        }
    }
    // Rows from the m-th on. Their sums stay in `room` from slab to slab.
    template <bool has_second, int num_blocks>
    void multiply_slab(const Operands &o, int m, int slab, const uint8_t *units) {
        using Sums = SumTiles<has_second, num_blocks>;
        const Sums out = Sums::in_rows(o.at_row(m)), kept = Sums::in_room(room_.sums[m]);
        if (slab == 0) {
            out.begin(o.accumulate);
        } else {
            kept.begin(true);
        }
        const RowTiles x = row_tiles(m);
        const bool is_last = m + 2 * tile_rows >= rows_;
        const int first = stream_.first_unit(slab);
        for (int u = 0; u < stream_.units_of(slab); ++u) {
            add_tiles<has_second, num_blocks, true>(x, first + u, units + u * tile_bytes,
                                                    stream_.stride());
            stream_.turn(u, is_last);
            fence();
        }
        (slab + 1 == stream_.num_slabs() ? out : kept).store();
    }
    RowTiles row_tiles(int m) const {
        if (!o_.tiles) {
            return RowTiles::of(o_.at_row(m));
        }
        const size_t band = band_bytes(cols_);
        const uint8_t *first = o_.tiles + m / tile_rows * band + first_unit_ * tile_bytes;
        return {first, first + band, 64, tile_bytes};
    }

    const Operands &o_;
    const int first_unit_, cols_, rows_, num_blocks_;
    SlabRoom &room_;
    SlabStream<is_packed> stream_;
    Configuration tiles_;
};

// Of whole units of columns: some at a time. Sums go on from columns to columns, in order.
template <bool is_packed>
void multiply_slabs(const Operands &o, int rows, int num_blocks, void *room) {
    const int units = o.cols / bf12_cols, most = std::max(1, chunk_numbers / (bf12_cols * rows));
    const int step = parts_of(units, parts_of(units, most));
    for (int unit = 0; unit < units; unit += step) {
        Operands chunk = o;
        chunk.x += unit * tile_pairs;
        chunk.cols = std::min(step, units - unit) * bf12_cols;
        chunk.accumulate = o.accumulate || unit > 0;
        SlabProduct<is_packed>(chunk, unit, o.cols, rows, num_blocks,
                               *static_cast<SlabRoom *>(room))
            .multiply();
    }
}

} // namespace

bool may_use_tiles() {
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
           syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

void gemm_bf16_by_tiles(const Operands &o, int rows, int num_blocks, void *room) {
    if (rows <= max_rows_as_tiles) {
        bf16_as_tiles(o, rows, num_blocks);
    } else if (rows <= 2 * tile_rows || rows > max_slab_rows || o.cols % bf12_cols != 0) {
        multiply_all_rows<StoredUnits>(o, rows, num_blocks);
    } else {
        multiply_slabs<false>(o, rows, num_blocks, room);
    }
}

void gemm_bf12_by_tiles(const Operands &o, int rows, int num_blocks, float *room) {
    if (rows <= max_rows_as_tiles) {
        bf12_as_tiles(o, rows, num_blocks);
    } else if (rows <= 2 * tile_rows || rows > max_slab_rows) {
        multiply_all_rows<UnpackedUnits>(o, rows, num_blocks);
    } else {
        multiply_slabs<true>(o, rows, num_blocks, room);
    }
}

void pack_rows_as_tiles(const float *x, int x_stride, int rows, int cols, uint8_t *tiles) {
    for (int u = 0; u < cols / bf12_cols; ++u, x += tile_pairs) {
        for (int m = 0; m < rows; ++m, tiles += 64) {
            std::memcpy(tiles, x + size_t(m) * x_stride, 64);
        }
        tiles += size_t(tile_rows - rows) * 64;
    }
}

} // namespace headrace
#endif
