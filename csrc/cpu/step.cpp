// One step of the decoder: every layer over all tokens of the batch, prefill and decode alike.
//
// A step is a sequence of parallel phases. Products with weights are cut by output blocks, and by
// rows when there are many. Attention is cut by tile, KV head and, for few tokens, key segment.
#include "cpu/step.h"
#include "cpu/attention_phases.h"
#include "cpu/eagle.h"
#include "cpu/gated_delta_net.h"
#include "cpu/gemma.h"
#include "cpu/latent_attention.h"
#include "cpu/mamba.h"
#include "cpu/mamba2.h"
#include "cpu/mixture.h"
#include "cpu/mtp.h"
#include "cpu/products.h"
#include "cpu/short_conv.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace headrace {

namespace {

constexpr int gathered_rows = 32; // of logits at a time, so that long prompts' take no more memory

void norm(const Model &model, const std::vector<float> &weight, const std::vector<float> &bias,
          const float *x, float *out) {
    const int n = model.config.hidden_size;
    model.kernels->norm(x, weight.data(), n, model.config.norm_eps, model.config.layer_norm != 0,
                        out);
    if (!bias.empty()) {
        model.kernels->add(bias.data(), 1.0f, n, out);
    }
}

// A token's embedding, which one of the workers has; the others' part of the sum is zero.
void embed_token(const StepState &state, int token, float *row) {
    const int index = state.step.token_ids[token] - state.model.peers.first_token();
    if (index < 0 || index >= state.model.embed.rows) {
        std::fill_n(row, state.config.hidden_size, 0.0f);
        return;
    }
    unpack_row(state.model.embed, index, row);
    add_to_embedding(state, token, index, row);
    for (int i = 0; i < state.config.hidden_size; ++i) {
        row[i] *= state.config.embedding_multiplier;
    }
}

// Part of a row that comes with the step: 0 is what a token comes in as, others are for layers.
const float *embed_part(const StepState &state, int index, int part) {
    const size_t first = size_t(index) * (1 + state.config.deepstack);
    return state.step.embeds + (first + part) * state.config.hidden_size;
}

// A row that comes with the step, as it is; every worker has it, and the first reports it.
void take_embed(const StepState &state, int index, float *row) {
    const int size = state.config.hidden_size;
    if (state.model.peers.rank == 0) {
        std::copy_n(embed_part(state, index, 0), size, row);
    } else {
        std::fill_n(row, size, 0.0f);
    }
}

// cos and sin of a token's three `positions`, [num_pairs] each, scaled.
void rope_angles(const Rope &rope, const int32_t *positions, float *cos, float *sin) {
    for (size_t i = 0; i < rope.inv_freq.size(); ++i) {
        const float angle = float(positions[rope.axes[i]]) * rope.inv_freq[i];
        cos[i] = std::cos(angle) * rope.scale;
        sin[i] = std::sin(angle) * rope.scale;
    }
}

// The angles of a token's position, in every rope.
void turn(const StepState &state, int token) {
    const int32_t position = state.step.positions[token];
    const int32_t same[] = {position, position, position};
    const int32_t *positions = state.step.rope_positions;
    positions = positions ? positions + 3 * size_t(token) : same;
    for (int r = 0; r < int(state.model.ropes.size()); ++r) {
        const size_t at = state.angles(r, token);
        rope_angles(state.model.ropes[r], positions, state.cos + at, state.sin + at);
    }
}

// What encoders add to a token's embedding, and the norm of the sum.
void finish_embedding(const StepState &s, int token, float *row) {
    float *added = s.sublayer + size_t(token) * s.hidden_stride;
    const auto add = [&](const Matrix &table, int index) {
        if (table.rows > 0) {
            unpack_row(table, index, added);
            s.model.kernels->add(added, 1.0f, s.config.hidden_size, row);
        }
    };
    add(s.model.positions, s.step.positions[token]);
    add(s.model.token_types, s.step.token_types ? s.step.token_types[token] : 0);
    if (!s.model.embed_norm.empty()) {
        norm(s.model, s.model.embed_norm, s.model.embed_norm_bias, row, row);
    }
}

// residual = what each token comes in as.
void embed(StepState &state) {
    const int32_t *embed_rows = state.step.embed_rows;
    state.each_row([&](int token) {
        float *row = state.residual + size_t(token) * state.hidden_stride;
        if (embed_rows && embed_rows[token] >= 0) {
            take_embed(state, embed_rows[token], row);
        } else {
            embed_token(state, token, row);
        }
        finish_embedding(state, token, row);
        turn(state, token);
    });
    state.model.peers.sum(state.residual, size_t(state.num_tokens) * state.hidden_stride);
}

// normed = norm(residual), or its numbers where the placement has no norm before the sublayer.
void normalize(const StepState &s, const std::vector<float> &weight, const std::vector<float> &bias,
               int token) {
    const float *x = s.residual + size_t(token) * s.hidden_stride;
    if (!weight.empty()) {
        norm(s.model, weight, bias, x, s.normed.row(token));
    } else if (s.normed.rows != s.residual) {
        std::memcpy(s.normed.row(token), x, s.config.hidden_size * sizeof(float));
    }
}

// The shared MLP of a mixture may be stored in another format than its experts. A router reads
// `normed` as it is.
void round_for_mlp(const StepState &s, const Layer &layer, int token) {
    const Matrix *of = layer.matrices, *up = of + slot_up, *shared_up = of + slot_shared_up;
    const Matrix *gate = s.config.gated_mlp ? of + slot_gate : up;
    if (layer.has_shared_mlp()) {
        const Matrix *shared_gate = s.config.gated_mlp ? of + slot_shared_gate : shared_up;
        round_activations(s, s.normed, {gate, up, shared_gate, shared_up}, token);
    } else {
        round_activations(s, s.normed, {gate, up}, token);
    }
}

// What its MLP reads, which is the same in a parallel placement of one norm.
void enter_mlp(const StepState &s, int index, int token) {
    const Layer &layer = s.model.layers[index];
    if (s.config.placement != Placement::parallel) {
        normalize(s, layer.vectors[slot_mlp_norm], layer.vectors[slot_mlp_norm_bias], token);
    }
    round_for_mlp(s, layer, token);
}

void round_for_attention(const StepState &s, const Layer &layer, int token) {
    const Matrix *of = layer.matrices;
    if (layer.has_attention_gate()) {
        round_activations(s, s.normed, {of + slot_q, of + slot_k, of + slot_v, of + slot_attn_gate},
                          token);
    } else if (s.config.laurel_rank > 0) {
        round_activations(s, s.normed,
                          {of + slot_q, of + slot_k, of + slot_v, of + slot_laurel_left}, token);
    } else {
        round_activations(s, s.normed, {of + slot_q, of + slot_k, of + slot_v}, token);
    }
}

// Round `normed` for the mixer of a layer; attention beside it is not meant.
void round_for_mixer(const StepState &s, const Layer &layer, int token) {
    const Matrix *of = layer.matrices;
    switch (layer.config.mixer) {
    case Mixer::attention:
        round_for_attention(s, layer, token);
        break;
    case Mixer::gated_delta_net: {
        const bool is_direct = layer.config.delta.gate_rank == 0;
        round_activations(s, s.normed,
                          {of + slot_delta_q, of + slot_delta_k, of + slot_delta_v,
                           of + slot_delta_b, of + (is_direct ? slot_delta_z : slot_delta_z_in),
                           of + (is_direct ? slot_delta_a : slot_delta_a_in)},
                          token);
        break;
    }
    case Mixer::latent_attention:
        round_activations(s, s.normed, {of + slot_kv_a, of + slot_q, of + slot_q_a}, token);
        break;
    case Mixer::short_conv:
        round_activations(s, s.normed, {of + slot_in_b, of + slot_in_c, of + slot_in_x}, token);
        break;
    case Mixer::mamba2:
        round_activations(
            s, s.normed,
            {of + slot_in_z, of + slot_in_x, of + slot_in_b, of + slot_in_c, of + slot_in_dt},
            token);
        break;
    case Mixer::mamba:
        round_activations(s, s.normed, {of + slot_in_z, of + slot_in_x}, token);
        break;
    case Mixer::none:
        break;
    }
}

// residual += the row's part for the layer before `index`, if the token is an image's.
void add_deepstack(const StepState &s, int index, int token) {
    const int32_t *rows = s.step.embed_rows;
    if (rows && rows[token] >= 0 && index > 0 && index <= s.config.deepstack) {
        s.model.kernels->add(embed_part(s, rows[token], index), 1.0f, s.config.hidden_size,
                             s.residual + size_t(token) * s.hidden_stride);
    }
}

// What a layer begins with, if there is one more.
void enter_layer(const StepState &s, int index, int token) {
    add_deepstack(s, index, token);
    if (index == s.end_layer) {
        return;
    }
    predict_residuals(s, index, token);
    const Layer &layer = s.model.layers[index];
    if (!layer.has_mixer()) {
        enter_mlp(s, index, token);
        return;
    }
    normalize(s, layer.vectors[slot_attn_norm], layer.vectors[slot_attn_norm_bias], token);
    if (layer.config.attention_beside) { // which comes first
        round_for_attention(s, layer, token);
    } else {
        round_for_mixer(s, layer, token);
    }
}

// residual += multiplier * norm(sublayer of all workers), without a norm where the placement has
// none there, or residual = norm(residual + multiplier * sublayer). Then `enter(token)`, what the
// next sublayer begins with, while a token's row is in the cache.
template <class Enter>
void add_sublayer(StepState &s, const std::vector<float> &post_norm,
                  const std::vector<float> &post_norm_bias, float multiplier, const Enter &enter) {
    s.model.pool.clock.enter(StepPart::rows);
    s.model.peers.sum(s.sublayer, size_t(s.num_tokens) * s.hidden_stride);
    s.each_row([&](int token) {
        float *x = s.sublayer + size_t(token) * s.hidden_stride;
        float *sum = s.residual + size_t(token) * s.hidden_stride;
        const bool norms_sum = s.config.placement == Placement::post_sum;
        if (!post_norm.empty() && !norms_sum) {
            norm(s.model, post_norm, post_norm_bias, x, x);
        }
        s.model.kernels->add(x, multiplier, s.config.hidden_size, sum);
        if (norms_sum) {
            norm(s.model, post_norm, post_norm_bias, sum, sum);
        }
        enter(token);
    });
}

// sublayer = attention(normed)
void run_attention(StepState &s, int index) {
    const Layer &layer = s.model.layers[index];
    StepClock &clock = s.model.pool.clock;
    clock.enter(StepPart::products);
    const auto product = [&](MatrixSlot matrix, VectorSlot bias, float *out, int stride) {
        return Product{
            {layer.matrices[matrix], s.attended_by(), &layer.vectors[bias]}, out, stride};
    };
    const auto q = product(slot_q, slot_q_bias, s.q, s.q_stride);
    const auto k = product(slot_k, slot_k_bias, s.k, s.kv_stride);
    const auto v = product(slot_v, slot_v_bias, s.v, s.kv_stride);
    const bool is_gated = layer.has_attention_gate();
    if (is_gated) {
        multiply(s, s.num_tokens,
                 {q, k, v, product(slot_attn_gate, slot_attn_gate_bias, s.attn_gate, s.q_stride)});
    } else {
        multiply(s, s.num_tokens, {q, k, v});
    }
    clock.enter(StepPart::attention);
    store_keys_and_values(s, index);
    attend(s, index);
    const Matrix &out = layer.matrices[slot_o];
    clock.enter(StepPart::rows);
    s.each_row([&](int token) {
        if (is_gated) {
            s.model.kernels->sigmoid_gate(s.attn_gate + size_t(token) * s.q_stride,
                                          s.config.num_heads * layer.config.head_dim,
                                          s.attended.row(token));
        }
        round_activations(s, s.attended, {&out}, token);
    });
    clock.enter(StepPart::products);
    multiply(s, s.num_tokens,
             {{{out, s.attended, &layer.vectors[slot_o_bias]}, s.sublayer, s.hidden_stride}});
}

// sublayer = mixer(normed)
void run_mixer(StepState &s, int index) {
    const Layer &layer = s.model.layers[index];
    switch (layer.config.mixer) {
    case Mixer::attention:
        run_attention(s, index);
        break;
    case Mixer::short_conv:
        run_short_conv(s, layer);
        break;
    case Mixer::gated_delta_net:
        run_gated_delta_net(s, layer);
        break;
    case Mixer::mamba2:
        run_mamba2(s, layer);
        break;
    case Mixer::mamba:
        run_mamba(s, layer);
        break;
    case Mixer::latent_attention:
        run_latent_attention(s, index);
        break;
    case Mixer::none:
        break;
    }
}

// sublayer = mixer(normed) + attention(normed), each multiplied.
void run_mixers(StepState &s, int index) {
    const Layer &layer = s.model.layers[index];
    if (!layer.config.attention_beside) {
        run_mixer(s, index);
        return;
    }
    run_attention(s, index);
    std::swap(s.sublayer, s.other_sublayer);
    s.model.pool.clock.enter(StepPart::rows);
    s.each_row([&](int token) { round_for_mixer(s, layer, token); });
    run_mixer(s, index);
    s.model.pool.clock.enter(StepPart::rows);
    s.each_row([&](int token) {
        const size_t at = size_t(token) * s.hidden_stride;
        const int n = s.config.hidden_size;
        s.model.kernels->scale(s.sublayer + at, layer.config.mixer_multiplier, n, s.sublayer + at);
        s.model.kernels->add(s.other_sublayer + at, layer.config.attention_multiplier, n,
                             s.sublayer + at);
    });
}

Xielu xielu_from(const std::vector<float> &numbers) {
    if (numbers.empty()) {
        return {};
    }
    const auto softplus = [](float x) {
        return std::log1p(std::exp(-std::fabs(x))) + std::max(x, 0.0f);
    };
    const float beta = numbers[2];
    return {softplus(numbers[0]), beta + softplus(numbers[1]), beta, numbers[3]};
}

// sublayer = down(act(gate(normed)) * up(normed)), or down(act(up(normed)))
void run_mlp(StepState &s, int index) {
    const Layer &layer = s.model.layers[index];
    StepClock &clock = s.model.pool.clock;
    clock.enter(layer.is_mixture() ? StepPart::experts : StepPart::products);
    if (layer.is_mixture()) {
        run_mixture(s, layer);
        return;
    }
    const Matrix &down = layer.matrices[slot_down];
    if (layer.config.cuts_gates) {
        multiply_cut_gates(s, layer);
        multiply(s, s.num_tokens,
                 {{{down, s.gated, &layer.vectors[slot_down_bias]}, s.sublayer, s.hidden_stride}});
        return;
    }
    GatedProduct product{{layer.matrices[slot_gate], s.normed, &layer.vectors[slot_gate_bias]},
                         {layer.matrices[slot_up], s.normed, &layer.vectors[slot_up_bias]},
                         s.gated,
                         down};
    product.has_gate = s.config.gated_mlp != 0;
    const Xielu xielu = xielu_from(layer.vectors[slot_xielu]);
    product.xielu = s.config.activation == Gate::xielu ? &xielu : nullptr;
    multiply_gated(s, product);
    multiply(s, s.num_tokens,
             {{{down, s.gated, &layer.vectors[slot_down_bias]}, s.sublayer, s.hidden_stride}});
}

// sublayer += mixer(normed), where both parts of a layer read the same residual: one sum over the
// workers does for both.
void run_both(StepState &s, int index) {
    run_mixer(s, index);
    std::swap(s.sublayer, s.other_sublayer);
    s.model.pool.clock.enter(StepPart::rows);
    s.each_row([&](int token) { enter_mlp(s, index, token); });
    run_mlp(s, index);
    s.model.pool.clock.enter(StepPart::rows);
    s.each_row([&](int token) {
        const size_t at = size_t(token) * s.hidden_stride;
        s.model.kernels->add(s.other_sublayer + at, 1.0f, s.config.hidden_size, s.sublayer + at);
    });
}

void run_layer(StepState &s, int index) {
    const Layer &layer = s.model.layers[index];
    const auto *vectors = layer.vectors;
    const bool is_left = has_more(s.model, layer);
    const auto enter_next = [&](int token) {
        if (!is_left) {
            enter_layer(s, index + 1, token);
        }
    };
    if (s.adds_both()) {
        run_both(s, index);
    } else if (layer.has_mixer()) {
        if (s.config.laurel_rank > 0) {
            compute_laurel(s, layer);
        }
        run_mixers(s, index);
        add_sublayer(s, vectors[slot_attn_post_norm], vectors[slot_attn_post_norm_bias],
                     s.config.residual_multiplier, [&](int token) {
                         if (s.config.laurel_rank > 0) {
                             add_laurel(s, token);
                         }
                         if (layer.config.has_mlp) {
                             enter_mlp(s, index, token);
                         } else {
                             enter_next(token);
                         }
                     });
        if (!layer.config.has_mlp) {
            return;
        }
        run_mlp(s, index);
    } else {
        run_mlp(s, index);
    }
    add_sublayer(s, vectors[slot_mlp_post_norm], vectors[slot_mlp_post_norm_bias],
                 s.config.residual_multiplier * s.config.mlp_multiplier, enter_next);
    if (is_left) {
        leave_layer(s, layer, index);
        s.each_row([&](int token) { enter_layer(s, index + 1, token); });
    }
}

// Whether encoders have what they add for a token's position and type.
bool is_valid_embedding(const Model &model, const Step &step, int i) {
    const int num_positions = model.positions.rows, num_types = model.token_types.rows;
    const int type = step.token_types ? step.token_types[i] : 0;
    return (num_positions == 0 || step.positions[i] < num_positions) &&
           (num_types == 0 || (type >= 0 && type < num_types));
}

// Logits of this worker's tokens, [logit rows, stride].
void own_logits(StepState &s, float *logits, int stride, float *maxima) {
    const Matrix &head = s.model.head.rows ? s.model.head : s.model.embed;
    s.each_row(s.step.num_logit_rows, [&](int row) {
        head_input(s, s.step.logit_rows[row], s.normed.row(row));
        round_activations(s, s.normed, {&head}, row);
    });
    multiply_head(s, {{head, s.normed, &s.model.head_bias}, logits, stride}, maxima);
}

// Logits of all workers' tokens, side by side in every row of the step's, and their maxima.
void write_logits(StepState &state) {
    const Peers &peers = state.model.peers;
    const int num_rows = state.step.num_logit_rows, stride = stride_of(peers.max_tokens());
    const size_t out_stride = stride_of(peers.num_tokens());
    const size_t num_maxima = num_blocks_of(peers.num_tokens());
    if (peers.alone()) {
        own_logits(state, state.step.logits, stride, state.step.maxima);
        return;
    }
    Workspace &space = state.model.workspace;
    float *own = space.logits.floats(size_t(num_rows) * stride);
    own_logits(state, own, stride, nullptr);
    for (int first = 0; first < num_rows; first += gathered_rows) {
        const int rows = std::min(gathered_rows, num_rows - first);
        const size_t n = size_t(rows) * stride;
        float *all = space.gathered.floats(n * peers.num_ranks());
        peers.gather(own + size_t(first) * stride, n, all);
        state.model.pool.run(rows, [&](int row, int) {
            float *out = state.step.logits + size_t(first + row) * out_stride;
            for (int rank = 0; rank < peers.num_ranks(); ++rank) {
                std::copy_n(all + rank * n + size_t(row) * stride, peers.num_tokens_of(rank),
                            out + peers.first_tokens[rank]);
            }
            state.model.kernels->block_maxima(out, peers.num_tokens(),
                                              state.step.maxima + (first + row) * num_maxima);
        });
    }
}

// Whether what only some tokens have is within range; they see no token that is not in the step.
bool is_valid_image(const Step &step, int i) {
    if (step.embed_rows && (step.embed_rows[i] < -1 || step.embed_rows[i] >= step.num_embeds)) {
        return false;
    }
    const int64_t ahead = step.last_seen ? int64_t(step.last_seen[i]) - step.positions[i] : 0;
    return ahead >= 0 && i + ahead < step.num_tokens &&
           step.sequences[i + ahead] == step.sequences[i] &&
           step.positions[i + ahead] == step.positions[i] + ahead;
}

// Whether a token's sequence reads and writes slots that there are, not the same. It begins at
// position 0 without a state, and at others with one. A written state covers some of its tokens.
bool is_valid_state(const Model &model, const Step &step, int i, bool follows) {
    if (!model.states.used() || step.is_draft) {
        return true;
    }
    if (!step.state_in || !step.state_out) {
        return false;
    }
    const int in = step.state_in[step.sequences[i]], out = step.state_out[step.sequences[i]];
    const int num_slots = model.states.num_slots();
    const bool begins = i == 0 || step.sequences[i - 1] != step.sequences[i];
    const int end = step.state_ends ? step.state_ends[step.sequences[i]] : i + 1;
    if (begins &&
        (end <= i || end > step.num_tokens || step.sequences[end - 1] != step.sequences[i])) {
        return false;
    }
    return in >= -1 && in < num_slots && out >= 0 && out < num_slots && in != out &&
           (begins ? (in < 0) == (step.positions[i] == 0) : follows);
}

// Whether the page is there that gets a drafted token's hidden state.
bool is_valid_draft(const Config &config, const Step &step, int token) {
    const int place = (step.positions[token] + 1) / config.page_tokens;
    const int32_t *pages = step.page_table + int64_t(step.sequences[token]) * step.max_pages;
    return !step.is_draft ||
           (place < step.max_pages && pages[place] >= 0 && pages[place] < config.num_pages);
}

} // namespace

