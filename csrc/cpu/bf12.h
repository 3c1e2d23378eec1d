// bf16 in 12 bits, without loss: the exponents of neighbouring weights differ little.
//
// A unit is 32 columns of a block, 512 numbers. The low byte of each (the exponent's last bit and
// the mantissa) is stored as it is. The sign of the high byte is a bit. The upper seven bits of its
// exponent are three: a place in the unit's table of eight. Trained weights hardly ever have a
// ninth; such a unit lies elsewhere, as bf16. A step thus reads a quarter less memory. The idea of
// fewer bits for exponents is DFloat11's (arXiv 2504.11651), whose codes vary in length.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

constexpr int bf12_cols = 32; // of a unit
constexpr int bf12_numbers = 512;
constexpr int bf12_unit_bytes = bf12_numbers * 3 / 2;

// Of a unit; a block begins with those of all its units.
struct Bf12Header {
    uint8_t highs[8];      // high bytes without their sign
    const uint8_t *stored; // the unit as bf16, where eight do not suffice; else null
};

constexpr size_t bf12_header_bytes(int cols) {
    return (cols / bf12_cols * sizeof(Bf12Header) + 63) / 64 * 64;
}

// Place of the low byte of a unit's i-th number, in four vectors of two pairs of columns for each
// lane. So unpacking bytes of lows and highs yields the pairs in order. Its code is half the byte
// at the same place of 256, the lower half in a first and third vector.
constexpr int bf12_place(int i) {
    const int pair = i / 32, rest = i % 32;
    return pair / 2 * 64 + rest / 8 * 16 + pair % 2 * 8 + rest % 8;
}

// Pack a unit of bf16, [16 pairs][16 lanes][2], at `unit`. False: its exponents are too many.
bool pack_bf12(const uint16_t *numbers, Bf12Header &header, uint8_t *unit);

// The numbers of a lane of a unit, [32].
void bf12_lane(const Bf12Header &header, const uint8_t *unit, int lane, uint16_t *out);

} // namespace headrace
