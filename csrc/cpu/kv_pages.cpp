#include "cpu/kv_pages.h"
#include "cpu/numbers.h"

#include <algorithm>

namespace headrace {

void KvPages::allocate(Format format, const std::vector<KvHeads> &layers, int num_pages,
                       int page_tokens, bool has_latents, void *memory, int hidden_size) {
    format_ = format;
    page_tokens_ = page_tokens;
    hidden_size_ = hidden_size;
    layers_ = layers;
    has_latents_ = has_latents;
    page_bytes_ = 0;
    offsets_.clear();
    for (int i = 0; i < int(layers.size()); ++i) {
        offsets_.push_back(page_bytes_);
        page_bytes_ += head_bytes(i) * layers[i].count;
    }
    hidden_offset_ = page_bytes_;
    page_bytes_ += size_t(page_tokens) * hidden_size * number_bytes();
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

uint8_t *KvPages::hidden_place(int page, int row) const {
    return buffer_.as<uint8_t>() + size_t(page) * page_bytes_ + hidden_offset_ +
           size_t(row) * hidden_size_ * number_bytes();
}

void KvPages::store_hidden(const float *hidden, int page, int row) const {
    uint8_t *place = hidden_place(page, row);
    if (format_ == Format::bf16) {
        std::transform(hidden, hidden + hidden_size_, reinterpret_cast<uint16_t *>(place), to_bf16);
    } else {
        std::copy_n(hidden, hidden_size_, reinterpret_cast<float *>(place));
    }
}

void KvPages::load_hidden(int page, int row, float *hidden) const {
    const uint8_t *place = hidden_place(page, row);
    if (format_ == Format::bf16) {
        const auto *numbers = reinterpret_cast<const uint16_t *>(place);
        std::transform(numbers, numbers + hidden_size_, hidden, from_bf16);
    } else {
        std::copy_n(reinterpret_cast<const float *>(place), hidden_size_, hidden);
    }
}

} // namespace headrace
