// Attention of a segment (attention.h) by Intel's tiles (AMX), where queries and numerators are
// rounded to bf16, as keys and values are.
//
// Pages are, as they lie, what the tiles take as their second factor, and pairs of bf16 what they
// take as their first. Sums run over 32 steps at a time, in order. Those of scores run along the
// head, those of values along the keys, from a multiple of 32. A row's result has the same bits
// whatever rows it is with. From the cache this reads 60 GB/s even for a single row; vectors read
// 45.
#if defined(__x86_64__)
#include "cpu/kernels.h"

#include <algorithm>
#include <utility>

// GCC 12 takes the undefined operand of its own intrinsics for a variable of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512bf16,amx-tile,amx-bf16")
#include "cpu/attention_amx.h"

namespace headrace {

namespace {

constexpr int num_steps = 32, num_pairs = 16; // of k, in a tile; a pair is two steps
constexpr int pair_bytes = 4 * lanes;         // in a block
constexpr int tile_rows = 16;
constexpr int max_blocks = 4; // with sums in tiles at once

// The keys of a segment that some row sees.
struct Span {
    int first; // to be read, a multiple of 16
    int begin; // of scores, a multiple of 32
    int end;

    Span(const AttentionTile &tile, int segment)
        : first(std::max(tile.first_key(0) / lanes * lanes, segment * segment_tokens)),
          begin(first / num_steps * num_steps),
          end(std::min(tile.last_key + 1, (segment + 1) * segment_tokens)) {}
    int num_scores() const { return (end - begin + num_steps - 1) / num_steps * num_steps; }
};

// The block of 16 keys that begins with `key`.
const uint8_t *key_block(const AttentionTile &tile, int key) {
    return tile.keys + tile.page_offset(key) +
           key % tile.page_tokens / lanes * block_bytes(Format::bf16, tile.head_dim);
}

// The pair of values in the first block that begins with `key`.
const uint8_t *value_pair(const AttentionTile &tile, int key) {
    return tile.values + tile.page_offset(key) + key % tile.page_tokens / 2 * pair_bytes;
}

// Values of 32 keys, in pages or, where these have not all of them, copied, with zeros for the
// others: rows of a page that were never written may hold anything.
class Values {
public:
    Values(const AttentionTile &tile, const Span &span)
        : tile_(tile), span_(span), page_block_(block_bytes(Format::bf16, tile.page_tokens)) {}

    // What is copied is read line by line from far apart: fetch it meanwhile.
    void prefetch_rest() const {
        const int key = span_.end / lanes * lanes;
        for (int i = key; i < span_.end; i += 2) {
            const uint8_t *pair = value_pair(tile_, key) + (i - key) / 2 * pair_bytes;
            for (int n = 0; n < blocks_of(tile_.head_dim); ++n) {
                _mm_prefetch(pair + n * page_block_, _MM_HINT_T0);
            }
        }
    }

    // Look at `num_blocks` blocks from the n-th on, for keys [key, key + 32).
    void look_at(int key, int n, int num_blocks) {
        const bool is_whole = key + num_steps <= span_.end && tile_.page_tokens % num_steps == 0;
        if (is_whole) {
            blocks_ = value_pair(tile_, key) + n * page_block_;
            block_bytes_ = page_block_;
            return;
        }
        blocks_ = copies_[0];
        block_bytes_ = sizeof copies_[0];
        for (int half = 0; half < num_steps; half += lanes) { // in one page
            for (int i = 0; i < num_blocks; ++i) {
                copy(key + half, (n + i) * page_block_, copies_[i] + half / 2 * pair_bytes);
            }
        }
    }
    const uint8_t *block(int i) const { return blocks_ + i * block_bytes_; }

private:
    // 16 keys of a block.
    void copy(int key, size_t offset, uint8_t *out) const {
        const int present = key < span_.first ? 0 : std::clamp(span_.end - key, 0, lanes);
        const uint8_t *pairs = present ? value_pair(tile_, key) + offset : nullptr;
        for (int i = 0; i < lanes; i += 2, out += pair_bytes) {
            __m512i pair = _mm512_setzero_si512();
            if (i < present) {
                const __mmask32 both = i + 1 < present ? 0xffffffff : 0x55555555;
                pair = _mm512_maskz_loadu_epi16(both, pairs + i / 2 * pair_bytes);
            }
            _mm512_store_si512(out, pair);
        }
    }

