#include "cpu/step_state.h"
#include "cpu/gated_delta_net.h"
#include "cpu/gemma.h"
#include "cpu/mamba.h"
#include "cpu/mamba2.h"
#include "cpu/mixture.h"
#include "cpu/products.h"

namespace headrace {

namespace {

HeadGroups widest_heads_of(const Model &model) {
    HeadGroups widest{0, 1, 0, 0}; // a decoder may have no layers
    for (const Layer &layer : model.layers) {
        const HeadGroups &own = layer.heads;
        widest.num_groups = std::max(widest.num_groups, own.num_groups);
        widest.group = std::max(widest.group, own.group);
        widest.head_dim = std::max(widest.head_dim, own.head_dim);
        widest.value_dim = std::max(widest.value_dim, own.value_dim);
    }
    return widest;
}

int widest_mlp_of(const Model &model) {
    int widest = 0;
    for (const Layer &layer : model.layers) {
        widest = std::max(widest, layer.config.intermediate_size);
    }
    return widest;
}

// Numbers of the keys of a token, over all KV heads.
int widest_keys_of(const Model &model) {
    int widest = 0;
    for (const Layer &layer : model.layers) {
        widest = std::max(widest, layer.config.num_kv_heads * layer.config.head_dim);
    }
    return widest;
}

bool has_own_norms(const Model &model) {
    for (const Layer &layer : model.layers) {
        if (layer.config.mixture.own_norms) {
            return true;
        }
    }
    return false;
}

// Numbers of a query before it is absorbed.
int query_dim(const Model &model, const HeadGroups &widest) {
    return model.latent ? model.latent->nope_dim + model.latent->rope_dim : widest.head_dim;
}

// Numbers of a head that `o` reads.
int output_dim(const Model &model, const HeadGroups &widest) {
    return model.latent ? model.latent->value_dim : widest.head_dim;
}

} // namespace

StepState::StepState(Model &m, const Step &s)
    : model(m), config(m.config), step(s), num_tokens(s.num_tokens),
      first_layer(s.is_draft ? config.num_layers - config.num_mtp_layers : 0),
      end_layer(config.num_layers - (s.is_draft ? 0 : config.num_mtp_layers)),
      rounds_attention(config.rounds_activations && model.kv.format() == Format::bf16 &&
                       model.kernels->rounds_attention && !model.latent),
      widest_heads(widest_heads_of(model)), inner(widest_mlp_of(model)),
      hidden_stride(stride_of(config.hidden_size)),
      q_stride(stride_of(config.num_heads * query_dim(model, widest_heads))),
      kv_stride(stride_of(widest_keys_of(model))),
      attended_stride(stride_of(config.num_heads * output_dim(model, widest_heads))),
      inner_stride(stride_of(inner)) {
    for (const Rope &rope : model.ropes) {
        rope_pairs = std::max(rope_pairs, int(rope.inv_freq.size()));
    }
    for (const Layer &layer : model.layers) {
        if (layer.config.mixer == Mixer::short_conv) {
            conv_channels = std::max(conv_channels, layer.config.short_conv.channels);
            conv_stride = stride_of(conv_channels);
        }
        if (layer.config.mixer == Mixer::mamba2) {
            const Mamba2Config &mamba2 = layer.config.mamba2;
            mamba2_inner = std::max(mamba2_inner, mamba2.num_heads * mamba2.head_dim);
        }
        if (layer.config.mixer == Mixer::mamba) {
            const MambaConfig &mamba = layer.config.mamba;
            mamba_numbers = std::max({mamba_numbers, mamba.channels, mamba.rank});
        }
    }
    const auto sequence_of = [&](int token) { return step.sequences[token]; };
    token_runs = adapter_runs(step.adapters, num_tokens, sequence_of);
    logit_runs = adapter_runs(step.adapters, step.num_logit_rows,
                              [&](int row) { return sequence_of(step.logit_rows[row]); });
    cut_tiles();
    find_room();
}

void StepState::cut_tiles() {
    const int max_tokens = std::max(1, max_tile_rows / widest_heads.group);
    for (int i = 0; i < num_tokens; ++i) {
        const int sequence = step.sequences[i], position = step.positions[i];
        const int last_seen = step.last_seen ? step.last_seen[i] : position;
        if (!tiles.empty()) {
            Tile &last = tiles.back();
            if (last.sequence == sequence && last.num_tokens < max_tokens &&
                last.first_position + last.num_tokens == position) {
                ++last.num_tokens;
                last.last_key = std::max(last.last_key, last_seen);
                continue;
            }
        }
        tiles.push_back({i, 1, sequence, position, last_seen});
    }
    for (const Tile &tile : tiles) {
        tile_rows = std::max(tile_rows, tile.num_tokens * widest_heads.group);
    }
}

void StepState::find_room() {
    Workspace &space = model.workspace;
    const size_t n = num_tokens;
    residual = space.residual.floats(n * hidden_stride);
    sublayer = space.sublayer.floats(n * hidden_stride);
    q = space.q.floats(n * q_stride);
    k = space.k.floats(n * kv_stride);
    v = space.v.floats(n * kv_stride);
    queries = space.queries.floats(n * config.num_heads * widest_heads.head_dim);
    cos = space.cos.floats(n * model.ropes.size() * rope_pairs);
    sin = space.sin.floats(n * model.ropes.size() * rope_pairs);
    squares = space.squares.floats(2 * n);
    const bool adds_two = adds_both() || mamba2_inner > 0 || has_own_norms(model);
    other_sublayer = adds_two ? space.other_sublayer.floats(n * hidden_stride) : nullptr;
    // No product multiplies `normed` once there is `attended`, so they share room.
    const int query_rank = model.latent ? model.latent->query_rank : 0;
    const int mixed = std::max({config.num_heads * output_dim(model, widest_heads), conv_channels,
                                mamba2_inner, mamba_numbers});
    const int outer = std::max({config.hidden_size, mixed, query_rank});
    float *rounded = space.rounded.floats(n * stride_of(outer));
    auto *quantized = space.quantized.room<Int16Group>(n * groups_of(outer));
    // What an encoder's sublayers read is the residual as it is: logits have no rows of their own.
    const bool reads_residual = config.placement == Placement::post_sum && step.hidden;
    normed = {reads_residual ? residual : space.normed.floats(n * hidden_stride), hidden_stride,
              rounded, quantized};
    attended = {space.attended.floats(n * attended_stride), attended_stride, rounded, quantized};
    query_latents = {space.query_latents.floats(n * stride_of(query_rank)), stride_of(query_rank),
                     rounded, quantized};
    const int of_head = model.latent ? std::max(model.latent->rank, model.latent->nope_dim) : 0;
    const size_t head_rows = of_head ? n * config.num_heads : 0;
    of_heads = {space.of_heads.floats(head_rows * stride_of(of_head)), stride_of(of_head),
                space.rounded_of_heads.floats(head_rows * stride_of(of_head)),
                space.quantized_of_heads.room<Int16Group>(head_rows * groups_of(of_head))};
    const int num_joined = step.is_draft ? 2 : model.drafter ? num_tapped : 0;
    const int both = num_joined * config.hidden_size;
    joined = {space.joined.floats(n * stride_of(both)), stride_of(both),
              space.rounded_joined.floats(n * stride_of(both)),
              space.quantized_joined.room<Int16Group>(n * groups_of(both))};
    conv_b = space.conv_b.floats(n * conv_stride);
    conv_x = space.conv_x.floats(n * conv_stride);
    convolved = {space.conv_c.floats(n * conv_stride), conv_stride, rounded, quantized};
    gated = {space.gated.floats(n * inner_stride), inner_stride,
             space.rounded_gated.floats(n * inner_stride),
             space.quantized_gated.room<Int16Group>(n * groups_of(inner))};
    bool has_gates = false;
    for (const Layer &layer : model.layers) {
        has_gates = has_gates || layer.has_attention_gate();
    }
    attn_gate = has_gates ? space.attn_gate.floats(n * q_stride) : nullptr;
    find_mixture_room(model, num_tokens);
    find_delta_room(model, num_tokens);
    find_mamba2_room(model, num_tokens);
    find_mamba_room(model, num_tokens);
    gemma = find_gemma_room(model, num_tokens);
    int widest = std::max({outer, both, inner, of_head, config.laurel_rank, config.per_layer_size});
    for (const Layer &layer : model.layers) {
        const MixtureConfig &mixture = layer.config.mixture;
        widest = std::max({widest, mixture.intermediate_size, mixture.shared_intermediate_size,
                           layer.config.delta.value_width(), layer.config.delta.gate_rank});
    }
    const size_t cols = widest;
    const size_t decoded = (decoded_blocks * cols + unpacked_blocks * cols / 2 + 1) * lanes;
    const size_t scores = size_t(tile_rows) * segment_tokens;
    const size_t panels = room_for_panels();
    const size_t partial = size_t(tile_rows) * (padded(widest_heads.value_dim) + 2);
    for (Buffer &scratch : space.scratch) {
        scratch.floats(std::max({decoded, scores + 2 * partial, panels}));
    }
    for (Buffer &gates : space.gates) {
        gates.floats(room_for_gates(num_tokens));
    }
}

} // namespace headrace
