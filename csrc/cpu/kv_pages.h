// The KV cache: pages of [layers] x [kv_heads] x (keys, values) in the layout of attention.h. A
// page's layers lie side by side, so that few pages take few of the system's huge ones.
//   keys    [page_tokens / 16] blocks of [head_dim] x 16 tokens
//   values  [head_dim / 16, rounded up] blocks of [page_tokens] x 16 numbers
// each block as in matrix.h, f32 or bf16. A latent is a key whose first numbers are the value: it
// lies as a value does, and there is nothing else.
#pragma once
#include "cpu/operands.h"

namespace headrace {

class KvPages {
public:
    // In `memory`, or in memory of their own where that is null. Throws std::bad_alloc.
    void allocate(Format format, int num_layers, int num_pages, int page_tokens, int num_kv_heads,
                  int head_dim, bool has_latents = false, void *memory = nullptr);

    const uint8_t *keys(int layer, int kv_head) const {
        return at(layer) + size_t(kv_head) * head_bytes();
    }
    const uint8_t *values(int layer, int kv_head) const {
        return keys(layer, kv_head) + key_bytes();
    }
    size_t page_bytes() const { return num_layers_ * layer_bytes(); }
    size_t head_bytes() const { // keys and values of a head, in a layer of a page
        return key_bytes() + blocks_of(head_dim_) * block_bytes(format_, page_tokens_);
    }
    Format format() const { return format_; }

    // Where row `row` of `page` has its token's key and value.
    HeadPlace place(int layer, int kv_head, int page, int row) const;

private:
    size_t key_bytes() const {
        return has_latents_ ? 0 : page_tokens_ / lanes * block_bytes(format_, head_dim_);
    }
    size_t layer_bytes() const { return head_bytes() * num_kv_heads_; } // of a page
    uint8_t *at(int layer) const { return buffer_.as<uint8_t>() + size_t(layer) * layer_bytes(); }

    Format format_ = Format::f32;
    int num_layers_ = 0, page_tokens_ = 0, num_kv_heads_ = 0, head_dim_ = 0;
    bool has_latents_ = false;
    Buffer buffer_;
};

} // namespace headrace
