// Units of bf12 by vectors. Each file that includes this has it for its own target, so it comes
// below the file's pragma, and nothing in it is shared.
#pragma once
#include "cpu/operands.h"

namespace headrace {

namespace {

constexpr int unit_pairs = bf12_cols / 2;
constexpr int bf16_unit_bytes = bf12_numbers * 2;
constexpr int bf12_ahead = 768; // to prefetch, in each block

// A pair of columns of a block.
struct Pair {
    __m512i both;

    __m512 first() const { return _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)); }
    __m512 second() const {
        return _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))));
    }
};

const Bf12Header &header_of(const uint8_t *block, int u) {
    return reinterpret_cast<const Bf12Header *>(block)[u];
}

// The high byte of each code: by the lower four bits of an index, which is all that counts.
__m512i table_of(const Bf12Header &header) {
    const __m512i signs = _mm512_set4_epi32(int(0x80808080), int(0x80808080), 0, 0);
    long long highs;
    std::memcpy(&highs, header.highs, 8);
    return _mm512_or_si512(_mm512_set1_epi64(highs), signs);
}

// The g-th four pairs of a unit. The permutation reads six bits of an index; the table repeats.
inline __attribute__((always_inline)) void unpack_four(const uint8_t *unit, int g, __m512i table,
                                                       Pair (&pairs)[4]) {
    const __m512i codes = _mm512_loadu_si512(unit + bf12_numbers + g * 64);
    const __m512i low = _mm512_loadu_si512(unit + g * 128);
    const __m512i high = _mm512_permutexvar_epi8(codes, table);
    const __m512i low2 = _mm512_loadu_si512(unit + g * 128 + 64);
    const __m512i high2 = _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, 4), table);
    pairs[0].both = _mm512_unpacklo_epi8(low, high);
    pairs[1].both = _mm512_unpackhi_epi8(low, high);
    pairs[2].both = _mm512_unpacklo_epi8(low2, high2);
    pairs[3].both = _mm512_unpackhi_epi8(low2, high2);
}

inline __attribute__((always_inline)) void load_four(const uint8_t *stored, int g,
                                                     Pair (&pairs)[4]) {
    for (int i = 0; i < 4; ++i) {
        pairs[i].both = _mm512_loadu_si512(stored + g * 256 + i * 64);
    }
}

void unpack_unit(const Bf12Header &header, const uint8_t *unit, uint8_t *out) {
    if (header.stored) {
        std::memcpy(out, header.stored, bf16_unit_bytes);
        return;
    }
    const __m512i table = table_of(header);
#pragma GCC unroll 4
    for (int g = 0; g < unit_pairs / 4; ++g) {
        Pair pairs[4];
        unpack_four(unit, g, table, pairs);
        for (int i = 0; i < 4; ++i) {
            _mm512_storeu_si512(out + g * 256 + i * 64, pairs[i].both);
        }
    }
}

} // namespace

} // namespace headrace
