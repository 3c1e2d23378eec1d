// Keys and values of all heads are products of one latent per token. No step computes them: a query
// takes the product with its head's keys, and the sum of latents that with its head's values. A
// prompt does so, too, though it takes more arithmetic: chunks change no bits.
#include "cpu/latent_attention.h"
#include "cpu/attention_phases.h"
#include "cpu/products.h"

#include <algorithm>

namespace headrace {

namespace {

// Where a head's product goes.
struct HeadOut {
    float *rows; // [tokens, stride]
    int stride;
};

// out(head) = rows of `of_heads` times the head's rows of `weight`.
template <class Out> void multiply_heads(StepState &s, const Matrix &weight, const Out &out_of) {
    const int num_heads = s.config.num_heads, blocks = blocks_of(weight.rows / num_heads);
    const std::vector<Extent> extents(num_heads, {s.num_tokens, blocks});
    const Linear linear{weight, s.of_heads, nullptr};
    multiply_each(s, extents, weight, [&](int head, const ProductPart &part) {
        const ProductPart own{head * s.num_tokens + part.row,
                              part.rows,
                              head * blocks + part.block,
                              part.blocks,
                              part.thread,
                              head * blocks + part.next_block};
        const HeadOut out = out_of(head);
        multiply_part(s, linear, own, next_weights(weight, own),
                      out.rows + size_t(part.row) * out.stride + part.block * lanes, out.stride);
    });
}

void norm(const StepState &s, const Layer &layer, VectorSlot slot, float *x) {
    const std::vector<float> &weight = layer.vectors[slot];
    s.model.kernels->norm(x, weight.data(), int(weight.size()), layer.config.latent.norm_eps, false,
                          x);
}

// q = queries(normed), [tokens, heads, nope_dim + rope_dim], and k = latents before their norm.
void project(StepState &s, const Layer &layer) {
    const auto product = [&](MatrixSlot matrix, VectorSlot bias, float *out, int stride) {
        return Product{{layer.matrices[matrix], s.normed, &layer.vectors[bias]}, out, stride};
    };
    const Product latents = product(slot_kv_a, slot_kv_a_bias, s.k, s.kv_stride);
    if (layer.config.latent.query_rank == 0) {
        multiply(s, s.num_tokens, {product(slot_q, slot_q_bias, s.q, s.q_stride), latents});
        return;
    }
    const Activations &compressed = s.query_latents;
    const Matrix &expand = layer.matrices[slot_q_b];
    multiply(s, s.num_tokens,
             {product(slot_q_a, slot_q_a_bias, compressed.rows, compressed.stride), latents});
    s.each_row([&](int token) {
        norm(s, layer, slot_q_a_norm, compressed.row(token));
        round_activations(s, compressed, {&expand}, token);
    });
    multiply(s, s.num_tokens, {{{expand, compressed, nullptr}, s.q, s.q_stride}});
}

// Store a token's latent: the normalized rank, then the rotated key.
void store_latent(const StepState &s, const Layer &layer, int token) {
    const Step &step = s.step;
    float *latent = s.k + size_t(token) * s.kv_stride;
    norm(s, layer, slot_kv_a_norm, latent);
    if (layer.config.rope >= 0) {
        s.rotate(layer.config.rope, token, latent + layer.config.latent.rank);
    }
    const int page_tokens = s.config.page_tokens, position = step.positions[token];
    const int32_t *pages = step.page_table + size_t(step.sequences[token]) * step.max_pages;
    const HeadPlace place =
        s.model.kv.place(layer.kv_index, 0, pages[position / page_tokens], position % page_tokens);
    s.model.kernels->store_head(place, nullptr, latent);
}

// Scale a token's queries. The part of each head that rotates goes where attention reads it, the
// other one where it is absorbed.
void place_query(const StepState &s, const Layer &layer, int token) {
    const LatentConfig &latent = layer.config.latent;
    const int dim = latent.nope_dim + latent.rope_dim;
    float *q = s.q + size_t(token) * s.q_stride;
    const float scale =
        s.config.attention_scale * temperature(layer.config, s.step.positions[token]);
    s.model.kernels->scale(q, scale, s.config.num_heads * dim, q);
    for (int head = 0; head < s.config.num_heads; ++head, q += dim) {
        const int row = head * s.num_tokens + token;
        std::copy_n(q, latent.nope_dim, s.of_heads.row(row));
        round_activations(s, s.of_heads, {&layer.matrices[slot_k_b]}, row);
        float *rotated = s.query(layer.heads, token, head) + latent.rank;
        std::copy_n(q + latent.nope_dim, latent.rope_dim, rotated);
        if (layer.config.rope >= 0) {
            s.rotate(layer.config.rope, token, rotated);
        }
    }
}

} // namespace

void run_latent_attention(StepState &s, int index) {
    const Layer &layer = s.model.layers[index];
    const Matrix &keys = layer.matrices[slot_k_b], &values = layer.matrices[slot_v_b];
    const Matrix &out = layer.matrices[slot_o];
    StepClock &clock = s.model.pool.clock;
    clock.enter(StepPart::products);
    project(s, layer);
    clock.enter(StepPart::rows);
    s.each_row([&](int token) {
        store_latent(s, layer, token);
        place_query(s, layer, token);
    });
    clock.enter(StepPart::products);
    const HeadGroups &heads = layer.heads;
    multiply_heads(s, keys, [&](int head) {
        return HeadOut{s.query(heads, 0, head), heads.group * heads.head_dim};
    });
    clock.enter(StepPart::attention);
    attend(s, index);
    clock.enter(StepPart::rows);
    s.each_row(s.config.num_heads * s.num_tokens,
               [&](int row) { round_activations(s, s.of_heads, {&values}, row); });
    clock.enter(StepPart::products);
    multiply_heads(s, values, [&](int head) {
        return HeadOut{s.attended.rows + head * layer.config.latent.value_dim, s.attended.stride};
    });
    clock.enter(StepPart::rows);
    s.each_row([&](int token) { round_activations(s, s.attended, {&out}, token); });
    clock.enter(StepPart::products);
    multiply(s, s.num_tokens,
             {{{out, s.attended, &layer.vectors[slot_o_bias]}, s.sublayer, s.hidden_stride}});
}

} // namespace headrace