bool is_valid(const Model &model, const Step &step) {
    const Config &config = model.config;
    int window = 0; // the longest
    for (const Layer &layer : model.layers) {
        window = std::max(window, layer.config.window.tokens);
    }
    for (int i = 0; i < step.num_tokens; ++i) {
        const int token = step.token_ids[i], sequence = step.sequences[i];
        const int position = step.positions[i], last = position / config.page_tokens;
        if (token < 0 || token >= model.num_embedded() || sequence < 0 ||
            sequence >= step.num_sequences || position < 0 || last >= step.max_pages ||
            !is_valid_image(step, i) || !is_valid_embedding(model, step, i)) {
            return false;
        }
        const bool follows =
            i > 0 && step.sequences[i - 1] == sequence && step.positions[i - 1] == position - 1;
        if (!is_valid_state(model, step, i, follows)) {
            return false;
        }
        const int first_seen = position < window ? 0 : position - window + 1;
        const int32_t *pages = step.page_table + int64_t(sequence) * step.max_pages;
        for (int p = follows ? last : first_seen / config.page_tokens; p <= last; ++p) {
            if (pages[p] < 0 || pages[p] >= config.num_pages) {
                return false;
            }
        }
    }
    for (int i = 0; step.adapters && i < step.num_sequences; ++i) {
        const int slot = step.adapters[i];
        if (slot < -1 ||
            (slot >= 0 && (size_t(slot) >= model.adapters.size() || !model.adapters[slot]))) {
            return false;
        }
    }
    for (int i = 0; i < step.num_logit_rows; ++i) {
        const int token = step.logit_rows[i];
        if (token < 0 || token >= step.num_tokens || !is_valid_draft(config, step, token)) {
            return false;
        }
    }
    return step.num_logit_rows <= step.num_tokens && (!step.is_draft || config.num_mtp_layers > 0);
}

void run_step(Model &model, const Step &step) {
    std::lock_guard<std::mutex> lock(model.in_use);
    StepState state(model, step);
    const ThreadPool::Awake awake(model.pool);
    embed(state);
    begin_residuals(state);
    if (step.is_draft) {
        join_hidden(state);
    }
    if (model.config.eagle == Eagle::none) {
        state.each_row([&](int token) { enter_layer(state, state.first_layer, token); });
    }
    for (int i = state.first_layer; i < state.end_layer; ++i) {
        tap(state, i);
        run_layer(state, i);
    }
    join_residuals(state);
    store_hidden(state);
    model.pool.clock.enter(StepPart::head);
    if (step.hidden) {
        state.each_row(step.num_logit_rows, [&](int row) {
            head_input(state, step.logit_rows[row],
                       step.hidden + size_t(row) * model.config.hidden_size);
        });
    } else if (step.num_logit_rows > 0) {
        write_logits(state);
    }
}

} // namespace headrace
