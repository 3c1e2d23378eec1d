// out[rows, 16 * blocks] = x[rows, cols] . packed bf16 blocks, both factors bf16, by Intel's tiles
// (AMX): sixteen rows by sixteen columns, 32 steps of k to an instruction.
//
// The second factor of the tiles is a packed block (matrix.h) as it lies. Their first factor is the
// pairs of round_row. Every sum runs over the same 32 steps at a time, in order along k. So a row's
// result has the same bits whatever rows it is batched with.
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

constexpr int tile_rows = 16, tile_pairs = 16; // of a tile; a pair is two steps of k
constexpr int tile_bytes = tile_rows * tile_pairs * 4;
constexpr int chunk_numbers = 512 << 10;    // of rows, so that they stay in L2 for all blocks
constexpr int ahead_bytes = 4 * tile_bytes; // to prefetch, in each block

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

// One tile of k.
template <bool has_second, int num_blocks>
inline __attribute__((always_inline)) void add_tiles(const void *x, size_t x_bytes,
                                                     const uint8_t *blocks, size_t block_bytes) {
    _tile_loadd(4, x, x_bytes);
    _tile_loadd(6, blocks, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (num_blocks == 2) {
        _tile_loadd(7, blocks + block_bytes, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (has_second) {
        _tile_loadd(5, static_cast<const uint8_t *>(x) + tile_rows * x_bytes, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (num_blocks == 2) {
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

// Fetch a later unit of each block, from L2 as a rule, while the tiles work on this one.
template <int num_blocks> void fetch_ahead(const uint8_t *unit, size_t stride) {
    for (int n = 0; n < num_blocks; ++n) {
        for (int b = 0; b < tile_bytes; b += 64) {
            __builtin_prefetch(unit + n * stride + ahead_bytes + b);
        }
    }
}

// Blocks of bf16, as they lie.
template <int num_blocks> class StoredUnits {
public:
    explicit StoredUnits(const Operands &o) : o_(o) {}

    size_t stride() const { return o_.block_bytes; }
    const uint8_t *at(int u) const {
        const uint8_t *unit = o_.blocks + size_t(u) * tile_bytes;
        fetch_ahead<num_blocks>(unit, stride());
        return unit;
    }

private:
    const Operands &o_;
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

// The tiles with sums. They begin with what `out` has where there were columns before.
template <bool has_second, int num_blocks> class SumTiles {
public:
    explicit SumTiles(const Operands &o)
        : first_(o.out), second_(o.out + tile_rows * size_t(o.out_stride)),
          bytes_(size_t(o.out_stride) * 4) {
        if (o.accumulate) {
            load();
            return;
        }
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    void store() const {
        _tile_stored(0, first_, bytes_);
        if constexpr (num_blocks == 2) {
            _tile_stored(1, first_ + lanes, bytes_);
        }
        if constexpr (has_second) {
            _tile_stored(2, second_, bytes_);
        }
        if constexpr (has_second && num_blocks == 2) {
            _tile_stored(3, second_ + lanes, bytes_);
        }
    }

private:
    void load() const {
        fence();
        _tile_loadd(0, first_, bytes_);
        if constexpr (num_blocks == 2) {
            _tile_loadd(1, first_ + lanes, bytes_);
        }
        if constexpr (has_second) {
            _tile_loadd(2, second_, bytes_);
        }
        if constexpr (has_second && num_blocks == 2) {
            _tile_loadd(3, second_ + lanes, bytes_);
        }
    }

    float *const first_, *const second_;
    const size_t bytes_;
};

template <bool has_second, int num_blocks, class Units>
void multiply_tiles(const Operands &o, int rows, Units &&units) {
    const SumTiles<has_second, num_blocks> sums(o);
    const size_t x_bytes = size_t(o.x_stride) * 4;
    const bool is_narrow = o.cols < 32; // the tiles are as narrow
    for (int u = 0; u < std::max(1, o.cols / 32); ++u) {
        add_tiles<has_second, num_blocks>(o.x + u * tile_pairs, x_bytes, units.at(u),
                                          units.stride());
    }
    if (!is_narrow && o.cols % 32 != 0) {
        const Rest rest(o, rows, num_blocks);
        fence();
        add_tiles<has_second, num_blocks>(rest.x, 64, rest.blocks, tile_bytes);
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

// Call body(operands, unit) for some columns at a time. The first of them has that unit; the blocks
// of the operands are those of all columns. Sums go on from columns to columns, in order.
template <class Body> void each_chunk(const Operands &o, int rows, const Body &body) {
    const int most = std::max(1, chunk_numbers / (32 * rows)), units = (o.cols + 31) / 32;
    const int chunks = (units + most - 1) / most, step = (units + chunks - 1) / chunks;
    for (int unit = 0; unit < units; unit += step) {
        Operands chunk = o;
        chunk.x += unit * tile_pairs;
        chunk.cols = std::min(32 * step, o.cols - 32 * unit);
        chunk.accumulate = o.accumulate || unit > 0;
        body(chunk, unit);
    }
}

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

// Pairs of bf12 blocks as bf16, one after another, each in one of two panels. While the tiles work
// on a pair for all rows, the next one is unpacked little by little.
class UnpackedPairs {
public:
    // Of units from `first_unit` on, of blocks that have `cols` columns in all.
    UnpackedPairs(const Operands &o, int first_unit, int cols, int rows, int num_blocks,
                  uint8_t *panels)
        : o_(o), first_unit_(first_unit), header_bytes_(bf12_header_bytes(cols)),
          num_blocks_(num_blocks), num_units_(o.cols / bf12_cols),
          num_groups_((rows + 2 * tile_rows - 1) / (2 * tile_rows)),
          end_((num_blocks + 1) / 2 * num_units_), panels_(panels) {}

    size_t stride() const { return size_t(num_units_) * bf16_unit_bytes; }

    // When the tiles come to unit `u` of a pair in a group of rows, that unit and the next are
    // there. So is as much of the next pair as is due.
    const uint8_t *at(int pair, int group, int u) {
        const int begin = pair * num_units_;
        const int passed = (group - 1) * num_units_ + u;
        const int due = group == 0 ? u + 2 : num_units_ + passed / (num_groups_ - 1) + 1;
        for (const int until = std::min(begin + due, end_); next_ < until; ++next_) {
            unpack(next_ / num_units_, next_ % num_units_);
        }
        fence();
        return panel(pair) + size_t(u) * bf16_unit_bytes;
    }

private:
    uint8_t *panel(int pair) const { return panels_ + pair % 2 * 2 * stride(); }

    void unpack(int pair, int u) {
        uint8_t *out = panel(pair) + size_t(u) * bf16_unit_bytes;
        for (int n = 2 * pair; n < std::min(2 * pair + 2, num_blocks_); ++n, out += stride()) {
            const uint8_t *block = o_.blocks + n * o_.block_bytes;
            const int of_block = first_unit_ + u;
            const uint8_t *unit = block + header_bytes_ + size_t(of_block) * bf12_unit_bytes;
            for (int b = 0; b < bf12_unit_bytes; b += 64) {
                __builtin_prefetch(unit + 2 * bf12_ahead + b);
            }
            unpack_unit(header_of(block, of_block), unit, out);
        }
    }

    const Operands &o_;
    const int first_unit_;
    const size_t header_bytes_;
    const int num_blocks_, num_units_, num_groups_, end_;
    uint8_t *const panels_;
    int next_ = 0; // unit to unpack, of all pairs
};

// What one group of rows takes of a pair.
class PairUnits {
public:
    PairUnits(UnpackedPairs &pairs, int pair, int group)
        : pairs_(pairs), pair_(pair), group_(group) {}

    size_t stride() const { return pairs_.stride(); }
    const uint8_t *at(int u) const {
        const uint8_t *unit = pairs_.at(pair_, group_, u);
        fetch_ahead<2>(unit, stride());
        return unit;
    }

private:
    UnpackedPairs &pairs_;
    const int pair_, group_;
};

void multiply_pairs(const Operands &o, int first_unit, int cols, int rows, int num_blocks,
                    uint8_t *panels) {
    UnpackedPairs pairs(o, first_unit, cols, rows, num_blocks, panels);
    Configuration tiles;
    for (int n = 0; n < num_blocks; n += 2) {
        int index = 0;
        tiles.each_group(o.at_block(n), rows, [&](const Operands &group, int count) {
            const PairUnits units(pairs, n / 2, index++);
            if (n + 2 <= num_blocks) {
                multiply_group<2>(group, count, units);
            } else {
                multiply_group<1>(group, count, units);
            }
        });
    }
}

} // namespace

bool may_use_tiles() {
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
           syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

void gemm_bf16_by_tiles(const Operands &o, int rows, int num_blocks) {
    if (rows <= max_rows_as_tiles) {
        bf16_as_tiles(o, rows, num_blocks);
    } else {
        each_chunk(o, rows, [&](Operands chunk, int unit) {
            chunk.blocks += size_t(unit) * tile_bytes;
            multiply_all_rows<StoredUnits>(chunk, rows, num_blocks);
        });
    }
}

void gemm_bf12_by_tiles(const Operands &o, int rows, int num_blocks, float *unpacked) {
    if (rows <= max_rows_as_tiles) {
        bf12_as_tiles(o, rows, num_blocks);
    } else if (rows <= 2 * tile_rows) {
        multiply_all_rows<UnpackedUnits>(o, rows, num_blocks);
    } else {
        each_chunk(o, rows, [&](const Operands &chunk, int unit) {
            multiply_pairs(chunk, unit, o.cols, rows, num_blocks,
                           reinterpret_cast<uint8_t *>(unpacked));
        });
    }
}

} // namespace headrace
#endif
