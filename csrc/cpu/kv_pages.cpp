#include "cpu/kv_pages.h"

namespace headrace {

void KvPages::allocate(Format format, int num_layers, int num_pages, int page_tokens,
                       int num_kv_heads, int head_dim, bool has_latents, void *memory) {
    format_ = format;
    num_layers_ = num_layers;
    page_tokens_ = page_tokens;
    num_kv_heads_ = num_kv_heads;
    head_dim_ = head_dim;
    has_latents_ = has_latents;
    if (memory) {
        buffer_.borrow(memory);
    } else {
        buffer_.allocate(size_t(num_pages) * page_bytes());
    }
}

HeadPlace KvPages::place(int layer, int kv_head, int page, int row) const {
    const bool is_paired = format_ == Format::bf16; // two columns of a block, side by side
    const size_t offset = size_t(page) * page_bytes() + size_t(kv_head) * head_bytes();
    uint8_t *head = at(layer) + offset;
    const size_t key_lane = row % lanes * 4;
    const size_t value_row = is_paired ? row / 2 * lanes * 4 + row % 2 * 2 : row * lanes * 4;
    uint8_t *key = head + row / lanes * block_bytes(format_, head_dim_) + key_lane;
    return {format_, has_latents_ ? nullptr : key, head + key_bytes() + value_row,
            block_bytes(format_, page_tokens_), head_dim_};
}

} // namespace headrace