    const AttentionTile &tile_;
    const Span &span_;
    const size_t page_block_;
    const uint8_t *blocks_ = nullptr;
    size_t block_bytes_ = 0;
    alignas(64) uint8_t copies_[max_blocks][num_pairs * pair_bytes];
};

// ---- Softmax

// 2^x, for x at most a little above 0; relative error below 2e-7 (minimax on [0, 1)).
__m512 exp2_of(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF); // x - floor(x), 0 at -inf
    __m512 p = _mm512_set1_ps(1.867130515e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.017028846e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.579991266e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.401644439e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931512952e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x); // p * 2^floor(x)
}

// Scores beyond [first, last] become minus infinity, in the vector from `i` on.
void mask(float *scores, int i, int first, int last) {
    const __m512i keys =
        _mm512_add_epi32(_mm512_set1_epi32(i),
                         _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __mmask16 is_outside = _mm512_cmplt_epi32_mask(keys, _mm512_set1_epi32(first)) |
                                 _mm512_cmpgt_epi32_mask(keys, _mm512_set1_epi32(last));
    _mm512_mask_storeu_ps(scores + i, is_outside, _mm512_set1_ps(-__builtin_inff()));
}

// Turn the scores of a row into numerators, in pairs of bf16, zero where masked.
void softmax_pairs(float *scores, int num_keys, int first, int last, float softcap, float *maximum,
                   float *sum) {
    const int begin = first / num_steps * num_steps, end = last / num_steps * num_steps + num_steps;
    if (softcap != 0.0f) {
        avx512_kernels.softcap(softcap, scores + begin, end - begin);
    }
    for (const int i : {begin, begin + lanes, end - num_steps, end - lanes}) {
        mask(scores, i, first, last);
    }
    __m512 highest = _mm512_loadu_ps(scores + begin);
    for (int i = begin + lanes; i < end; i += lanes) {
        highest = _mm512_max_ps(highest, _mm512_loadu_ps(scores + i));
    }
    *maximum = _mm512_reduce_max_ps(highest);
    const __m512 log2_e = _mm512_set1_ps(1.44269504f);
    const __m512 shift = _mm512_mul_ps(_mm512_set1_ps(-*maximum), log2_e);
    const auto numerators = [&](int i) {
        return exp2_of(_mm512_fmadd_ps(_mm512_loadu_ps(scores + i), log2_e, shift));
    };
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < begin; i += num_steps) {
        _mm512_storeu_ps(scores + i / 2, _mm512_setzero_ps());
    }
    for (int i = begin; i < end; i += num_steps) {
        const __m512 low = numerators(i), high = numerators(i + lanes);
        total = _mm512_add_ps(total, _mm512_add_ps(low, high));
        _mm512_storeu_ps(scores + i / 2, __m512(_mm512_cvtne2ps_pbh(high, low)));
    }
    for (int i = end; i < num_keys; i += num_steps) {
        _mm512_storeu_ps(scores + i / 2, _mm512_setzero_ps());
    }
    *sum = _mm512_reduce_add_ps(total);
}

void softmax_rows(const AttentionTile &tile, const Span &span, float *scores,
                  const Partial &partial) {
    const int num_keys = span.num_scores();
    for (int row = 0; row < tile.rows(); ++row, scores += segment_tokens) {
        const int first = std::max(tile.first_key(row), span.first) - span.begin;
        const int last = std::min(tile.last_key_of(row), span.end - 1) - span.begin;
        if (first <= last) {
            softmax_pairs(scores, num_keys, first, last, tile.softcap, partial.maximum + row,
                          partial.sum + row);
        } else { // all in other segments
            std::fill_n(scores, num_keys / 2, 0.0f);
            partial.maximum[row] = -__builtin_inff();
            partial.sum[row] = 0.0f;
        }
    }
}

// ---- Products by tiles: 0 to 3 have sums, of a block each. 4 has rows of the first factor and 6 a
// block of the second. 5 and 7 have the same where the rest of a head is less than 32.

constexpr int x_tile = 4, block_tile = 6, of_rest = 1;

struct alignas(64) Shape { // of the tiles, as the instruction reads it
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    Shape(int num_rows, int rest_pairs) {
        for (int tile = 0; tile < 8; ++tile) {
            row_bytes[tile] = pair_bytes;
            rows[tile] = uint8_t(tile == block_tile ? num_pairs : num_rows);
        }
        if (rest_pairs > 0) {
            row_bytes[x_tile + of_rest] = uint16_t(4 * rest_pairs);
            rows[block_tile + of_rest] = uint8_t(rest_pairs);
        }
    }
};

template <int tile> void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

template <int tile> void load(const void *p, size_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(tile) : "memory");
}

template <int tile> void store(void *p, size_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride_bytes), "i"(tile)
                 : "memory");
}

template <int sums, int x, int block> void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(x), "i"(block));
}

template <int... n> using Blocks = std::integer_sequence<int, n...>;

template <int rest, int... n, class Block>
void add_step(Blocks<n...>, const float *x, int x_stride, const Block &block) {
    load<x_tile + rest>(x, size_t(x_stride) * 4);
    ((load<block_tile + rest>(block(n), pair_bytes),
      multiply<n, x_tile + rest, block_tile + rest>()),
     ...);
}

