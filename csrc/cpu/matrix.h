// A weight matrix [rows, cols], packed for the tiles of gemm.h, and the buffer that holds it.
//
// Rows are output features. Sixteen of them form a block, one lane each; a block is stored along
// its cols, so that a tile reads it front to back:
//   f32    [cols][16] float
//   bf16   [cols / 2][16][2] bf16, odd cols padded with zeros
//   bf12   bf16 without loss, see bf12.h: [cols / 32] headers, padded to a cache line, and
//          [cols / 32] of { [512] uint8 low bytes, [256] of two codes }
//   q8_0   [cols / 32] of { [16] fp16 scale, [32][16] int8 }
//   q4_0   [cols / 32] of { [16] fp16 scale, [4][16] uint32 of eight nibbles }
//   q4_1   [cols / 32] of { [16] fp16 scale, [16] fp16 minimum, [4][16] uint32 of eight nibbles }
//   q4_k   [cols / 256] of { [16] fp16 scale, [16] fp16 minimum,
//          [8] of { [16] uint8 scale, [16] uint8 minimum } for 32 cols each,
//          [32][16] uint32 of eight nibbles }
//   q6_k   [cols / 256] of { [16] fp16 scale, [16][16] int8 scale for 16 cols each,
//          [16] of { [2][16] uint32 of eight low nibbles, [16] uint32 of their high two bits } }
//   q5_0, q5_1, q5_k  as the same of four bits, and in each 32 cols, behind the low nibbles,
//          [16] uint32 of high bits
//   q2_k   [cols / 256] of { [16] fp16 scale, [16] fp16 minimum, [4][16] uint32 of four pairs of
//          nibbles, the scale and the minimum for 16 cols each, [16][16] uint32 of two bits }
//   q3_k   [cols / 256] of { [16] fp16 scale, [16][16] int8 scale for 16 cols each,
//          [8] of { [2][16] uint32 of two low bits, [16] uint32 of high bits } }
//   iq4_nl as q4_0, nibbles are places in a table
//   iq4_xs [cols / 256] of { [16] fp16 scale, [8][16] int8 scale for 32 cols each,
//          [32][16] uint32 of eight nibbles, places in a table }
//   mxfp4  [cols / 32] of { [16] uint8 exponent, [4][16] uint32 of eight nibbles, as iq4_nl }
//   int8   [cols / 32, rounded up] of { [16] fp16 scale, [8][16][4] uint8, 128 more than the number
//   }
//   fixed16  [cols / 256, rounded up] of { [16] float scale, [128][16][2] int16 }, the last one
//          of as many pairs of cols as are left
// In a word, the lowest bits of its bytes are those of the first four columns, the bits above them
// those of the next four. High bits lie in the same order.
#pragma once
#include "cpu/bf12.h"

#include <memory>
#include <mutex>
#include <vector>

namespace headrace {

constexpr int lanes = 16;
constexpr int quantized_group = 32;
constexpr int super_block = 256; // cols under one fp16 scale, in formats of this size

constexpr int blocks_of(int n) {
    return (n + lanes - 1) / lanes;
}
constexpr int padded(int n) {
    return blocks_of(n) * lanes;
}
constexpr int groups_of(int cols) {
    return (cols + quantized_group - 1) / quantized_group;
}

enum class Format : int32_t {
    f32,
    bf16,
    q8_0,
    q4_0,
    q4_1,
    q4_k,
    q6_k,
    q5_0,
    q5_1,
    q5_k,
    q2_k,
    q3_k,
    iq4_nl,
    iq4_xs,
    mxfp4,
    int8,
    bf12,
    fixed16
};

// Of a block with codes: `unit` columns lie behind one header, `group` of them share a scale. A
// number is scale * (code - zero), and in some formats a minimum more. Where there is a table, code
// is 128 more than what it has in that place. Scales that are integers, under one fp16 scale of the
// unit, are `most_steps` at most.
struct Packing {
    int unit = 0, group = 0, header_bytes = 0, low_bits = 0, high_bits = 0, zero = 0;
    int most_steps = 0;
    const int8_t *table = nullptr;

    constexpr bool has_table() const { return table != nullptr; }
    constexpr bool has_steps() const { return most_steps != 0; }
    // A number under the scale of the unit is an integer of at most this size.
    constexpr int most_weight() const {
        const int past_zero = (1 << (low_bits + high_bits)) - 1 - zero;
        return most_steps * (has_table() ? 127 : past_zero > zero ? past_zero : zero);
    }
};

inline constexpr int8_t iq4_table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};
// Twice what floats of four bits are, with a bit of mantissa; the scale is half.
inline constexpr int8_t mxfp4_table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

