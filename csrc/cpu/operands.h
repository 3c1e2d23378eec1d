// What the kernels work on. Code here is compiled for the oldest processor. kernels_*.cpp include
// it before they raise the target, so no function that several of them share needs a new one.
#pragma once
#include "cpu/matrix.h"
#include "cpu/numbers.h"

namespace headrace {

// Rows of bf16 in the order of Intel's tiles: in bands of sixteen, which have 64 bytes of each row
// for every 32 columns.
constexpr int band_rows = 16;
constexpr size_t band_bytes(int cols) {
    return size_t(cols) * 2 * band_rows;
}

// Of one product; see gemm.h.
struct Operands {
    const uint8_t *blocks; // the first
    size_t block_bytes;
    int cols;
    const float *x; // [rows, cols], the first row
    int x_stride;
    float *out;
    int out_stride;
    bool accumulate;                // start the sums from `out` rather than from zero
    ptrdiff_t ahead;                // prefetch this far from what is read
    const uint8_t *tiles = nullptr; // the same rows in bands; null: there are none
    const float *bias = nullptr;    // of each lane of the blocks, for the finished sums; or null

    // Without tiles.
    Operands at_row(int row) const {
        Operands moved = *this;
        moved.tiles = nullptr;
        moved.x += size_t(row) * x_stride;
        moved.out += size_t(row) * out_stride;
        return moved;
    }
    Operands at_block(int block) const {
        Operands moved = *this;
        moved.blocks += block * block_bytes;
        moved.out += block * lanes;
        moved.bias = bias ? bias + block * lanes : nullptr;
        return moved;
    }
};

// How activations become integers: the largest of so many columns becomes `most_steps` of a scale,
// or minus as many. It becomes fewer where the sizes of all would sum up to more than `most_sum`.
struct Rounding {
    int columns, most_steps;
    int most_sum = INT32_MAX;

    constexpr bool may_exceed() const { return int64_t(columns) * most_steps > most_sum; }
    // How many steps fit, where `most_steps` give a sum of `sum`. Either rounding adds half a step
    // to each column at most.
    constexpr int fitting_steps(int sum) const {
        return sum <= most_sum ? most_steps
                               : int(int64_t(most_steps) * (most_sum - columns) / (sum + columns));
    }

    // What suits both.
    constexpr Rounding with(const Rounding &other) const {
        return {columns > other.columns ? columns : other.columns,
                most_steps < other.most_steps ? most_steps : other.most_steps,
                most_sum < other.most_sum ? most_sum : other.most_sum};
    }
};

// To 8 or 16 bits, beside weights of a format. Where scales of groups are integers, so is the dot
// of a unit. Its columns share a scale, of so few steps that 32 bits hold the sum.
constexpr Rounding rounding_of(Format format, int bits) {
    constexpr int most_steps = 127 * 128; // of 16 bits; 15 are used
    const Packing packing = packing_of(format);
    if (bits == 8) {
        return {quantized_group, 127};
    }
    if (!packing.has_steps()) {
        return {quantized_group, most_steps};
    }
    return {super_block, most_steps, INT32_MAX / packing.most_weight()};
}
static_assert(rounding_of(Format::q6_k, 16).fitting_steps(super_block * 127 * 128) == 2046);

// Of 32 activations of a row, as rounded.
struct GroupSums {
    float scale;
    float sum, first_sum; // of the activations, of their first half

    // Of the whole, or of one half.
    float sum_of(int part, int num_parts) const {
        return num_parts == 1 ? sum : part == 0 ? first_sum : sum - first_sum;
    }
};

// The number is scale * numbers[j]. See gemm_int16.h.
struct Int16Group : GroupSums {
    int32_t offset, first_offset;         // -128 times the sum of the numbers, likewise
    uint8_t numbers[2 * quantized_group]; // as V::dot reads them

    int32_t offset_of(int part, int num_parts) const {
        return num_parts == 1 ? offset : part == 0 ? first_offset : offset - first_offset;
    }
};

struct Int16Operands {
    const uint8_t *blocks; // the first
    size_t block_bytes;
    int num_groups;      // along k; see groups_of
    const Int16Group *x; // [rows, x_stride], the first row
    int x_stride;
    float *out;
    int out_stride;
    const uint8_t *next;            // what is likely read after the blocks; it need not be there
    bool accumulate = false;        // start the sums from `out` rather than from zero
    const uint8_t *bands = nullptr; // the same rows as tiles read them; null: there are none
    size_t slab_bytes = 0;          // from the bands of a slab to those of the next