template <int... n>
void score_rows(Blocks<n...> all, const AttentionTile &tile, int row, const uint8_t *const *blocks,
                float *out) {
    const float *x = tile.queries + size_t(row) * tile.head_dim;
    const auto block_at = [&](int k) {
        return [=](int i) { return blocks[i] + k / 2 * pair_bytes; };
    };
    (zero<n>(), ...);
    int k = 0;
    for (; k + num_steps <= tile.head_dim; k += num_steps) {
        add_step<0>(all, x + k / 2, tile.head_dim, block_at(k));
    }
    if (k < tile.head_dim) {
        add_step<of_rest>(all, x + k / 2, tile.head_dim, block_at(k));
    }
    (store<n>(out + n * lanes, segment_tokens * 4), ...);
}

template <int... n>
void sum_rows(Blocks<n...> all, Values &values, const Span &span, int first_block,
              const float *numerators, float *out, int out_stride) {
    (zero<n>(), ...);
    for (int key = span.begin; key < span.end; key += num_steps, numerators += num_pairs) {
        values.look_at(key, first_block, sizeof...(n));
        add_step<0>(all, numerators, segment_tokens, [&](int i) { return values.block(i); });
    }
    (store<n>(out + n * lanes, size_t(out_stride) * 4), ...);
}

// Call body(blocks, first) for all blocks, as many at a time as there are sums.
template <class Body> void each_blocks(int num_blocks, const Body &body) {
    int n = 0;
    for (; n + max_blocks <= num_blocks; n += max_blocks) {
        body(Blocks<0, 1, 2, 3>(), n);
    }
    switch (num_blocks - n) {
    case 1:
        return body(Blocks<0>(), n);
    case 2:
        return body(Blocks<0, 1>(), n);
    case 3:
        return body(Blocks<0, 1, 2>(), n);
    }
}

// Call body(first) for the rows of each tile. The last may have some that the one before had.
template <class Body> void each_rows(int rows, const Body &body) {
    for (int row = 0; row < rows; row += tile_rows) {
        body(std::max(0, std::min(row, rows - tile_rows)));
    }
}

// Few rows wait for memory: values are fetched while keys are multiplied, and the next keys while
// values are.
bool are_few(const AttentionTile &tile) {
    return tile.rows() <= tile_rows;
}

void fetch(const uint8_t *p, size_t bytes) {
    for (size_t b = 0; b < bytes; b += 64) {
        _mm_prefetch(p + b, _MM_HINT_T0);
    }
}

void score(const AttentionTile &tile, const Span &span, float *scores) {
    const size_t block_size = block_bytes(Format::bf16, tile.head_dim);
    each_blocks(blocks_of(span.end - span.first), [&](auto all, int n) {
        const uint8_t *blocks[max_blocks];
        for (int i = 0; i < int(all.size()); ++i) {
            blocks[i] = key_block(tile, span.first + (n + i) * lanes);
        }
        float *out = scores + (span.first - span.begin) + n * lanes;
        each_rows(tile.rows(),
                  [&](int row) { score_rows(all, tile, row, blocks, out + row * segment_tokens); });
        for (int i = 0; are_few(tile) && i < int(all.size()); ++i) {
            fetch(blocks[i] + (tile.values - tile.keys), block_size);
        }
    });
}

void sum_values(const AttentionTile &tile, const Span &span, Values &values,
                const float *numerators, const Partial &partial) {
    if (are_few(tile) && tile.next_keys) {
        const int first = span.begin / tile.page_tokens * tile.page_tokens;
        for (int key = first; key < span.end; key += tile.page_tokens) {
            fetch(tile.next_keys + tile.page_offset(key), tile.values - tile.keys);
        }
    }
    each_rows(tile.rows(), [&](int row) {
        each_blocks(blocks_of(tile.head_dim), [&](auto all, int n) {
            sum_rows(all, values, span, n, numerators + row * segment_tokens,
                     partial.values + size_t(row) * partial.stride + n * lanes, partial.stride);
        });
    });
}

} // namespace

void attend_segment_by_tiles(const AttentionTile &tile, int segment, float *scores,
                             const Partial &partial) {
    if (!tile.is_rounded) {
        avx512_kernels.attend_segment(tile, segment, scores, partial);
        return;
    }
    const Span span(tile, segment);
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON); // denormal numerators, which bf16 drops, are slow
    const Shape shape(std::min(tile.rows(), tile_rows), (tile.head_dim % num_steps + 1) / 2);
    asm volatile("ldtilecfg %0" ::"m"(shape));
    Values values(tile, span);
    values.prefetch_rest();
    score(tile, span, scores);
    softmax_rows(tile, span, scores, partial);
    sum_values(tile, span, values, scores, partial);
    asm volatile("tilerelease");
    _mm_setcsr(mode);
}

} // namespace headrace
#endif