constexpr Packing packing_of(Format format) {
    switch (format) {
    case Format::q4_0:
        return {32, 32, 2 * lanes, 4, 0, 8};
    case Format::q4_1:
        return {32, 32, 4 * lanes, 4, 0, 0};
    case Format::q5_0:
        return {32, 32, 2 * lanes, 4, 1, 16};
    case Format::q5_1:
        return {32, 32, 4 * lanes, 4, 1, 0};
    case Format::q2_k:
        return {super_block, 16, (4 + 16) * lanes, 2, 0, 0, 15};
    case Format::q3_k:
        return {super_block, 16, (2 + 16) * lanes, 2, 1, 4, 32};
    case Format::q4_k:
        return {super_block, 32, (4 + 8 * 2) * lanes, 4, 0, 0, 63};
    case Format::q5_k:
        return {super_block, 32, (4 + 8 * 2) * lanes, 4, 1, 0, 63};
    case Format::q6_k:
        return {super_block, 16, (2 + 16) * lanes, 4, 2, 32, 128};
    case Format::iq4_nl:
        return {32, 32, 2 * lanes, 4, 0, 128, 0, iq4_table};
    case Format::iq4_xs:
        return {super_block, 32, (2 + 8) * lanes, 4, 0, 128, 32, iq4_table};
    case Format::mxfp4:
        return {32, 32, lanes, 4, 0, 128, 0, mxfp4_table};
    default:
        return {};
    }
}

// Of fixed16: columns that share a scale, whose largest number is so many steps.
constexpr int fixed16_unit = super_block, fixed16_steps = 4095;
constexpr size_t fixed16_header_bytes = 4 * lanes, fixed16_pair_bytes = 4 * lanes;
constexpr size_t fixed16_unit_bytes = fixed16_header_bytes + fixed16_unit / 2 * fixed16_pair_bytes;
constexpr int units_of(int cols) {
    return (cols + fixed16_unit - 1) / fixed16_unit;
}

constexpr size_t block_bytes(Format format, int cols) {
    const size_t groups = size_t(cols) / quantized_group;
    switch (format) {
    case Format::f32:
        return size_t(cols) * lanes * 4;
    case Format::bf16:
        return size_t(cols + 1) / 2 * lanes * 4;
    case Format::q8_0:
        return groups * (lanes * 2 + quantized_group * lanes);
    case Format::int8:
        return groups_of(cols) * (lanes * 2 + quantized_group * lanes);
    case Format::fixed16:
        return units_of(cols) * fixed16_header_bytes + size_t(cols + 1) / 2 * fixed16_pair_bytes;
    case Format::bf12:
        return bf12_header_bytes(cols) + size_t(cols) / bf12_cols * bf12_unit_bytes;
    default:
        const Packing packing = packing_of(format);
        const int code_bits = packing.low_bits + packing.high_bits;
        return size_t(cols) / packing.unit *
               (packing.header_bytes + packing.unit * lanes * code_bits / 8);
    }
}

constexpr size_t packed_bytes(Format format, int rows, int cols) {
    return blocks_of(rows) * block_bytes(format, cols);
}

// Zeroed memory, aligned to a cache line, on huge pages where the system grants them.
class Buffer {
public:
    Buffer() = default;
    ~Buffer();
    Buffer(Buffer &&other) noexcept;
    Buffer &operator=(Buffer &&other) noexcept;

    void allocate(size_t num_bytes); // throws std::bad_alloc
    void borrow(void *memory);       // of another owner, for as long as this lives
    // Room for n of them; contents survive only if it was there.
    template <class T> T *room(size_t n) {
        if (size_ < n * sizeof(T)) {
            allocate(n * sizeof(T));
        }
        return as<T>();
    }
    float *floats(size_t n) { return room<float>(n); }
    template <class T> T *as() const { return static_cast<T *>(data_); }

private:
    void release();

    void *data_ = nullptr;
    size_t size_ = 0; // 0 of borrowed memory
};

struct LowRankPair; // low_rank.h

struct Matrix {
    Format format = Format::f32;
    int rows = 0;
    int cols = 0;
    Buffer packed;
    std::vector<const LowRankPair *> low_rank; // by adapter, null where it adds nothing; or empty
    std::vector<std::unique_ptr<uint8_t[]>> stored; // units that bf12 cannot take
    std::mutex storing;

    // What it is, without memory: `packed` is to borrow `num_bytes`, zeroed, and slack behind them.
    void shape(Format format, int rows, int cols);
    void allocate(Format format, int rows, int cols);
    size_t num_bytes() const { return packed_bytes(format, rows, cols); }
    const uint8_t *block(int n) const {
        return packed.as<uint8_t>() + size_t(n) * block_bytes(format, cols);
    }
};

// Numbers as they are stored: rows, `stride` bytes apart, of one type.
enum class NumberType : int32_t { f32, bf16, fp16 };

struct NumberRows {
    NumberType type;
    int64_t stride;
    const void *first;
};

// Pack rows [first_row, first_row + num_rows) of a matrix of f32 or bf16, first_row a multiple of
// 16.
void pack_numbers(Matrix &matrix, int first_row, int num_rows, const NumberRows &source);

// The same from row-major `source`, for matrices of any format.
// The source of f32, bf16, int8 and fixed16 is fp32; that of bf16 may be bf16, that of int8 Q8_0.
// The source of bf12 is bf16 alone; others are GGUF blocks.
void pack_float(Matrix &matrix, int first_row, int num_rows, const float *source);
void pack_stored(Matrix &matrix, int first_row, int num_rows, const void *source);

// Whether bf12 is worth it for a matrix of which `source` is some rows of bf16.
bool suits_bf12(const uint16_t *source, int num_rows, int cols);

// One row, decoded: the embedding of a token when head and embedding share one packed matrix.
void unpack_row(const Matrix &matrix, int row, float *out);

} // namespace headrace
