#include "cpu/step_state.h"
#include "cpu/mixture.h"
#include "cpu/products.h"

namespace headrace {

StepState::StepState(Model &m, const Step &s)
    : model(m), config(m.config), step(s), num_tokens(s.num_tokens),
      rounds_attention(config.rounds_activations && model.kv.format() == Format::bf16 &&
                       model.kernels->rounds_attention),
      group(config.num_heads / config.num_kv_heads), hidden_stride(stride_of(config.hidden_size)),
      q_stride(stride_of(config.num_heads * config.head_dim)),
      kv_stride(stride_of(config.num_kv_heads * config.head_dim)),
      inner_stride(stride_of(config.intermediate_size)) {
    for (const Rope &rope : model.ropes) {
        rope_pairs = std::max(rope_pairs, int(rope.inv_freq.size()));
    }
    for (const Layer &layer : model.layers) {
        if (layer.config.mixer == Mixer::short_conv) {
            conv_channels = std::max(conv_channels, layer.config.short_conv.channels);
            conv_stride = stride_of(conv_channels);
        }
    }
    cut_tiles();
    find_room();
}

void StepState::cut_tiles() {
    const int max_tokens = std::max(1, max_tile_rows / group);
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
        tile_rows = std::max(tile_rows, tile.num_tokens * group);
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
    queries = space.queries.floats(n * config.num_heads * config.head_dim);
    cos = space.cos.floats(n * model.ropes.size() * rope_pairs);
    sin = space.sin.floats(n * model.ropes.size() * rope_pairs);
    squares = space.squares.floats(2 * n);
    other_sublayer = adds_both() ? space.other_sublayer.floats(n * hidden_stride) : nullptr;
    // No product multiplies `normed` once there is `attended`, so they share room.
    const int mixed = std::max(config.num_heads * config.head_dim, conv_channels);
    const int outer = std::max(config.hidden_size, mixed);
    const int inner = config.intermediate_size;
    float *rounded = space.rounded.floats(n * stride_of(outer));
    auto *quantized = space.quantized.room<Int16Group>(n * groups_of(outer));
    normed = {space.normed.floats(n * hidden_stride), hidden_stride, rounded, quantized};
    attended = {space.attended.floats(n * q_stride), q_stride, rounded, quantized};
    conv_b = space.conv_b.floats(n * conv_stride);
    conv_x = space.conv_x.floats(n * conv_stride);
    convolved = {space.conv_c.floats(n * conv_stride), conv_stride, rounded, quantized};
    gated = {space.gated.floats(n * inner_stride), inner_stride,
             space.rounded_gated.floats(n * inner_stride),
             space.quantized_gated.room<Int16Group>(n * groups_of(inner))};
    find_mixture_room(model, num_tokens);
    int widest = std::max(outer, inner);
    for (const Layer &layer : model.layers) {
        const MixtureConfig &mixture = layer.config.mixture;
        widest = std::max({widest, mixture.intermediate_size, mixture.shared_intermediate_size});
    }
    const size_t cols = widest;
    const size_t decoded = (decoded_blocks * cols + unpacked_blocks * cols / 2 + 1) * lanes;
    const size_t scores = size_t(tile_rows) * segment_tokens;
    const size_t panels = room_for_panels();
    const size_t partial = size_t(tile_rows) * (padded(config.head_dim) + 2);
    for (Buffer &scratch : space.scratch) {
        scratch.floats(std::max({decoded, scores + 2 * partial, panels}));
    }
    for (Buffer &gates : space.gates) {
        gates.floats(room_for_gates(num_tokens));
    }
}

} // namespace headrace
