#if defined(__x86_64__)
#include "cpu/few_rows.h"

#include <algorithm>
#include <cstring>

// GCC 12 takes the undefined operand of its own intrinsics for a variable of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vbmi,avx512bf16")
#include "cpu/bf12_vectors.h"

namespace headrace {

namespace {

uint32_t pair_at(const float *x, int pair) {
    uint32_t bits;
    std::memcpy(&bits, x + pair, 4);
    return bits;
}

// As gemm.h: each product is added in turn. `x` is floats.
struct FloatSum {
    __m512 sum;

    void begin_unit() {}
    void add(const float *x, int pair, const Pair &weights) {
        sum = _mm512_fmadd_ps(_mm512_set1_ps(x[2 * pair]), weights.first(), sum);
        sum = _mm512_fmadd_ps(_mm512_set1_ps(x[2 * pair + 1]), weights.second(), sum);
    }
    void end_unit() {}
};

// As gemm_bf16 of gemm.h, where vectors multiply pairs.
struct DotSum {
    __m512 sum;

    void begin_unit() {}
    void add(const float *x, int pair, const Pair &weights) {
        const __m512i same = _mm512_set1_epi32(int(pair_at(x, pair)));
        sum = _mm512_dpbf16_ps(sum, __m512bh(same), __m512bh(weights.both));
    }
    void end_unit() {}
};

// As in the tiles, even and odd steps of 32 along k have sums of their own, from zero. Denormals
// are flushed, too (TDPBF16PS in Intel's manual).
struct TileSum {
    __m512 sum, even, odd;

    void begin_unit() { even = odd = _mm512_setzero_ps(); }
    void add(const float *x, int pair, const Pair &weights) {
        const uint32_t bits = pair_at(x, pair);
        const auto first = _mm512_castsi512_ps(_mm512_set1_epi32(int(bits << 16)));
        const auto second = _mm512_castsi512_ps(_mm512_set1_epi32(int(bits & 0xffff0000)));
        even = _mm512_fmadd_ps(first, weights.first(), even);
        odd = _mm512_fmadd_ps(second, weights.second(), odd);
    }
    void end_unit() { sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd)); }
};

template <class Sum, int num_rows, int num_blocks> struct Sums {
    Sum of[num_rows][num_blocks];

    template <class Call> void each(const Call &call) {
        for (int m = 0; m < num_rows; ++m) {
            for (int n = 0; n < num_blocks; ++n) {
                call(of[m][n], m, n);
            }
        }
    }
    // Of `count` blocks from the n-th on: each factor is read once for all of them.
    template <class Weights>
    __attribute__((always_inline)) void add(const Operands &o, int pair, int n, int count,
                                            const Weights &weights) {
#pragma GCC unroll 16
        for (int m = 0; m < num_rows; ++m) {
#pragma GCC unroll 2
            for (int b = 0; b < count; ++b) {
                of[m][n + b].add(o.x + size_t(m) * o.x_stride, pair, weights(b));
            }
        }
    }
    void load(const Operands &o) {
        each([&](Sum &s, int m, int n) {
            s.sum = _mm512_loadu_ps(o.out + size_t(m) * o.out_stride + n * lanes);
        });
    }
    void store(const Operands &o) {
        each([&](const Sum &s, int m, int n) {
            _mm512_storeu_ps(o.out + size_t(m) * o.out_stride + n * lanes, s.sum);
        });
    }
};

template <class Sum, int num_rows, int num_blocks> void multiply_bf16(const Operands &o) {
    Sums<Sum, num_rows, num_blocks> sums = {};
    if (o.accumulate) {
        sums.load(o);
    }
    const int num_pairs = (o.cols + 1) / 2;
    for (int begin = 0; begin < num_pairs; begin += unit_pairs) {
        sums.each([](Sum &s, int, int) { s.begin_unit(); });
        const int end = std::min(begin + unit_pairs, num_pairs);
#pragma GCC unroll 2
        for (int pair = begin; pair < end; ++pair) {
            const uint8_t *block = o.blocks + size_t(pair) * 64;
#pragma GCC unroll 6
            for (int n = 0; n < num_blocks; ++n, block += o.block_bytes) {
                __builtin_prefetch(block + o.ahead);
                sums.add(o, pair, n, 1, [&](int) { return Pair{_mm512_loadu_si512(block)}; });
            }
        }
        sums.each([](Sum &s, int, int) { s.end_unit(); });
    }
    sums.store(o);
}

