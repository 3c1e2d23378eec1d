// How to read the packed blocks of GGUF's formats (matrix.h): scales, and codes in planes of bits.
//
// A number is scale * (code - zero), plus the minimum where there is one: see `Packing`. Codes are
// read one column at a time, as floats, or four columns of each lane at a time, as bytes.
#pragma once
#include "cpu/operands.h"

namespace headrace {

// A format's table, as floats and as bytes, which are 128 more.
template <Format format> struct Table {
    alignas(64) float numbers[16] = {};
    alignas(16) uint8_t bytes[16] = {};
    constexpr Table() {
        for (int i = 0; i < 16; ++i) {
            numbers[i] = packing_of(format).table[i];
            bytes[i] = uint8_t(packing_of(format).table[i] + 128);
        }
    }
};

template <class V, Format format> struct Codes {
    static constexpr Packing packing = packing_of(format);
    static constexpr int low_columns = 32 / packing.low_bits; // of a word
    static constexpr int chunk = packing.high_bits ? 32 / packing.high_bits : low_columns;
    static constexpr int high_place = chunk / low_columns * 64;
    static constexpr int chunk_bytes = high_place + (packing.high_bits ? 64 : 0);

    // Less `zero`; where there is a table, what it has.
    template <int zero> static typename V::Floats number(const uint8_t *chunk_start, int j) {
        constexpr int low = packing.low_bits, high = packing.high_bits;
        const uint8_t *words = chunk_start + j / low_columns * 64;
        if constexpr (packing.has_table()) {
            static constexpr Table<format> table;
            return V::number_in(table.numbers, words, j % low_columns);
        } else if constexpr (high == 0) {
            return V::template number<low, -zero>(words, j % low_columns);
        } else {
            return V::add(V::template number<low>(words, j % low_columns),
                          V::template number<high, -zero, 1 << low>(chunk_start + high_place, j));
        }
    }
    static typename V::Fours four(const uint8_t *chunk_start, int i) {
        constexpr int low = packing.low_bits, high = packing.high_bits;
        const uint8_t *words = chunk_start + i / (low_columns / 4) * 64;
        const auto bytes = V::template bits<low>(words, i % (low_columns / 4));
        if constexpr (packing.has_table()) {
            static constexpr Table<format> table;
            return V::fours(V::look_up(table.bytes, bytes));
        } else if constexpr (high == 0) {
            return V::fours(bytes);
        } else {
            const auto above = V::template bits<high, low>(chunk_start + high_place, i);
            return V::fours(V::either(bytes, above));
        }
    }
};

// Zero becomes minus zero.
template <class V> typename V::Floats minus(typename V::Floats x) {
    return V::sub(V::set(-0.0f), x);
}

// Scales of the g-th group of a unit. Their products are exact: of 11 and 8 bits at most. Stored
// minimums are subtracted.
template <class V> struct HalfScale {
    static constexpr bool has_minimum = false;
    HalfScale(const uint8_t *header, int) : scale(V::fp16(header)) {}
    typename V::Floats scale;
};

// Of Q4_0. Beside floats, its zero is a minimum: one operation less for each number.
template <class V> struct CenteredHalfScale {
    static constexpr bool has_minimum = true;
    CenteredHalfScale(const uint8_t *header, int)
        : scale(V::fp16(header)),
          minimum(V::mul(scale, V::set(-float(packing_of(Format::q4_0).zero)))) {}
    typename V::Floats scale, minimum;
};

template <class V> struct HalfScaleAndMinimum {
    static constexpr bool has_minimum = true;
    HalfScaleAndMinimum(const uint8_t *header, int)
        : scale(V::fp16(header)), minimum(V::fp16(header + 32)) {}
    typename V::Floats scale, minimum;
};

template <class V> struct BytePairs {
    static constexpr bool has_minimum = true;
    BytePairs(const uint8_t *header, int g)
        : scale(V::mul(V::fp16(header), V::uint8(header + 64 + g * 32))),
          minimum(V::mul(minus<V>(V::fp16(header + 32)), V::uint8(header + 80 + g * 32))) {}
    typename V::Floats scale, minimum;
};

template <class V> struct SignedBytes {
    static constexpr bool has_minimum = false;
    SignedBytes(const uint8_t *header, int g)
        : scale(V::mul(V::fp16(header), V::int8(header + 32 + g * 16))) {}
    typename V::Floats scale;
};

// Four pairs of nibbles in a word: a scale and, four columns on, its minimum.
template <class V> struct NibblePairs {
    static constexpr bool has_minimum = true;
    NibblePairs(const uint8_t *header, int g)
        : scale(V::mul(V::fp16(header), V::template number<4>(words(header, g), g % 4))),
          minimum(V::mul(minus<V>(V::fp16(header + 32)),
                         V::template number<4>(words(header, g), 4 + g % 4))) {}
    static const uint8_t *words(const uint8_t *header, int g) { return header + 64 + g / 4 * 64; }
    typename V::Floats scale, minimum;
};

// Half of a power of two.
template <class V> struct Exponent {
    static constexpr bool has_minimum = false;
    Exponent(const uint8_t *header, int) : scale(V::half_power(header)) {}
    typename V::Floats scale;
};

// As gemm.h and gemm_int16.h read blocks.
template <class V, Format format, template <class> class ScalesOf, int most_rows>
struct PackedBlock {
    using Code = Codes<V, format>;
    using Scales = ScalesOf<V>;
    static constexpr Packing packing = Code::packing;
    static constexpr int unit = packing.unit, group = packing.group, chunk = Code::chunk;
    static constexpr int header_bytes = packing.header_bytes, chunk_bytes = Code::chunk_bytes;
    static constexpr bool has_minimum = packing.zero == 0 && Scales::has_minimum; // with integers
    static constexpr int num_scales = Scales::has_minimum ? 2 : 1, max_rows = most_rows;

