// What the phases of one step share: the batch, its tiles, and room for activations.
#pragma once
#include "cpu/low_rank.h"
#include "cpu/model.h"

#include <algorithm>

namespace headrace {

struct Tile { // consecutive tokens of one sequence
    int first_token, num_tokens, sequence, first_position;
    int last_key; // that any of them sees

    int first_segment(Window window) const {
        return window.first_key(first_position) / segment_tokens;
    }
    int last_key_in(Window window) const {
        return window.last_key(first_position + num_tokens - 1, last_key);
    }
    int end_segment(Window window) const { return last_key_in(window) / segment_tokens + 1; }
};

// Padded to whole vectors, and one more: a power of two would put all rows in one cache set.
constexpr int stride_of(int width) {
    return padded(width) + lanes;
}

// Rows that products multiply, and the same as the products' weights want them: see
// round_activations.
struct Activations {
    float *rows; // [tokens, stride]
    int stride;
    float *rounded;        // [tokens, stride]
    Int16Group *quantized; // [tokens, groups]

    float *row(int i) const { return rows + size_t(i) * stride; }
};

// What Gemma 3n and 4 compute in around their layers; see gemma.h. Null or empty: there is none.
struct GemmaRoom {
    int inputs_stride = 0, hidden = 0, num_residuals = 0;
    float *inputs = nullptr, *context = nullptr;      // [tokens, inputs_stride]: of all layers
    float *residuals = nullptr, *predicted = nullptr; // [tokens, stride()]: residual after residual
    float *laurel = nullptr;                          // [tokens, hidden stride]
    float *back = nullptr;                            // [further residuals, logit rows, stride]
    float *gates = nullptr;                           // [tokens, inner stride]
    Activations gated{}, low{}, joined{};

    int stride() const { return stride_of(num_residuals * hidden); }
    float *residual_row(int token, int i) const {
        return residuals + size_t(token) * stride() + size_t(i) * hidden;
    }
    float *predicted_row(int token, int i) const {
        return predicted + size_t(token) * stride() + size_t(i) * hidden;
    }
};

struct StepState {
    StepState(Model &model, const Step &step); // throws std::bad_alloc

    // Call body(row) for each token.
    template <class Body> void each_row(const Body &body) { each_row(num_tokens, body); }
    template <class Body> void each_row(int rows, const Body &body) {
        each_rows(rows, [&](int begin, int end) {
            for (int row = begin; row < end; ++row) {
                body(row);
            }
        });
    }
    // Call body(begin, end) for rows that cover all.
    template <class Body> void each_rows(int rows, const Body &body) {
        // Fewer than four are not worth a claim. Where there are many, tokens are one sequence's,
        // sixteen of which share the cache lines of a page.
        const int even = rows / (6 * model.pool.num_threads());
        const int rows_per_task = rows < 64 ? 4 : padded(std::max(1, even));
        model.pool.run((rows + rows_per_task - 1) / rows_per_task, [&](int task, int) {
            body(task * rows_per_task, std::min(rows, (task + 1) * rows_per_task));
        });
    }

    // What queries, keys and values are computed from.
    const Activations &attended_by() const { return config.eagle == Eagle::none ? normed : joined; }

    // Where the query of a token's head is.
    float *query(const HeadGroups &heads, int token, int head) const {
        const size_t row = size_t(head / heads.group) * num_tokens + token;
        return queries + (row * heads.group + head % heads.group) * heads.head_dim;
    }

    // Where attention writes the sum of a token's head.
    float *attended_head(const HeadGroups &heads, int token, int head) const {
        return model.latent ? of_heads.row(head * num_tokens + token)
                            : attended.row(token) + size_t(head) * heads.value_dim;
    }

    // Whether what both parts of a layer give is added at once. Neither reads the other's; their
    // norms differ, or several workers have them.
    bool adds_both() const {
        return config.placement == Placement::parallel_two_norms ||
               (config.placement == Placement::parallel && !model.peers.alone());
    }

    // cos and sin of a token's position in one rope.
    size_t angles(int rope, int token) const {
        return (size_t(rope) * num_tokens + token) * rope_pairs;
    }

    // Rotate the first numbers of a head, in place, by a token's position.
    void rotate(int rope, int token, float *head) const {
        const size_t at = angles(rope, token);
        model.kernels->rotate(head, int(model.ropes[rope].inv_freq.size()),
                              model.ropes[rope].interleaved, cos + at, sin + at);
    }

    Model &model;
    const Config &config;
    const Step &step;
    const int num_tokens;
    const int first_layer, end_layer; // of those that the step runs
    const bool rounds_attention;      // where keys, values and products are bf16
    const HeadGroups widest_heads;    // the most of each number, over all layers
    const int inner;                  // numbers of the widest MLP
    const int hidden_stride, q_stride, kv_stride, attended_stride, inner_stride;
    int conv_channels = 0, conv_stride = 0; // of the widest short convolution; 0: there is none
    int mamba2_inner = 0;                   // numbers of a token in the widest Mamba-2
    int mamba_numbers = 0;                  // channels, or numbers that steps follow from
    std::vector<AdapterRun> token_runs, logit_runs; // of all tokens; of the logit rows
    std::vector<Tile> tiles;
    int tile_rows = 0;  // of the largest tile
    int rope_pairs = 0; // of the widest rope

    Activations normed, attended, gated; // of hidden, attended and inner stride
    Activations convolved;               // of conv_stride: c, which becomes c * conv(b * x)
    float *conv_b, *conv_x;              // [tokens, conv_stride]
    float *residual, *sublayer;          // [tokens, hidden_stride]
    float *q;                            // [tokens, q_stride]
    float *k, *v;                        // [tokens, kv_stride]
    float *attn_gate;                    // [tokens, q_stride], where attention has an output gate
    Activations query_latents;           // of latent attention: of all heads' queries
    Activations of_heads;                // likewise, [heads, tokens], before and after attention
    Activations joined;                  // of twice the hidden size, in a draft's step; see mtp.h
    float *queries;                      // [groups, tokens, group, head_dim]
    float *cos, *sin;                    // [ropes, tokens, rope_pairs]
    float *squares;        // [tokens, 2], sums over all queries and all keys; see sum_squares
    float *other_sublayer; // [tokens, hidden_stride], where two are added
    GemmaRoom gemma;

private:
    void cut_tiles();
    void find_room();
};

} // namespace headrace