template <class Sum, int num_rows, int num_blocks> void multiply_bf12(const Operands &o) {
    // Blocks that share what is read of the rows, where these are more than the blocks.
    constexpr int at_once = num_rows > num_blocks ? num_blocks : 1;
    Sums<Sum, num_rows, num_blocks> sums = {};
    const uint8_t *units = o.blocks + bf12_header_bytes(o.cols);
    // Few blocks are passed in less time, so more of each is on its way: six units in all. Behind
    // the end of a block, those of the next tile are.
    constexpr int units_ahead = num_blocks < 6 ? (6 + num_blocks - 1) / num_blocks : 1;
    const int last_unit = o.cols / bf12_cols - units_ahead;
    const ptrdiff_t to_next = (num_blocks - 1) * o.block_bytes + bf12_header_bytes(o.cols);
    for (int u = 0; u < o.cols / bf12_cols; ++u, units += bf12_unit_bytes) {
        const ptrdiff_t ahead = units_ahead * bf12_unit_bytes + (u < last_unit ? 0 : to_next);
        __m512i tables[num_blocks];
        bool is_packed = true;
#pragma GCC unroll 6
        for (int n = 0; n < num_blocks; ++n) {
            const Bf12Header &header = header_of(o.blocks + n * o.block_bytes, u);
            __builtin_prefetch(reinterpret_cast<const uint8_t *>(&header) +
                               num_blocks * o.block_bytes); // of the blocks that come next
            tables[n] = table_of(header);
            is_packed = is_packed && !header.stored;
        }
        sums.each([](Sum &s, int, int) { s.begin_unit(); });
        const auto add_four = [&](int g, int n, bool is_packed) {
            Pair pairs[at_once][4];
#pragma GCC unroll 2
            for (int b = 0; b < at_once; ++b) {
                const uint8_t *unit = units + (n + b) * o.block_bytes;
                for (int line = 0; line < 3; ++line) {
                    __builtin_prefetch(unit + ahead + (3 * g + line) * 64);
                }
                const auto *stored = header_of(o.blocks + (n + b) * o.block_bytes, u).stored;
                if (is_packed || !stored) {
                    unpack_four(unit, g, tables[n + b], pairs[b]);
                } else {
                    load_four(stored, g, pairs[b]);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                sums.add(o, u * unit_pairs + 4 * g + i, n, at_once,
                         [&](int b) { return pairs[b][i]; });
            }
        };
        if (__builtin_expect(is_packed, true)) {
#pragma GCC unroll 4
            for (int g = 0; g < unit_pairs / 4; ++g) {
#pragma GCC unroll 6
                for (int n = 0; n < num_blocks; n += at_once) {
                    add_four(g, n, true);
                }
            }
        } else {
            for (int g = 0; g < unit_pairs / 4; ++g) {
                for (int n = 0; n < num_blocks; n += at_once) {
                    add_four(g, n, false);
                }
            }
        }
        sums.each([](Sum &s, int, int) { s.end_unit(); });
    }
    sums.store(o);
}

// Blocks in tiles of `wide`, the rest one by one.
template <class Wide, class Single>
void each_tile(const Operands &o, int num_blocks, int wide, const Wide &multiply_wide,
               const Single &multiply_single) {
    int n = 0;
    for (; n + wide <= num_blocks; n += wide) {
        multiply_wide(o.at_block(n));
    }
    for (; n < num_blocks; ++n) {
        multiply_single(o.at_block(n));
    }
}

// Rows in groups of `num_rows`, blocks in tiles of `wide`, which stay in the cache for all groups.
// Returns the first row not done.
template <class Sum, int num_rows, int wide>
int bf12_groups(const Operands &o, int first_row, int rows, int num_blocks) {
    const int last_row = first_row + (rows - first_row) / num_rows * num_rows;
    const auto each_group = [&](const auto &multiply) {
        return [&](const Operands &tile) {
            for (int m = first_row; m < last_row; m += num_rows) {
                multiply(tile.at_row(m));
            }
        };
    };
    each_tile(o, num_blocks, wide, each_group(multiply_bf12<Sum, num_rows, wide>),
              each_group(multiply_bf12<Sum, num_rows, 1>));
    return last_row;
}

template <class Sum, int max_rows> void bf12_by(const Operands &o, int rows, int num_blocks) {
    int row = 0;
    if constexpr (max_rows > 2) {
        row = bf12_groups<Sum, 16, 1>(o, row, rows, num_blocks);
        row = bf12_groups<Sum, 8, 2>(o, row, rows, num_blocks);
        row = bf12_groups<Sum, 4, 4>(o, row, rows, num_blocks);
    }
    row = bf12_groups<Sum, 2, 4>(o, row, rows, num_blocks);
    bf12_groups<Sum, 1, 6>(o, row, rows, num_blocks);
}

// The tiles' mode: denormals are zero.
class FlushedDenormals {
public:
    FlushedDenormals() { _mm_setcsr(mode_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
    ~FlushedDenormals() { _mm_setcsr(mode_); }

private:
    const unsigned mode_ = _mm_getcsr();
};

} // namespace

void bf12_by_floats(const Operands &o, int rows, int num_blocks) {
    bf12_by<FloatSum, max_few_rows>(o, rows, num_blocks);
}

void bf12_by_dots(const Operands &o, int rows, int num_blocks) {
    bf12_by<DotSum, max_few_rows>(o, rows, num_blocks);
}

void bf12_as_tiles(const Operands &o, int rows, int num_blocks) {
    const FlushedDenormals flushed;
    bf12_by<TileSum, max_rows_as_tiles>(o, rows, num_blocks);
}

void bf16_as_tiles(const Operands &o, int rows, int num_blocks) {
    const FlushedDenormals flushed;
    if (rows == 1) {
        each_tile(o, num_blocks, 6, multiply_bf16<TileSum, 1, 6>, multiply_bf16<TileSum, 1, 1>);
    } else {
        each_tile(o, num_blocks, 4, multiply_bf16<TileSum, 2, 4>, multiply_bf16<TileSum, 2, 1>);
    }
}

void unpack_bf12(const uint8_t *blocks, int cols, int num_blocks, uint8_t *out) {
    const size_t bytes = block_bytes(Format::bf12, cols);
    for (int n = 0; n < num_blocks; ++n, blocks += bytes) {
        const uint8_t *units = blocks + bf12_header_bytes(cols);
        for (int u = 0; u < cols / bf12_cols; ++u, out += bf16_unit_bytes) {
            for (int line = 0; line < bf12_unit_bytes; line += 64) {
                __builtin_prefetch(units + size_t(u) * bf12_unit_bytes + 2 * bf12_ahead + line);
            }
            unpack_unit(header_of(blocks, u), units + size_t(u) * bf12_unit_bytes, out);
        }
    }
}

} // namespace headrace
#endif
