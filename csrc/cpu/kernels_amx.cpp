// out[rows, 16 * blocks] = x[rows, cols] . packed bf16 blocks, both factors bf16, by Intel's tiles
// (AMX): sixteen rows by sixteen columns, 32 steps of k to an instruction.
//
// A packed block (matrix.h) is, as it lies, what the tiles take as their second factor, and the
// pairs of round_row are what they take as their first. Every sum runs over the same 32 steps at a
// time, in order along k: a row's result has the same bits whatever rows it is batched with.
#if defined(__x86_64__)
#include "cpu/operands.h"

#include <algorithm>
#include <cstring>
#include <sys/syscall.h>
#include <unistd.h>

// GCC 12 takes the undefined operand of its own intrinsics for a variable of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC target("avx512f,amx-tile,amx-bf16")
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

template <bool has_second, int num_blocks> void multiply_tiles(const Operands &o, int rows) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const size_t x_bytes = size_t(o.x_stride) * 4, out_bytes = size_t(o.out_stride) * 4;
    const float *x = o.x;
    const uint8_t *blocks = o.blocks;
    for (int k = 0; k + 32 <= o.cols; k += 32, x += tile_pairs, blocks += tile_bytes) {
        for (int n = 0; n < num_blocks; ++n) {
            for (int b = 0; b < tile_bytes; b += 64) {
                __builtin_prefetch(blocks + n * o.block_bytes + ahead_bytes + b);
            }
        }
        add_tiles<has_second, num_blocks>(x, x_bytes, blocks, o.block_bytes);
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

// The same sums without tiles, bit by bit, for so few rows that memory bounds them: vectors read it
// faster by a sixth. Within 32 steps of k, even ones and odd ones have sums of their own, from zero
// (TDPBF16PS in Intel's manual, which flushes denormals, too).
template <int num_rows, int num_blocks> void add_vectors(const Operands &o) {
    __m512 sums[num_rows][num_blocks] = {};
    const int num_pairs = (o.cols + 1) / 2;
    for (int begin = 0; begin < num_pairs; begin += tile_pairs) {
        __m512 even[num_rows][num_blocks] = {}, odd[num_rows][num_blocks] = {};
        const int end = std::min(begin + tile_pairs, num_pairs);
#pragma GCC unroll 2
        for (int pair = begin; pair < end; ++pair) {
            const uint8_t *block = o.blocks + size_t(pair) * 64;
#pragma GCC unroll 6
            for (int n = 0; n < num_blocks; ++n, block += o.block_bytes) {
                __builtin_prefetch(block + o.ahead);
                const __m512i both = _mm512_loadu_si512(block);
                const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                const __m512 high =
                    _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))));
#pragma GCC unroll 2
                for (int m = 0; m < num_rows; ++m) {
                    uint32_t x;
                    std::memcpy(&x, o.x + size_t(m) * o.x_stride + pair, 4);
                    const auto first = _mm512_castsi512_ps(_mm512_set1_epi32(int(x << 16)));
                    const auto second = _mm512_castsi512_ps(_mm512_set1_epi32(int(x & 0xffff0000)));
                    even[m][n] = _mm512_fmadd_ps(first, low, even[m][n]);
                    odd[m][n] = _mm512_fmadd_ps(second, high, odd[m][n]);
                }
            }
        }
        for (int m = 0; m < num_rows; ++m) {
            for (int n = 0; n < num_blocks; ++n) {
                sums[m][n] = _mm512_add_ps(sums[m][n], _mm512_add_ps(even[m][n], odd[m][n]));
            }
        }
    }
    for (int m = 0; m < num_rows; ++m) {
        for (int n = 0; n < num_blocks; ++n) {
            _mm512_storeu_ps(o.out + size_t(m) * o.out_stride + n * lanes, sums[m][n]);
        }
    }
}

template <int num_rows, int wide> void multiply_vectors(const Operands &o, int num_blocks) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    int n = 0;
    for (; n + wide <= num_blocks; n += wide) {
        add_vectors<num_rows, wide>(o.at_block(n));
    }
    for (; n < num_blocks; ++n) {
        add_vectors<num_rows, 1>(o.at_block(n));
    }
    _mm_setcsr(mode);
}

// Rows [first, last), `at_once` of them to the tiles. Blocks go outside: those of one tile stay in
// the cache for all rows.
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
                is_pair ? multiply_tiles<true, 2>(part, at_once)
                        : multiply_tiles<true, 1>(part, at_once);
            } else {
                is_pair ? multiply_tiles<false, 2>(part, at_once)
                        : multiply_tiles<false, 1>(part, at_once);
            }
        }
    }
}

} // namespace

bool may_use_tiles() {
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

void gemm_bf16_by_tiles(const Operands &o, int rows, int num_blocks) {
    if (rows <= 2) {
        rows == 1 ? multiply_vectors<1, 6>(o, num_blocks) : multiply_vectors<2, 4>(o, num_blocks);
        return;
    }
    const int whole = rows / (2 * tile_rows) * 2 * tile_rows;
    multiply_rows(o, 0, whole, 2 * tile_rows, num_blocks);
    multiply_rows(o, whole, rows, rows - whole, num_blocks);
    _tile_release();
}

} // namespace headrace
#endif
