// out[rows, 16 * blocks] = x[rows, cols] . packed bf16 blocks, both factors bf16, by Intel's tiles
// (AMX): sixteen rows by sixteen columns, 32 steps of k to an instruction.
//
// A packed block (matrix.h) is, as it lies, what the tiles take as their second factor, and the
// pairs of round_row are what they take as their first. Every sum runs over the same 32 steps at a
// time, in order along k: a row's result has the same bits whatever rows it is batched with.
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
constexpr int ahead_bytes = 4 * tile_bytes; // to prefetch, in each block

// What the tiles are, as the instruction reads it. Tile 2 * m + n has the sums of the m-th rows and
// the n-th block, tile 4 + m the rows and tile 6 + n the block.
struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Sums of `first` and `second` rows; without the second, their tiles are left alone.
    Shape(int first, int second) {
        for (int tile = 0; tile < 8; ++tile) {
            row_bytes[tile] = 4 * tile_pairs;
            const bool is_second = tile == 2 || tile == 3 || tile == 5;
            rows[tile] = uint8_t(tile >= 6 ? tile_rows : is_second && second ? second : first);
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

// Blocks of bf16, as they lie.
template <int num_blocks> class StoredUnits {
public:
    explicit StoredUnits(const Operands &o) : o_(o) {}

    size_t stride() const { return o_.block_bytes; }
    const uint8_t *at(int u) const {
        const uint8_t *unit = o_.blocks + size_t(u) * tile_bytes;
        for (int n = 0; n < num_blocks; ++n) {
            for (int b = 0; b < tile_bytes; b += 64) {
                __builtin_prefetch(unit + n * o_.block_bytes + ahead_bytes + b);
            }
        }
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

template <template <int> class Units, bool has_second, int num_blocks>
void multiply_tiles(const Operands &o, int rows) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const size_t x_bytes = size_t(o.x_stride) * 4, out_bytes = size_t(o.out_stride) * 4;
    Units<num_blocks> units(o);
    for (int u = 0; u < o.cols / 32; ++u) {
        add_tiles<has_second, num_blocks>(o.x + u * tile_pairs, x_bytes, units.at(u),
                                          units.stride());
    }
    if (o.cols % 32 != 0) {
        const Rest rest(o, rows, num_blocks);
        fence();
        add_tiles<has_second, num_blocks>(rest.x, 64, rest.blocks, tile_bytes);
        fence();
    }
    _tile_stored(0, o.out, out_bytes);
    if constexpr (num_blocks == 2) {
        _tile_stored(1, o.out + lanes, out_bytes);
    }
    if constexpr (has_second) {
        float *out = o.out + tile_rows * size_t(o.out_stride);
        _tile_stored(2, out, out_bytes);
        if constexpr (num_blocks == 2) {
            _tile_stored(3, out + lanes, out_bytes);
        }
    }
}

// Rows [first, last), `at_once` of them to the tiles. Blocks go outside: those of one tile stay in
// the cache for all rows.
template <template <int> class Units>
void multiply_rows(const Operands &o, int first, int last, int at_once, int num_blocks) {
    if (first == last) {
        return;
    }
    const bool has_second = at_once > tile_rows;
    const Shape shape(has_second ? tile_rows : at_once, has_second ? at_once - tile_rows : 0);
    fence();
    _tile_loadconfig(&shape);
    for (int n = 0; n < num_blocks; n += 2) {
        const bool is_pair = n + 2 <= num_blocks;
        for (int m = first; m < last; m += at_once) {
            const Operands part = o.at_block(n).at_row(m);
            if (has_second) {
                is_pair ? multiply_tiles<Units, true, 2>(part, at_once)
                        : multiply_tiles<Units, true, 1>(part, at_once);
            } else {
                is_pair ? multiply_tiles<Units, false, 2>(part, at_once)
                        : multiply_tiles<Units, false, 1>(part, at_once);
            }
        }
    }
}

template <template <int> class Units>
void multiply_all_rows(const Operands &o, int rows, int num_blocks) {
    const int whole = rows / (2 * tile_rows) * 2 * tile_rows;
    multiply_rows<Units>(o, 0, whole, 2 * tile_rows, num_blocks);
    multiply_rows<Units>(o, whole, rows, rows - whole, num_blocks);
    _tile_release();
}

} // namespace

bool may_use_tiles() {
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

void gemm_bf16_by_tiles(const Operands &o, int rows, int num_blocks) {
    if (rows <= max_rows_as_tiles) {
        bf16_as_tiles(o, rows, num_blocks);
    } else {
        multiply_all_rows<StoredUnits>(o, rows, num_blocks);
    }
}

void gemm_bf12_by_tiles(const Operands &o, int rows, int num_blocks) {
    if (rows <= max_rows_as_tiles) {
        bf12_as_tiles(o, rows, num_blocks);
    } else {
        multiply_all_rows<UnpackedUnits>(o, rows, num_blocks);
    }
}

} // namespace headrace
#endif
