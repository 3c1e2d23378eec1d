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
    case Mixer::none:
        return 0;
    }
    return 0;
}

Model::Model(const Config &c, const LayerConfig *layer_configs, const RopeConfig *rope_configs,
             void *memory)
    : config(c), kernels(find_kernels(c.isa)), layers(c.num_layers), pool(c.num_threads) {
    int num_kv_layers = 0;
    size_t state_numbers = 0;
    for (int i = 0; i < c.num_layers; ++i) {
        layers[i].config = layer_configs[i];
        layers[i].kv_index = c.shares_pages ? 0 : num_kv_layers;
        num_kv_layers += layers[i].has_pages();
        if (layers[i].config.mixer == Mixer::latent_attention) {
            latent = &layers[i].config.latent;
        }
        layers[i].state_offset = state_numbers;
        state_numbers += layers[i].state_numbers();
        if (c.qk_norm == QKNorm::unweighted_after_rope && layer_configs[i].rope >= 0) {
            for (const int slot : {slot_q_norm, slot_k_norm}) {
                layers[i].vectors[slot].assign(c.head_dim, 1.0f);
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
    num_kv_layers = c.shares_pages ? 1 : num_kv_layers;
    kv.allocate(c.kv_format, num_kv_layers, c.num_pages, c.page_tokens, c.num_kv_heads, c.head_dim,
                latent != nullptr, memory);
    // `cache_bytes` of cpu_executor.py: states begin at a page of the system's.
    const size_t pages_end = (c.num_pages * kv.page_bytes() + 4095) / 4096 * 4096;
    states.allocate(c.num_states, state_numbers,
                    memory ? static_cast<uint8_t *>(memory) + pages_end : nullptr);
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
        Matrix *const outer[] = {&embed, &head, &positions, &token_types};
        return *outer[slot];
    }
    return layers[layer].matrices[slot];
}

std::vector<float> &Model::vector(int layer, int slot) {
    if (layer < 0) {
        std::vector<float> *const outer[] = {&norm, &norm_bias, &head_bias, &embed_norm,
                                             &embed_norm_bias};
        return *outer[slot];
    }
    return layers[layer].vectors[slot];
}

} // namespace headrace
