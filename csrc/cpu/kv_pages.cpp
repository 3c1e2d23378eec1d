#include "cpu/kv_pages.h"
#include "cpu/numbers.h"

namespace headrace {

namespace {

// Column k, lane n of a packed block; bf16 keeps two columns side by side.
void put(Format format, uint8_t *block, int k, int n, float number) {
    if (format == Format::f32) {
        reinterpret_cast<float *>(block)[k * lanes + n] = number;
    } else {
        reinterpret_cast<uint16_t *>(block)[(k / 2 * lanes + n) * 2 + k % 2] = to_bf16(number);
    }
}

} // namespace

void KvPages::allocate(Format format, int num_layers, int num_pages, int page_tokens,
                       int num_kv_heads, int head_dim) {
    format_ = format;
    num_pages_ = num_pages;
    page_tokens_ = page_tokens;
    num_kv_heads_ = num_kv_heads;
    head_dim_ = head_dim;
    buffer_.allocate(size_t(num_layers) * num_pages * page_bytes());
}

void KvPages::write(int layer, int page, int row, const float *keys, const float *values) {
    uint8_t *head = at(layer) + size_t(page) * page_bytes();
    for (int h = 0; h < num_kv_heads_; ++h, head += head_bytes()) {
        uint8_t *key_block = head + row / lanes * block_bytes(format_, head_dim_);
        for (int d = 0; d < head_dim_; ++d) {
            put(format_, key_block, d, row % lanes, keys[h * head_dim_ + d]);
        }
        uint8_t *value_block = head + key_bytes();
        for (int d = 0; d < head_dim_; ++d) {
            put(format_, value_block + d / lanes * block_bytes(format_, page_tokens_), row,
                d % lanes, values[h * head_dim_ + d]);
        }
    }
}

} // namespace headrace
