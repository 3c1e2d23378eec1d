// The recurrence runs token by token within a head, so chunks change no bits. Heads and sequences
// are its tasks.
#include "cpu/gated_delta_net.h"
#include "cpu/causal_conv.h"
#include "cpu/products.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace headrace {

namespace {

constexpr float l2_eps = 1e-6f; // of the norms of queries and keys

// The numbers of a head's state.
size_t matrix_numbers(const DeltaNetConfig &config) {
    return size_t(config.key_dim) * config.value_dim;
}

// What a delta net computes in, cut for one layer out of what all share.
struct DeltaRoom {
    DeltaRoom(Model &model, const DeltaNetConfig &config, int num_tokens);

    int key_stride, value_stride, beta_stride, decay_stride;
    float *in_q, *in_k, *in_v; // [tokens, stride], what is convolved
    float *q, *k, *v;          // likewise, convolved; v becomes what heads put out
    float *betas;              // [tokens, beta_stride]
    float *decays;             // [tokens, decay_stride]
    float *drafts;             // [threads, key_dim * value_dim], states behind drafts
    Activations gated;         // of value_stride: z, which becomes the gated norm of v
    Activations low_z, low_a;  // what z and a are projections of, where that is not `normed`
};

DeltaRoom::DeltaRoom(Model &model, const DeltaNetConfig &config, int num_tokens)
    : key_stride(stride_of(config.key_width())), value_stride(stride_of(config.value_width())),
      beta_stride(stride_of(config.num_value_heads)), decay_stride(stride_of(config.num_decays())) {
    DeltaWorkspace &space = model.workspace.delta;
    const size_t n = num_tokens;
    in_q = space.in_q.floats(n * key_stride);
    in_k = space.in_k.floats(n * key_stride);
    in_v = space.in_v.floats(n * value_stride);
    q = space.q.floats(n * key_stride);
    k = space.k.floats(n * key_stride);
    v = space.v.floats(n * value_stride);
    betas = space.betas.floats(n * beta_stride);
    decays = space.decays.floats(n * decay_stride);
    drafts = space.drafts.floats(model.pool.num_threads() * matrix_numbers(config));
    const auto activations = [n](Buffer &rows, Buffer &rounded, Buffer &quantized, int width) {
        const int stride = stride_of(width);
        return Activations{rows.floats(n * stride), stride, rounded.floats(n * stride),
                           quantized.room<Int16Group>(n * groups_of(width))};
    };
    gated = activations(space.gated, space.rounded, space.quantized, config.value_width());
    low_z = activations(space.low_z, space.rounded_z, space.quantized_z, config.gate_rank);
    low_a = activations(space.low_a, space.rounded_a, space.quantized_a, config.gate_rank);
}

float softplus(float x) {
    return x > 20.0f ? x : std::log1p(std::exp(x)); // equal in fp32 beyond
}

// One layer of one step.
class DeltaNet {
public:
    DeltaNet(StepState &state, const Layer &layer)
        : s_(state), layer_(layer), config_(layer.config.delta),
          room_(state.model, config_, state.num_tokens) {
        const size_t columns = config_.kernel_size - 1, keys = columns * config_.key_width();
        const size_t offset = layer.state_offset;
        convs_[0] = conv(slot_delta_q_conv, room_.in_q, config_.key_width(), offset);
        convs_[1] = conv(slot_delta_k_conv, room_.in_k, config_.key_width(), offset + keys);
        convs_[2] = conv(slot_delta_v_conv, room_.in_v, config_.value_width(), offset + 2 * keys);
        matrices_offset_ = offset + 2 * keys + columns * config_.value_width();
    }

