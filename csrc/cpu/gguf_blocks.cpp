#include "cpu/gguf_blocks.h"
#include "cpu/numbers.h"

namespace headrace {

namespace {

// Column j of the eight that lie in each word.
void put_nibble(uint8_t *words, int lane, int j, int nibble) {
    words[(j / 8 * lanes + lane) * 4 + j % 4] |= uint8_t(nibble << (j % 8 / 4 * 4));
}

int nibble_at(const uint8_t *words, int lane, int j) {
    return words[(j / 8 * lanes + lane) * 4 + j % 4] >> (j % 8 / 4 * 4) & 15;
}

float fp16_at(const uint8_t *halves, int lane) {
    uint16_t half;
    std::memcpy(&half, halves + 2 * lane, 2);
    return from_fp16(half);
}

// A scale, in q4_1 a minimum, and 32 numbers; column j shares a byte with column j + 16.
const uint8_t *pack_flat(Format format, const uint8_t *source, uint8_t *group, int lane) {
    const int num_halves = format == Format::q4_1 ? 2 : 1;
    for (int i = 0; i < num_halves; ++i, source += 2, group += 2 * lanes) {
        std::memcpy(group + 2 * lane, source, 2);
    }
    if (format == Format::q8_0) {
        for (int j = 0; j < quantized_group; ++j) {
            group[j * lanes + lane] = source[j];
        }
        return source + quantized_group;
    }
    if (format == Format::int8) {
        for (int j = 0; j < quantized_group; ++j) {
            group[(j / 4 * lanes + lane) * 4 + j % 4] = uint8_t(source[j] + 128);
        }
        return source + quantized_group;
    }
    for (int j = 0; j < 16; ++j) {
        put_nibble(group, lane, j, source[j] & 15);
        put_nibble(group, lane, j + 16, source[j] >> 4);
    }
    return source + 16;
}

float flat_number(Format format, const uint8_t *group, int lane, int j) {
    const float scale = fp16_at(group, lane);
    switch (format) {
    case Format::q8_0:
        return scale * float(int8_t(group[2 * lanes + j * lanes + lane]));
    case Format::q4_0:
        return scale * float(nibble_at(group + 2 * lanes, lane, j) - 8);
    default:
        return scale * float(nibble_at(group + 4 * lanes, lane, j)) +
               fp16_at(group + 2 * lanes, lane);
    }
}

constexpr int q4_k_words = lanes * 4 + 8 * lanes * 2; // where the nibbles begin

// Scale and minimum, 12 bytes with eight pairs of 6 bits, 128 bytes with eight groups of nibbles.
const uint8_t *pack_q4_k(const uint8_t *source, uint8_t *block, int lane) {
    std::memcpy(block + 2 * lane, source, 2);
    std::memcpy(block + 2 * lanes + 2 * lane, source + 2, 2);
    const uint8_t *six = source + 4;
    for (int g = 0; g < 8; ++g) { // the top bits of pairs 4 to 7 are above those of 0 to 3
        uint8_t *pair = block + 4 * lanes + g * 2 * lanes + lane;
        pair[0] = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
        pair[lanes] = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
    }
    for (int j = 0; j < super_block; ++j) { // groups 2i and 2i + 1 share 32 bytes
        const int byte = source[16 + j / 64 * 32 + j % 32];
        put_nibble(block + q4_k_words, lane, j, j / 32 % 2 ? byte >> 4 : byte & 15);
    }
    return source + 144;
}

float q4_k_number(const uint8_t *block, int lane, int j) {
    const uint8_t *pair = block + 4 * lanes + j / 32 * 2 * lanes + lane;
    const float scale = fp16_at(block, lane) * float(pair[0]);
    const float minimum = fp16_at(block + 2 * lanes, lane) * float(pair[lanes]);
    return scale * float(nibble_at(block + q4_k_words, lane, j)) - minimum;
}

constexpr int q6_k_chunks = lanes * 2 + 16 * lanes, q6_k_chunk_bytes = lanes * 12;

// Low nibbles (128 bytes), high two bits (64), scales of sixteen (16), the scale of those.
const uint8_t *pack_q6_k(const uint8_t *source, uint8_t *block, int lane) {
    std::memcpy(block + 2 * lane, source + 208, 2);
    for (int g = 0; g < 16; ++g) {
        block[2 * lanes + g * lanes + lane] = source[192 + g];
    }
    for (int j = 0; j < super_block; ++j) { // either half is four runs of 32
        const int half = j / 128, run = j / 32 % 4;
        const int low = source[half * 64 + run % 2 * 32 + j % 32] >> (run / 2 * 4) & 15;
        const int high = source[128 + half * 32 + j % 32] >> (run * 2) & 3;
        uint8_t *chunk = block + q6_k_chunks + j / 16 * q6_k_chunk_bytes;
        put_nibble(chunk, lane, j % 16, low);
        chunk[lanes * 8 + 4 * lane + j % 4] |= uint8_t(high << (j % 16 / 4 * 2));
    }
    return source + 210;
}

float q6_k_number(const uint8_t *block, int lane, int j) {
    const uint8_t *chunk = block + q6_k_chunks + j / 16 * q6_k_chunk_bytes;
    const int high = chunk[lanes * 8 + 4 * lane + j % 4] >> (j % 16 / 4 * 2) & 3;
    const auto scale = int8_t(block[2 * lanes + j / 16 * lanes + lane]);
    return fp16_at(block, lane) * float(scale) *
           float((nibble_at(chunk, lane, j % 16) | high << 4) - 32);
}

constexpr bool is_super(Format format) {
    return format == Format::q4_k || format == Format::q6_k;
}

} // namespace

const uint8_t *pack_gguf_row(Format format, int cols, const uint8_t *source, uint8_t *block,
                             int lane) {
    const int unit = is_super(format) ? super_block : quantized_group;
    for (int col = 0; col < cols; col += unit, block += block_bytes(format, unit)) {
        source = format == Format::q4_k   ? pack_q4_k(source, block, lane)
                 : format == Format::q6_k ? pack_q6_k(source, block, lane)
                                          : pack_flat(format, source, block, lane);
    }
    return source;
}

float gguf_number(Format format, const uint8_t *block, int lane, int col) {
    const int unit = is_super(format) ? super_block : quantized_group;
    const uint8_t *start = block + col / unit * block_bytes(format, unit);
    return format == Format::q4_k   ? q4_k_number(start, lane, col % unit)
           : format == Format::q6_k ? q6_k_number(start, lane, col % unit)
                                    : flat_number(format, start, lane, col % unit);
}

} // namespace headrace