    static typename V::Floats row(const uint8_t *chunk_start, int j, const Scales &scales) {
        constexpr int zero = Scales::has_minimum ? 0 : packing.zero;
        const auto number = Code::template number<zero>(chunk_start, j);
        if constexpr (Scales::has_minimum) {
            return V::fma(scales.scale, number, scales.minimum);
        } else {
            return V::mul(scales.scale, number);
        }
    }
    static auto four(const uint8_t *chunk_start, int i) { return Code::four(chunk_start, i); }
    // What `zero` adds up to, times the numbers of a part of `x`.
    static auto start(const Int16Group &x, int part) {
        if constexpr (packing.zero == 0) {
            return V::dots(0);
        } else {
            return V::dots(x.offset_of(part, quantized_group / group) / (128 / packing.zero));
        }
    }
};

// Call body(a PackedBlock) of the format, if it is packed.
template <class V, class Body> void with_block(Format format, const Body &body) {
    switch (format) {
    case Format::q4_0:
        return body(PackedBlock<V, Format::q4_0, CenteredHalfScale, 1>{});
    case Format::q4_1:
        return body(PackedBlock<V, Format::q4_1, HalfScaleAndMinimum, 1>{});
    case Format::q4_k:
        return body(PackedBlock<V, Format::q4_k, BytePairs, 1>{});
    case Format::q6_k:
        return body(PackedBlock<V, Format::q6_k, SignedBytes, 1>{});
    case Format::q5_0:
        return body(PackedBlock<V, Format::q5_0, HalfScale, 0>{});
    case Format::q5_1:
        return body(PackedBlock<V, Format::q5_1, HalfScaleAndMinimum, 0>{});
    case Format::q5_k:
        return body(PackedBlock<V, Format::q5_k, BytePairs, 0>{});
    case Format::q2_k:
        return body(PackedBlock<V, Format::q2_k, NibblePairs, 0>{});
    case Format::q3_k:
        return body(PackedBlock<V, Format::q3_k, SignedBytes, 0>{});
    case Format::iq4_nl:
        return body(PackedBlock<V, Format::iq4_nl, HalfScale, 0>{});
    case Format::iq4_xs:
        return body(PackedBlock<V, Format::iq4_xs, SignedBytes, 0>{});
    case Format::mxfp4:
        return body(PackedBlock<V, Format::mxfp4, Exponent, 0>{});
    default:
        return;
    }
}

} // namespace headrace
