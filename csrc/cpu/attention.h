// Paged attention of a tile of consecutive tokens of one sequence, for one KV head.
//
// A page holds keys as blocks of 16 tokens along the head, and values as blocks of 16 numbers of
// the head along the tokens. Both are laid out as packed weights (matrix.h, f32 or bf16), so scores
// and sums of values are gemm tiles. Keys are taken in segments at fixed positions, and segments
// are merged in order. So a token's result depends neither on its batch mates nor on the threads.
#pragma once
#include "cpu/gemm.h"
#include "cpu/math.h"

namespace headrace {

// Mask the scores of keys [begin, begin + num_keys), and return the highest.
template <class V> float mask_row(float *scores, int num_keys, int first, int last, float softcap) {
    const float minus_infinity = -__builtin_inff();
    if (softcap != 0.0f) {
        for (int i = 0; i < num_keys; i += lanes) {
            const auto capped = tanh_of<V>(V::mul(V::load(scores + i), V::set(1.0f / softcap)));
            V::store(scores + i, V::mul(capped, V::set(softcap)));
        }
    }
    for (int i = 0; i < first; ++i) {
        scores[i] = minus_infinity;
    }
    for (int i = last + 1; i < num_keys; ++i) {
        scores[i] = minus_infinity;
    }
    auto highest = V::set(minus_infinity);
    for (int i = 0; i < num_keys; i += lanes) {
        highest = V::max(highest, V::load(scores + i));
    }
    return V::highest(highest);
}

// Turn them into softmax numerators, and return their sum.
template <class V> float exp_row(float *scores, int num_keys, float maximum) {
    auto total = V::set(0.0f);
    for (int i = 0; i < num_keys; i += lanes) {
        const auto numerator = exp_of<V>(V::sub(V::load(scores + i), V::set(maximum)));
        V::store(scores + i, numerator);
        total = V::add(total, numerator);
    }
    return V::sum(total);
}

template <class V>
void multiply_page(const AttentionTile &tile, const Operands &operands, int num_blocks) {
    if constexpr (V::has_bf16) {
        if (tile.is_rounded) {
            gemm_bf16<V>(operands, tile.rows(), num_blocks);
            return;
        }
    }
    gemm<V>(tile.format, operands, tile.rows(), num_blocks, nullptr);
}

// The keys of a segment that some row sees, from a whole block on.
struct KeySpan {
    int begin, end;

    KeySpan(const AttentionTile &tile, int segment) {
        const int first = segment * segment_tokens, last = first + segment_tokens;
        begin = tile.first_key(0) / lanes * lanes;
        begin = begin < first ? first : begin;
        end = tile.last_key + 1;
        end = end > last ? last : end;
    }
};

// Pages lie anywhere, so a tile prefetches from the page that comes next what it reads from its
// own: line by line, for a burst would fill the queue and hold up what follows.
template <class V> void score_keys(const AttentionTile &tile, const KeySpan &span, float *scores) {
    const int begin = span.begin, end = span.end;
    const size_t key_block = block_bytes(tile.format, tile.head_dim);
    for (int key = begin, next; key < end; key = next) {
        next = (key / tile.page_tokens + 1) * tile.page_tokens;
        const int stop = next < end ? next : end;
        const uint8_t *page = tile.keys + tile.page_offset(key);
        const uint8_t *next_page =
            next < end ? tile.keys + tile.page_offset(next) : tile.values + tile.page_offset(begin);
        const Operands operands{page + key % tile.page_tokens / lanes * key_block,
                                key_block,
                                tile.head_dim,
                                tile.queries,
                                tile.head_dim,
                                scores + (key - begin),
                                segment_tokens,
                                false,
                                next_page - page};
        multiply_page<V>(tile, operands, blocks_of(stop - key));
    }
}

// Turn all rows' scores into numerators. What a row needs of itself comes in two passes, so that
// the processor works on several rows at a time.
template <class V>
void softmax_tile(const AttentionTile &tile, const KeySpan &span, float *scores,
                  const Partial &partial) {
    const int num_keys = span.end - span.begin;
    for (int row = 0; row < tile.rows(); ++row) {
        const int first = tile.first_key(row) - span.begin;
        const int last = tile.last_key_of(row) - span.begin;
        float *row_scores = scores + row * segment_tokens;
        if (last < 0 || first >= num_keys) { // all in other segments
            std::fill_n(row_scores, padded(num_keys), -__builtin_inff());
            partial.maximum[row] = -__builtin_inff();
        } else {
            partial.maximum[row] =
                mask_row<V>(row_scores, padded(num_keys), first, last, tile.softcap);
        }
    }
    for (int row = 0; row < tile.rows(); ++row) {
        float *row_scores = scores + row * segment_tokens;
        const float maximum = partial.maximum[row];
        const int first = tile.first_key(row) - span.begin;
        if (tile.last_key_of(row) < span.begin || first >= num_keys) {
            std::fill_n(row_scores, padded(num_keys), 0.0f);
            partial.sum[row] = 0.0f;
        } else {
            partial.sum[row] = exp_row<V>(row_scores, padded(num_keys), maximum);
        }
        if (tile.is_rounded) {
            round_row<V>(row_scores, padded(num_keys), row_scores);
        }
    }
}

template <class V>
void add_values(const AttentionTile &tile, const KeySpan &span, const float *scores,
                const Partial &partial) {
    const int begin = span.begin, end = span.end;
    const size_t value_block = block_bytes(tile.format, tile.page_tokens);
    for (int key = begin, next; key < end; key = next) {
        next = (key / tile.page_tokens + 1) * tile.page_tokens;
        const int stop = next < end ? next : end; // rows never written may hold anything
        const uint8_t *page = tile.values + tile.page_offset(key);
        const uint8_t *next_page = next < end              ? tile.values + tile.page_offset(next)
                                   : next <= tile.last_key ? tile.keys + tile.page_offset(next)
                                                           : page;
        const size_t token_bytes = block_bytes(tile.format, 2) / 2;
        const Operands operands{page + key % tile.page_tokens * token_bytes,
                                value_block,
                                stop - key,
                                scores + (tile.is_rounded ? (key - begin) / 2 : key - begin),
                                segment_tokens,
                                partial.values,
                                partial.stride,
                                key != begin,
                                next_page - page};
        multiply_page<V>(tile, operands, blocks_of(tile.value_dim));
    }
}

// `scores` is room for [rows, segment_tokens].
template <class V>
void attend_segment(const AttentionTile &tile, int segment, float *scores, const Partial &partial) {
    const KeySpan span(tile, segment);
    score_keys<V>(tile, span, scores);
    softmax_tile<V>(tile, span, scores, partial);
    add_values<V>(tile, span, scores, partial);
}

} // namespace headrace
