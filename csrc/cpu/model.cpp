#include "cpu/model.h"

namespace headrace {

Model::Model(const Config &c, const LayerConfig *layer_configs, const RopeConfig *rope_configs)
    : config(c), kernels(find_kernels(c.isa)), layers(c.num_layers), pool(c.num_threads) {
    for (int i = 0; i < c.num_layers; ++i) {
        layers[i].config = layer_configs[i];
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
    kv.allocate(c.kv_format, c.num_layers, c.num_pages, c.page_tokens, c.num_kv_heads, c.head_dim);
    workspace.scratch = std::vector<Buffer>(pool.num_threads());
    workspace.gates = std::vector<Buffer>(pool.num_threads());
}

Matrix &Model::matrix(int layer, int slot) {
    if (layer < 0) {
        return slot == 0 ? embed : head;
    }
    return layers[layer].matrices[slot];
}

std::vector<float> &Model::vector(int layer, int slot) {
    if (layer < 0) {
        return slot == 0 ? norm : slot == 1 ? norm_bias : head_bias;
    }
    return layers[layer].vectors[slot];
}

} // namespace headrace