    // Without bands.
    Int16Operands at_row(int row) const {
        Int16Operands moved = *this;
        moved.bands = nullptr;
        moved.x += size_t(row) * x_stride;
        moved.out += size_t(row) * out_stride;
        return moved;
    }
    Int16Operands at_block(int block) const {
        Int16Operands moved = *this;
        moved.blocks += block * block_bytes;
        moved.out += block * lanes;
        return moved;
    }
};

// Of a panel (gemm_panels.h), and of a group of a row beside it: words of two numbers.
constexpr int num_pairs = quantized_group / 2;
constexpr int slab_groups = super_block / quantized_group; // columns of a panel
constexpr size_t most_panel_bytes = 48 << 10;
using RowPairs = int32_t[num_pairs];
constexpr size_t panel_row_bytes = slab_groups * (sizeof(RowPairs) + sizeof(GroupSums));

// A band of a slab, for Intel's tiles: numbers and sums of `band_rows` rows.
constexpr size_t slab_band_bytes = band_rows * panel_row_bytes;
constexpr int slabs_of(int num_groups) {
    return (num_groups + slab_groups - 1) / slab_groups;
}

// What panels take, with so many rows beside them.
constexpr size_t room_of_panels(int rows) {
    return most_panel_bytes + padded(rows) * panel_row_bytes;
}

// Of what is decoded at a time: as wide as the widest tile of many rows, and short enough for the
// nearest cache. Units are whole.
constexpr int decoded_blocks = 2, decoded_columns = super_block;
constexpr int unpacked_blocks = 2; // of bf12, likewise

constexpr int block_tokens = 64; // of logits that have their largest noted

constexpr int num_blocks_of(int num_tokens) {
    return (num_tokens + block_tokens - 1) / block_tokens;
}

// Where a page keeps a key and a value of one token, from their first numbers on; see kv_pages.h.
// No key: values are the first numbers of keys, which lie in their place.
struct HeadPlace {
    Format format;
    uint8_t *key, *value;
    size_t value_block; // bytes from sixteen numbers of the value to the next
    int head_dim;
};

// Of attention; see attention.h.
constexpr int segment_tokens = 256; // a multiple of every page size
constexpr int max_tile_rows = 48;   // tokens times heads of a tile, so that scores stay in L2

// The keys that a token sees: the newest so many, or those of its own chunk of so many. In a
// two-sided window, as many from its own on. In a causal one none behind its own, whatever the mask
// of the batch says.
struct Window {
    int32_t tokens; // INT32_MAX: all
    int32_t is_chunked;
    int32_t is_two_sided = 0;
    int32_t is_causal = 0;

    int first_key(int position) const {
        if (is_chunked) {
            return position / tokens * tokens;
        }
        return position < tokens ? 0 : position - tokens + 1;
    }
    // `last_seen`: where the mask of the whole batch lets the token see to.
    int last_key(int position, int last_seen) const {
        if (is_causal) {
            return position;
        }
        return is_two_sided && last_seen - position >= tokens ? position + tokens - 1 : last_seen;
    }
};

struct AttentionTile {
    const float *queries; // [tokens, group, head_dim], rotated and scaled
    bool is_rounded;      // queries are, and numerators get, rounded to bf16, as keys and values
    int num_tokens;
    int group; // query heads per KV head
    int head_dim;
    int value_dim;            // numbers of a value
    int first_position;       // of the first token
    int last_key;             // that any token sees
    const int32_t *last_seen; // [tokens], by each; null: its own position
    Window window;
    float softcap;            // 0: none
    Format format;            // of keys and values
    const uint8_t *keys;      // of this layer and KV head, in page 0
    const uint8_t *values;    // likewise
    const uint8_t *next_keys; // those that the same task reads next; null: none
    size_t page_stride;       // bytes from page to page
    int page_tokens;
    const int32_t *pages; // of the sequence

    int rows() const { return num_tokens * group; }
    int position(int row) const { return first_position + row / group; }
    int last_key_of(int row) const {
        return last_seen ? window.last_key(position(row), last_seen[row / group]) : position(row);
    }
    size_t page_offset(int token) const { return pages[token / page_tokens] * page_stride; }
    int first_key(int row) const { return window.first_key(position(row)); }
};

// Softmax numerators and their sum over some keys, for each row of a tile.
struct Partial {
    float *maximum; // [rows], -inf where a row saw no key
    float *sum;     // [rows]
    float *values;  // [rows, stride]
    int stride;
};

} // namespace headrace
