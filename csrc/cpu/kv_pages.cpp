#include "cpu/kv_pages.h"

namespace headrace {

void KvPages::allocate(Format format, const std::vector<KvHeads> &layers, int num_pages,
                       int page_tokens, bool has_latents, void *memory) {
    format_ = format;
    page_tokens_ = page_tokens;
    layers_ = layers;
    has_latents_ = has_latents;
    page_bytes_ = 0;
    offsets_.clear();
    for (int i = 0; i < int(layers.size()); ++i) {
        offsets_.push_back(page_bytes_);
        page_bytes_ += head_bytes(i) * layers[i].count;
    }
    if (memory) {
        buffer_.borrow(memory);
    } else {
        buffer_.allocate(size_t(num_pages) * page_bytes());
    }
}

HeadPlace KvPages::place(int layer, int kv_head, int page, int row) const {
    const int head_dim = layers_[layer].head_dim;
    const bool is_paired = format_ == Format::bf16; // two columns of a block, side by side
    uint8_t *head = buffer_.as<uint8_t>() + size_t(page) * page_bytes() + offset(layer, kv_head);
    const size_t key_lane = row % lanes * 4;
    const size_t value_row = is_paired ? row / 2 * lanes * 4 + row % 2 * 2 : row * lanes * 4;
    uint8_t *key = head + row / lanes * block_bytes(format_, head_dim) + key_lane;
    return {format_, has_latents_ ? nullptr : key, head + key_bytes(layer) + value_row,
            block_bytes(format_, page_tokens_), head_dim};
}

} // namespace headrace
