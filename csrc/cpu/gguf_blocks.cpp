#include "cpu/gguf_blocks.h"
#include "cpu/numbers.h"

#include <iterator>

namespace headrace {

namespace {

constexpr Format coded_formats[] = {Format::q4_0, Format::q4_1,   Format::q5_0,   Format::q5_1,
                                    Format::q2_k, Format::q3_k,   Format::q4_k,   Format::q5_k,
                                    Format::q6_k, Format::iq4_nl, Format::iq4_xs, Format::mxfp4};

// Bytes of a block as stored.
constexpr int stored_bytes(Format format) {
    switch (format) {
    case Format::q4_0:
    case Format::iq4_nl:
        return 18;
    case Format::q4_1:
        return 20;
    case Format::q5_0:
        return 22;
    case Format::q5_1:
        return 24;
    case Format::q2_k:
        return 84;
    case Format::q3_k:
        return 110;
    case Format::q4_k:
        return 144;
    case Format::q5_k:
        return 176;
    case Format::q6_k:
        return 210;
    case Format::iq4_xs:
        return 136;
    case Format::mxfp4:
        return 17;
    default:
        return 0;
    }
}

// Codes of a block as stored are read eight columns at a time, from the k-th eight on. Each is a
// byte, that of the first column the lowest.
constexpr int eight_columns = 8;
constexpr uint64_t every_byte = 0x0101010101010101;

uint64_t eight_of(const uint8_t *bytes, int shift, uint64_t mask) {
    uint64_t eight;
    std::memcpy(&eight, bytes, sizeof eight);
    return eight >> shift & mask * every_byte;
}

// Of 32 bits.
uint64_t flat_bits(const uint8_t *bytes, int k) {
    const uint64_t own = bytes[k] * every_byte & 0x8040201008040201;
    return ((own + 0x7f * every_byte) | own) >> 7 & every_byte;
}

// Of 32 nibbles; the second half has the high ones of the first one's bytes.
uint64_t flat_nibbles(const uint8_t *bytes, int k) {
    return eight_of(bytes + k % 2 * 8, k / 2 * 4, 15);
}

// Of 256 nibbles; groups 2g and 2g + 1, of 32 columns each, share 32 bytes.
uint64_t paired_nibbles(const uint8_t *bytes, int k) {
    return eight_of(bytes + k / 8 * 32 + k % 4 * 8, k / 4 % 2 * 4, 15);
}

// Of 256 codes of two bits; in either half, four groups of 32 columns share bytes.
uint64_t two_bits(const uint8_t *bytes, int k) {
    return eight_of(bytes + k / 16 * 32 + k % 4 * 8, k / 4 % 4 * 2, 3);
}

// Of 256 bits; each of eight groups of 32 columns has one bit of every byte.
uint64_t crossed_bits(const uint8_t *bytes, int k) {
    return eight_of(bytes + k % 4 * 8, k / 4, 1);
}

// The codes of eight columns of a block as stored.
template <Format format> uint64_t stored_codes(const uint8_t *source, int k) {
    switch (format) {
    case Format::q4_0:
    case Format::iq4_nl:
        return flat_nibbles(source + 2, k);
    case Format::mxfp4:
        return flat_nibbles(source + 1, k);
    case Format::iq4_xs:
        return flat_nibbles(source + 8 + k / 4 * 16, k % 4);
    case Format::q4_1:
        return flat_nibbles(source + 4, k);
    case Format::q5_0:
        return flat_nibbles(source + 6, k) | flat_bits(source + 2, k) << 4;
    case Format::q5_1:
        return flat_nibbles(source + 8, k) | flat_bits(source + 4, k) << 4;
    case Format::q2_k:
        return two_bits(source + 16, k);
    case Format::q3_k:
        return two_bits(source + 32, k) | crossed_bits(source, k) << 2;
    case Format::q4_k:
        return paired_nibbles(source + 16, k);
    case Format::q5_k:
        return paired_nibbles(source + 48, k) | crossed_bits(source + 16, k) << 4;
    case Format::q6_k: // in either half, the low halves of 64 bytes come first
        return eight_of(source + k / 16 * 64 + k % 8 * 8, k / 8 % 2 * 4, 15) |
               two_bits(source + 128, k) << 4;
    default:
        return 0;
    }
}

void put_half(uint8_t *halves, int lane, const uint8_t *half) {
    std::memcpy(halves + 2 * lane, half, 2);
}

float half_at(const uint8_t *halves, int lane) {
    uint16_t half;
    std::memcpy(&half, halves + 2 * lane, 2);
    return from_fp16(half);
}

// 12 bytes with eight scales and minima of 6 bits, whose halves lie as the kernels read them.
void put_pairs(const uint8_t *six, uint8_t *pairs, int lane) {
    for (int g = 0; g < 8; ++g) { // the top bits of pairs 4 to 7 are above those of 0 to 3
        uint8_t *pair = pairs + g * 2 * lanes + lane;
        pair[0] = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
        pair[lanes] = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
    }
}

// 12 bytes with sixteen scales of 6 bits, 32 more than the number.
void put_q3_k_scales(const uint8_t *six, uint8_t *scales, int lane) {
    for (int g = 0; g < 16; ++g) {
        const int low = six[g % 8] >> (g / 8 * 4) & 15, high = six[8 + g % 4] >> (g / 4 * 2) & 3;
        scales[g * lanes + lane] = uint8_t((low | high << 4) - 32);
    }
}

// Two bytes with the high two bits of eight scales of 6, and four with the low ones.
void put_iq4_xs_scales(const uint8_t *six, uint8_t *scales, int lane) {
    for (int g = 0; g < 8; ++g) {
        const int low = six[2 + g / 2] >> (g % 2 * 4) & 15, high = six[g / 4] >> (g % 4 * 2) & 3;
        scales[g * lanes + lane] = uint8_t((low | high << 4) - 32);
    }
}

template <Format format> void put_header(const uint8_t *source, uint8_t *header, int lane) {
    constexpr int half = 2 * lanes;
    switch (format) {
    case Format::q4_1:
    case Format::q5_1:
        put_half(header, lane, source);
        return put_half(header + half, lane, source + 2);
    case Format::q2_k:
        put_half(header, lane, source + 80);
        put_half(header + half, lane, source + 82);
        for (int g = 0; g < 16; ++g) {
            header[2 * half + (g / 4 * lanes + lane) * 4 + g % 4] = source[g];
        }
        return;
    case Format::q3_k:
        put_half(header, lane, source + 108);
        return put_q3_k_scales(source + 96, header + half, lane);
    case Format::q4_k:
    case Format::q5_k:
        put_half(header, lane, source);
        put_half(header + half, lane, source + 2);
        return put_pairs(source + 4, header + 2 * half, lane);
    case Format::q6_k:
        put_half(header, lane, source + 208);
        for (int g = 0; g < 16; ++g) {
            header[half + g * lanes + lane] = source[192 + g];
        }
        return;
    case Format::iq4_xs:
        put_half(header, lane, source);
        return put_iq4_xs_scales(source + 2, header + half, lane);
    case Format::mxfp4:
        header[lane] = source[0];
        return;
    default:
        return put_half(header, lane, source);
    }
}

struct Scale {
    float scale, minimum;
};

Scale scale_at(Format format, const uint8_t *header, int lane, int group) {
    constexpr int half = 2 * lanes;
    if (format == Format::mxfp4) {
        return {half_power_of_two(header[lane]), 0.0f};
    }
    const float scale = half_at(header, lane);
    switch (format) {
    case Format::q4_1:
    case Format::q5_1:
        return {scale, half_at(header + half, lane)};
    case Format::q2_k: {
        const uint8_t pair = header[2 * half + (group / 4 * lanes + lane) * 4 + group % 4];
        return {scale * float(pair & 15), -half_at(header + half, lane) * float(pair >> 4)};
    }
    case Format::q4_k:
    case Format::q5_k: {
        const uint8_t *pair = header + 2 * half + group * 2 * lanes + lane;
        return {scale * pair[0], -half_at(header + half, lane) * pair[lanes]};
    }
    case Format::q3_k:
    case Format::q6_k:
    case Format::iq4_xs:
        return {scale * int8_t(header[half + group * lanes + lane]), 0.0f};
    default:
        return {scale, 0.0f};
    }
}

// Bits of a plane whose words have `width` bits of a column.
struct Bits {
    int byte, shift;
};

constexpr Bits bits_at(int width, int lane, int j) {
    const int columns = 32 / width;
    return {(j / columns * lanes + lane) * 4 + j % 4, j % columns / 4 * width};
}

// Where the low and the high bits of column j of a unit lie, from its first chunk on.
template <class Body> void each_plane(const Packing &packing, int lane, int j, const Body &body) {
    const int low = packing.low_bits, high = packing.high_bits;
    const int chunk = high ? 32 / high : 32 / low;
    const int low_bytes = chunk * low / 8 * lanes, chunk_bytes = chunk * (low + high) / 8 * lanes;
    const int start = j / chunk * chunk_bytes;
    const Bits place = bits_at(low, lane, j % chunk);
    body(start + place.byte, place.shift, 0, low);
    if (high) {
        const Bits above = bits_at(high, lane, j % chunk);
        body(start + low_bytes + above.byte, above.shift, low, high);
    }
}

// One lane of a plane, whose words have `width` bits of a column: see bits_at.
template <int width, int from, int columns>
void pack_plane(const uint64_t *codes, uint8_t *plane, int lane) {
    constexpr int eights = 4 / width; // of a word
    constexpr uint64_t kept = ((1 << width) - 1) * every_byte;
    for (int word = 0; word < columns / eight_columns / eights; ++word, codes += eights) {
        uint32_t bits = 0;
        for (int n = 0; n < eights; ++n) {
            const uint64_t own = codes[n] >> from & kept;
            bits |= uint32_t(own | own >> (32 - width)) << (2 * n * width);
        }
        std::memcpy(plane + (word * lanes + lane) * 4, &bits, 4);
    }
}

template <Format format>
const uint8_t *pack_coded_row(int cols, const uint8_t *source, uint8_t *block, int lane) {
    constexpr Packing packing = packing_of(format);
    constexpr int low = packing.low_bits, high = packing.high_bits;
    constexpr int chunk = high ? 32 / high : packing.unit;
    for (int col = 0; col < cols; col += packing.unit) {
        put_header<format>(source, block, lane);
        constexpr int num_eights = packing.unit / eight_columns;
        uint64_t codes[num_eights];
        for (int k = 0; k < num_eights; ++k) {
            codes[k] = stored_codes<format>(source, k);
        }
        uint8_t *planes = block + packing.header_bytes;
        for (int j = 0; j < packing.unit; j += chunk) {
            pack_plane<low, 0, chunk>(codes + j / eight_columns, planes, lane);
            planes += chunk * low / 8 * lanes;
            if constexpr (high != 0) {
                pack_plane<high, low, chunk>(codes + j / eight_columns, planes, lane);
                planes += chunk * high / 8 * lanes;
            }
        }
        source += stored_bytes(format);
        block += block_bytes(format, packing.unit);
    }
    return source;
}

// Q8_0 as it is, for sums of floats, or as int8.
const uint8_t *pack_q8_0_row(Format format, int cols, const uint8_t *source, uint8_t *group,
                             int lane) {
    for (int col = 0; col < cols; col += quantized_group) {
        put_half(group, lane, source);
        source += 2;
        group += 2 * lanes;
        if (format == Format::q8_0) {
            for (int j = 0; j < quantized_group; ++j) {
                group[j * lanes + lane] = source[j];
            }
        } else {
            for (int j = 0; j < quantized_group; j += 4) {
                uint32_t four;
                std::memcpy(&four, source + j, 4);
                four ^= 0x80808080; // 128 more
                std::memcpy(group + (j / 4 * lanes + lane) * 4, &four, 4);
            }
        }
        source += quantized_group;
        group += quantized_group * lanes;
    }
    return source;
}

template <size_t i = 0>
const uint8_t *pack_coded(Format format, int cols, const uint8_t *source, uint8_t *block,
                          int lane) {
    if constexpr (i < std::size(coded_formats)) {
        return format == coded_formats[i]
                   ? pack_coded_row<coded_formats[i]>(cols, source, block, lane)
                   : pack_coded<i + 1>(format, cols, source, block, lane);
    }
    return source;
}

} // namespace

const uint8_t *pack_gguf_row(Format format, int cols, const uint8_t *source, uint8_t *block,
                             int lane) {
    if (packing_of(format).unit == 0) {
        return pack_q8_0_row(format, cols, source, block, lane);
    }
    return pack_coded(format, cols, source, block, lane);
}

float gguf_number(Format format, const uint8_t *block, int lane, int col) {
    if (format == Format::q8_0) {
        const uint8_t *group = block + col / quantized_group * block_bytes(format, quantized_group);
        const auto steps = int8_t(group[(2 + col % quantized_group) * lanes + lane]);
        return half_at(group, lane) * float(steps);
    }
    const Packing packing = packing_of(format);
    const uint8_t *header = block + col / packing.unit * block_bytes(format, packing.unit);
    const int j = col % packing.unit;
    int code = 0;
    each_plane(packing, lane, j, [&](int byte, int shift, int from, int width) {
        code |= (header[packing.header_bytes + byte] >> shift & ((1 << width) - 1)) << from;
    });
    const Scale scale = scale_at(format, header, lane, j / packing.group);
    const int steps = packing.table ? packing.table[code] : code - packing.zero;
    return scale.scale * float(steps) + scale.minimum;
}

} // namespace headrace