    void run() {
        StepClock &clock = s_.model.pool.clock;
        clock.enter(StepPart::products);
        project();
        clock.enter(StepPart::rows);
        s_.each_row([&](int token) { convolve(token); });
        clock.enter(StepPart::attention);
        recur();
        const Matrix &out = layer_.matrices[slot_delta_out];
        clock.enter(StepPart::rows);
        s_.each_row([&](int token) {
            gate(token);
            round_activations(s_, room_.gated, {&out}, token);
        });
        clock.enter(StepPart::products);
        multiply(s_, s_.num_tokens, {{{out, room_.gated, nullptr}, s_.sublayer, s_.hidden_stride}});
    }

private:
    CausalConv conv(VectorSlot weights, const float *x, int channels, size_t offset) const {
        return {layer_.vectors[weights].data(),
                x,
                stride_of(channels),
                channels,
                config_.kernel_size,
                offset};
    }

    void project();
    void convolve(int token) const;
    void normalize(float *heads, float scale) const;
    void recur();
    void recur_head(const Chunk &chunk, int head, float *drafts) const;
    void gate(int token) const;

    StepState &s_;
    const Layer &layer_;
    const DeltaNetConfig &config_;
    const DeltaRoom room_;
    CausalConv convs_[3]; // of queries, keys and values
    size_t matrices_offset_;
};

void DeltaNet::project() {
    const auto product = [&](MatrixSlot matrix, const Activations &x, float *out, int stride) {
        const auto *bias = matrix == slot_delta_a ? &layer_.vectors[slot_delta_a_bias] : nullptr;
        return Product{{layer_.matrices[matrix], x, bias}, out, stride};
    };
    const bool is_direct = config_.gate_rank == 0;
    const Activations &low_z = room_.low_z, &low_a = room_.low_a;
    const auto z =
        product(slot_delta_z, is_direct ? s_.normed : low_z, room_.gated.rows, room_.value_stride);
    const auto a =
        product(slot_delta_a, is_direct ? s_.normed : low_a, room_.decays, room_.decay_stride);
    multiply(s_, s_.num_tokens,
             {product(slot_delta_q, s_.normed, room_.in_q, room_.key_stride),
              product(slot_delta_k, s_.normed, room_.in_k, room_.key_stride),
              product(slot_delta_v, s_.normed, room_.in_v, room_.value_stride),
              product(slot_delta_b, s_.normed, room_.betas, room_.beta_stride),
              is_direct ? z : product(slot_delta_z_in, s_.normed, low_z.rows, low_z.stride),
              is_direct ? a : product(slot_delta_a_in, s_.normed, low_a.rows, low_a.stride)});
    if (!is_direct) {
        s_.each_row([&](int token) {
            round_activations(s_, low_z, {&z.weight}, token);
            round_activations(s_, low_a, {&a.weight}, token);
        });
        multiply(s_, s_.num_tokens, {z});
        multiply(s_, s_.num_tokens, {a});
    }
}

// Queries, keys and values of a token, and the gates of its heads.
void DeltaNet::convolve(int token) const {
    float *const outs[] = {room_.q, room_.k, room_.v};
    const bool ends_state = CausalConv::ends_state(s_.step, token);
    for (int i = 0; i < 3; ++i) {
        convs_[i].convolve(s_, token, outs[i] + size_t(token) * convs_[i].stride);
        if (ends_state) {
            convs_[i].write_state(s_, token);
        }
    }
    normalize(room_.q + size_t(token) * room_.key_stride, 1.0f / std::sqrt(float(config_.key_dim)));
    normalize(room_.k + size_t(token) * room_.key_stride, 1.0f);
    float *betas = room_.betas + size_t(token) * room_.beta_stride;
    float *decays = room_.decays + size_t(token) * room_.decay_stride;
    const std::vector<float> &rates = layer_.vectors[slot_delta_rate];
    const int per_head = config_.num_decays() / config_.num_value_heads;
    for (int h = 0; h < config_.num_value_heads; ++h) {
        betas[h] = 1.0f / (1.0f + std::exp(-betas[h]));
        for (int i = 0; i < per_head; ++i, ++decays) {
            *decays = std::exp(rates[h] * softplus(*decays));
        }
    }
}

// Each head gets the length `scale`.
void DeltaNet::normalize(float *heads, float scale) const {
    const Kernels &kernels = *s_.model.kernels;
    for (int h = 0; h < config_.num_key_heads; ++h, heads += config_.key_dim) {
        const float squares = kernels.squares(heads, config_.key_dim, 0.0f);
        kernels.scale(heads, scale / std::sqrt(squares + l2_eps), config_.key_dim, heads);
    }
}

void DeltaNet::recur() {
    const std::vector<Chunk> chunks = chunks_of(s_.step);
    const int num_heads = config_.num_value_heads;
    const size_t numbers = matrix_numbers(config_);
    s_.model.pool.run(int(chunks.size()) * num_heads, [&](int task, int thread) {
        recur_head(chunks[task / num_heads], task % num_heads, room_.drafts + thread * numbers);
    });
}

// `drafts` is room for the state behind drafts, which is not kept.
void DeltaNet::recur_head(const Chunk &chunk, int head, float *drafts) const {
    const StateSlots &states = s_.model.states;
    const int in = s_.step.state_in[chunk.sequence], out = s_.step.state_out[chunk.sequence];
    const size_t at = matrices_offset_ + head * matrix_numbers(config_);
    const size_t first = chunk.first_token;
    const size_t key = first * room_.key_stride + config_.key_head(head) * config_.key_dim;
    const int per_head = config_.num_decays() / config_.num_value_heads;
    DeltaHead work;
    work.queries = room_.q + key;
    work.keys = room_.k + key;
    work.betas = room_.betas + first * room_.beta_stride + head;
    work.decays = room_.decays + first * room_.decay_stride + head * per_head;
    work.values = room_.v + first * room_.value_stride + head * config_.value_dim;
    work.key_stride = room_.key_stride;
    work.beta_stride = room_.beta_stride;
    work.decay_stride = room_.decay_stride;
    work.value_stride = room_.value_stride;
    work.by_row = config_.gate_rank > 0;
    work.num_tokens = chunk.num_covered;
    work.key_dim = config_.key_dim;
    work.value_dim = config_.value_dim;
    work.before = in < 0 ? nullptr : states.slot(in) + at;
    work.state = states.slot(out) + at;
    s_.model.kernels->delta_rule(work);
    if (chunk.num_tokens > chunk.num_covered) {
        work.skip(chunk.num_covered);
        work.num_tokens = chunk.num_tokens - chunk.num_covered;
        work.before = work.state;
        work.state = drafts;
        s_.model.kernels->delta_rule(work);
    }
}

// gated = silu(z) * norm(v), the norm within each head; Kimi's sigmoid(z) * norm(v)
void DeltaNet::gate(int token) const {
    const Kernels &kernels = *s_.model.kernels;
    const float *weight = layer_.vectors[slot_delta_norm].data();
    float *heads = room_.v + size_t(token) * room_.value_stride;
    for (int h = 0; h < config_.num_value_heads; ++h) {
        float *head = heads + h * config_.value_dim;
        kernels.norm(head, weight, config_.value_dim, s_.config.norm_eps, false, head);
    }
    float *gated = room_.gated.row(token);
    const int width = config_.value_width();
    if (config_.gate_rank > 0) {
        kernels.sigmoid_gate(gated, width, heads);
        std::copy_n(heads, width, gated);
    } else {
        kernels.gate(Gate::silu, gated, heads, padded(width));
    }
}

} // namespace

void find_delta_room(Model &model, int num_tokens) {
    for (const Layer &layer : model.layers) {
        if (layer.config.mixer == Mixer::gated_delta_net) {
            DeltaRoom(model, layer.config.delta, num_tokens);
        }
    }
}

void run_gated_delta_net(StepState &state, const Layer &layer) {
    DeltaNet(state, layer).run();
}

} // namespace headrace
