// The KV cache: pages of [layers] x [kv_heads] x (keys, values) in the layout of attention.h. A
// page's layers lie side by side, so that few pages take few of the system's huge ones.
//   keys    [page_tokens / 16] blocks of [head_dim] x 16 tokens
//   values  [head_dim / 16, rounded up] blocks of [page_tokens] x 16 numbers
// each block as in matrix.h, f32 or bf16. A latent is a key whose first numbers are the value: it
// lies as a value does, and there is nothing else. Behind all layers lie tokens' hidden states,
// [page_tokens] x [hidden_size], of models that draft with these.
#pragma once
#include "cpu/operands.h"

#include <vector>

namespace headrace {

struct KvHeads { // of a layer
    int count, head_dim;
};

class KvPages {
public:
    // In `memory`, or in memory of their own where that is null. Throws std::bad_alloc.
    void allocate(Format format, const std::vector<KvHeads> &layers, int num_pages, int page_tokens,
                  bool has_latents = false, void *memory = nullptr, int hidden_size = 0);

    const uint8_t *keys(int layer, int kv_head) const {
        return buffer_.as<uint8_t>() + offset(layer, kv_head);
    }
    const uint8_t *values(int layer, int kv_head) const {
        return keys(layer, kv_head) + key_bytes(layer);
    }
    size_t page_bytes() const { return page_bytes_; }
    size_t head_bytes(int layer) const { // keys and values of a head, in a page
        const int num_blocks = blocks_of(layers_[layer].head_dim);
        return key_bytes(layer) + num_blocks * block_bytes(format_, page_tokens_);
    }
    Format format() const { return format_; }

    // Where row `row` of `page` has its token's key and value.
    HeadPlace place(int layer, int kv_head, int page, int row) const;

    void store_hidden(const float *hidden, int page, int row) const;
    void load_hidden(int page, int row, float *hidden) const;

private:
    size_t number_bytes() const { return format_ == Format::bf16 ? 2 : 4; }
    uint8_t *hidden_place(int page, int row) const;
    size_t key_bytes(int layer) const {
        const size_t bytes = block_bytes(format_, layers_[layer].head_dim);
        return has_latents_ ? 0 : page_tokens_ / lanes * bytes;
    }
    size_t offset(int layer, int kv_head) const { // within a page
        return offsets_[layer] + size_t(kv_head) * head_bytes(layer);
    }

    Format format_ = Format::f32;
    int page_tokens_ = 0, hidden_size_ = 0;
    std::vector<KvHeads> layers_;
    std::vector<size_t> offsets_;               // of layers within a page
    size_t page_bytes_ = 0, hidden_offset_ = 0; // of hidden states within a page
    bool has_latents_ = false;
    Buffer buffer_;
};

} // namespace headrace
