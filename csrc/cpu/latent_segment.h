// Attention of a tile to latents: keys that lie in pages as values do, and whose first numbers are
// the values.
//
// A score is a dot product along a key: sixteen sums side by side, which are added at the end. A
// few keys are copied as floats, one after the other. They stay in the nearest cache while all rows
// of the tile pass over them. A score is the same whatever rows and keys it is computed with.
#pragma once
#include "cpu/attention.h"

namespace headrace {

constexpr int latent_tokens = 4;     // keys that are copied at a time; they are within a page
constexpr int max_latent_dim = 1024; // numbers of a key, a multiple of 16

// Copy keys [key, key + 4) from their page, [latent_tokens, head_dim].
template <class V> void copy_latents(const AttentionTile &tile, int key, float *out) {
    const size_t block = block_bytes(tile.format, tile.page_tokens);
    const size_t token_bytes = block_bytes(tile.format, 2) / 2;
    const uint8_t *from =
        tile.values + tile.page_offset(key) + key % tile.page_tokens * token_bytes;
    for (int d = 0; d < tile.head_dim; d += lanes, from += block, out += lanes) {
        if (tile.format == Format::f32) {
            for (int i = 0; i < latent_tokens; ++i) {
                const auto *numbers = reinterpret_cast<const float *>(from + i * token_bytes);
                V::store(out + i * tile.head_dim, V::load(numbers));
            }
            continue;
        }
        for (int i = 0; i < latent_tokens; i += 2) { // of pairs
            V::store(out + i * tile.head_dim, V::bf16_even(from + i * token_bytes));
            V::store(out + (i + 1) * tile.head_dim, V::bf16_odd(from + i * token_bytes));
        }
    }
}

// Of rows [row, row + num_rows) with the copied keys.
template <class V, int num_rows>
void score_latents(const AttentionTile &tile, int row, const float *latents, float *scores) {
    const int n = tile.head_dim;
    const float *queries = tile.queries + size_t(row) * n;
    typename V::Floats sums[num_rows][latent_tokens];
    for (auto &of_row : sums) {
        for (auto &sum : of_row) {
            sum = V::set(0.0f);
        }
    }
    for (int d = 0; d < n; d += lanes) {
        for (int r = 0; r < num_rows; ++r) {
            const auto query = V::load(queries + r * n + d);
            for (int i = 0; i < latent_tokens; ++i) {
                sums[r][i] = V::fma(query, V::load(latents + i * n + d), sums[r][i]);
            }
        }
    }
    for (int r = 0; r < num_rows; ++r) {
        for (int i = 0; i < latent_tokens; ++i) {
            scores[(row + r) * segment_tokens + i] = V::sum(sums[r][i]);
        }
    }
}

template <class V>
void attend_latent_segment(const AttentionTile &tile, int segment, float *scores,
                           const Partial &partial) {
    constexpr int rows_at_once = V::max_sums >= 4 * latent_tokens ? 4 : 1;
    alignas(64) float latents[latent_tokens * max_latent_dim];
    const KeySpan span(tile, segment);
    const int rows = tile.rows();
    for (int key = span.begin; key < span.end; key += latent_tokens) {
        copy_latents<V>(tile, key, latents);
        float *out = scores + (key - span.begin);
        int row = 0;
        for (; row + rows_at_once <= rows; row += rows_at_once) {
            score_latents<V, rows_at_once>(tile, row, latents, out);
        }
        for (; row < rows; ++row) {
            score_latents<V, 1>(tile, row, latents, out);
        }
    }
    softmax_tile<V>(tile, span, scores, partial);
    add_values<V>(tile, span, scores, partial);
}

} // namespace headrace
