// Conversions between fp32 and the 16-bit formats, one number at a time.
#pragma once
#include <cstdint>
#include <cstring>

namespace headrace {

inline float from_bits(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

inline uint32_t to_bits(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    return bits;
}

inline float from_bf16(uint16_t bits) {
    return from_bits(uint32_t(bits) << 16);
}

// Rounds to nearest, ties to even. A NaN stays one. Loops of it, and of the next, become vectors.
inline uint16_t to_bf16(float number) {
    const uint32_t bits = to_bits(number);
    const bool is_nan = int32_t(bits & 0x7fffffff) > 0x7f800000;
    return uint16_t((is_nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_fp16(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t magnitude = uint32_t(half & 0x7fff) << 13;
    // Moved into place the exponent is 112 too small; the product fixes it, subnormals included.
    const uint32_t finite = to_bits(from_bits(magnitude) * 0x1p112f);
    const uint32_t infinity = (half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0; // or a NaN
    return from_bits(sign | finite | infinity);
}

// 2^(byte - 128).
inline float half_power_of_two(uint8_t byte) {
    return from_bits(byte < 2 ? 0x200000u << byte : (byte - 1u) << 23);
}

// Of a number >= 0, to nearest, ties to even; at most the largest finite one.
inline uint16_t to_fp16(float number) {
    const uint32_t bits = to_bits(number * 0x1p-112f); // from_fp16 backwards
    const uint32_t half = (bits + 0xfff + (bits >> 13 & 1)) >> 13;
    return half < 0x7c00 ? uint16_t(half) : uint16_t(0x7bff);
}

} // namespace headrace
