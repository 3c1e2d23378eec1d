#include "cpu/model.h"

#include <algorithm>
#include <utility>

namespace headrace {

size_t Layer::state_numbers() const {
    switch (config.mixer) {
    case Mixer::attention:
    case Mixer::latent_attention:
        return 0;
    case Mixer::short_conv:
        return size_t(config.short_conv.kernel_size - 1) * config.short_conv.channels;
    case Mixer::gated_delta_net:
        return config.delta.state_numbers();
    case Mixer::mamba2: {
        const Mamba2Config &c = config.mamba2;
        const size_t inner = size_t(c.num_heads) * c.head_dim;
        const size_t channels = inner + 2 * size_t(c.num_groups) * c.state_size;
        return (c.kernel_size - 1) * channels + inner * c.state_size;
    }
    case Mixer::mamba:
        return config.mamba.state_numbers();
    case Mixer::none:
        return 0;
    }
    return 0;
}

namespace {

// Heads of a latent's queries that are one tile's. More tiles keep more threads busy.
constexpr int most_grouped_heads = 16;

HeadGroups groups_of_heads(const Config &c, const LayerConfig &layer) {
    if (layer.mixer != Mixer::latent_attention) {
        const int num_groups = layer.num_kv_heads;
        return {num_groups, c.num_heads / num_groups, layer.head_dim, layer.head_dim};
    }
    int group = std::min(c.num_heads, most_grouped_heads);
    while (c.num_heads % group != 0) {
        --group;
    }
    return {c.num_heads / group, group, layer.head_dim, layer.latent.rank};
}

} // namespace

Model::Model(const Config &c, const LayerConfig *layer_configs, const RopeConfig *rope_configs,
             void *memory)
    : config(c), kernels(find_kernels(c.isa)), layers(c.num_layers), pool(c.num_threads) {
    std::vector<KvHeads> kv_layers;
    size_t state_numbers = 0;
    for (int i = 0; i < c.num_layers; ++i) {
        const LayerConfig &layer = layers[i].config = layer_configs[i];
        layers[i].heads = groups_of_heads(c, layer);
        layers[i].kv_index = c.shares_pages ? 0 : int(kv_layers.size());
        if (layer.kv_layer >= 0) {
            layers[i].kv_index = layers[layer.kv_layer].kv_index;
        }
        if (layers[i].has_pages() && !(c.shares_pages && !kv_layers.empty())) {
            kv_layers.push_back({layer.num_kv_heads, layer.head_dim});
        }
        if (layers[i].config.mixer == Mixer::latent_attention) {
            latent = &layers[i].config.latent;
        }
        layers[i].state_offset = state_numbers;
        state_numbers += layers[i].state_numbers();
        if (c.value_norm) {
            layers[i].vectors[slot_v_norm].assign(layer.head_dim, 1.0f);
        }
        if (c.qk_norm == QKNorm::unweighted_after_rope && layer.rope >= 0) {
            for (const int slot : {slot_q_norm, slot_k_norm}) {
                layers[i].vectors[slot].assign(layer.head_dim, 1.0f);
            }
        }
    }
    for (int i = 0; i < c.num_ropes; ++i) {
        const RopeConfig &rope = rope_configs[i];
        ropes.push_back({std::vector<float>(rope.inv_freq, rope.inv_freq + rope.num_pairs),
                         std::vector<int32_t>(rope.axes, rope.axes + rope.num_pairs),
                         rope.interleaved != 0, rope.scale});
    }
    peers.first_tokens = {0, c.vocab_size};
    kv.allocate(c.kv_format, kv_layers, c.num_pages, c.page_tokens, latent != nullptr, memory,
                c.num_mtp_layers > 0 ? c.hidden_size : 0);
    // `cache_bytes` of cpu_executor.py: states begin at a page of the system's.
    const size_t pages_end = (c.num_pages * kv.page_bytes() + 4095) / 4096 * 4096;
    states.allocate(c.num_states, state_numbers,
                    memory ? static_cast<uint8_t *>(memory) + pages_end : nullptr);
    clear_workspace();
}

void Model::rest() {
    std::lock_guard<std::mutex> lock(in_use);
    clear_workspace();
}

void Model::clear_workspace() {
    workspace = Workspace{};
    workspace.scratch = std::vector<Buffer>(pool.num_threads());
    workspace.gates = std::vector<Buffer>(pool.num_threads());
}

void Model::install(int slot, std::unique_ptr<Adapter> adapter) {
    std::lock_guard<std::mutex> lock(in_use);
    if (adapters.size() <= size_t(slot)) {
        adapters.resize(slot + 1);
    }
    if (adapters[slot]) {
        for (const Adapter::Place &place : adapters[slot]->places()) {
            matrix(place.layer, place.slot).low_rank[slot] = nullptr;
        }
    }
    for (size_t i = 0; adapter && i < adapter->places().size(); ++i) {
        const Adapter::Place &place = adapter->places()[i];
        auto &pairs = matrix(place.layer, place.slot).low_rank;
        pairs.resize(std::max(pairs.size(), adapters.size()));
        pairs[slot] = place.pair.get();
    }
    adapters[slot] = std::move(adapter);
}

Matrix &Model::matrix(int layer, int slot) {
    if (layer < 0) {
        Matrix *const outer[] = {&embed,    &head,         &per_layer_embed, &per_layer_proj,
                                 &altup_in, &altup_out,    &positions,       &token_types,
                                 &mtp_proj, &adapted_embed};
        return *outer[slot];
    }
    return layers[layer].matrices[slot];
}

std::vector<float> &Model::vector(int layer, int slot) {
    if (layer < 0) {
        std::vector<float> *const outer[] = {&norm,           &norm_bias,       &head_bias,
                                             &per_layer_norm, &embed_norm,      &embed_norm_bias,
                                             &mtp_embed_norm, &mtp_hidden_norm, &mtp_norm};
        return *outer[slot];
    }
    return layers[layer].vectors[slot];
}

} // namespace headrace
