// How to read the packed blocks of GGUF's formats (matrix.h): scales, and codes in planes of bits.
//
// A number is scale * (code - zero) + sign * minimum, see `Packing`. Codes are read one column at a
// time, as floats, or four columns of each lane at a time, as bytes.
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

// What 128 adds up to as `zero` of a code.
template <class V> int32_t offset_of_128(int32_t offset) {
    return V::has_signed_bytes ? 0 : offset;
}

// Scales of the g-th group of a unit. Their products are exact: of 11 and 8 bits at most.
template <class V> struct HalfScale {
    static constexpr int sign = 0;
    HalfScale(const uint8_t *header, int) : scale(V::fp16(header)) {}
    typename V::Floats scale;
};

// Of Q4_0. Beside floats, its zero is a minimum: one operation less for each number.
template <class V> struct CenteredHalfScale {
    static constexpr int sign = 1;
    CenteredHalfScale(const uint8_t *header, int)
        : scale(V::fp16(header)),
          minimum(V::mul(scale, V::set(-float(packing_of(Format::q4_0).zero)))) {}
    typename V::Floats scale, minimum;
};

template <class V> struct HalfScaleAndMinimum {
    static constexpr int sign = 1;
    HalfScaleAndMinimum(const uint8_t *header, int)
        : scale(V::fp16(header)), minimum(V::fp16(header + 32)) {}
    typename V::Floats scale, minimum;
};

template <class V> typename V::Floats negated(typename V::Floats x) {
    return V::sub(V::set(0.0f), x);
}

// Scales of the groups are integers, of up to 8 bits, under one fp16 scale of the unit. Beside
// integers, so are the minima: floor * unit_floor.
template <class V> struct BytePairs {
    static constexpr int sign = -1;
    BytePairs(const uint8_t *header, int g)
        : steps(V::uint8_steps(header + 64 + g * 32)), floor(V::uint8(header + 80 + g * 32)),
          unit_scale(V::fp16(header)), unit_floor(negated<V>(V::fp16(header + 32))),
          scale(V::mul(unit_scale, V::to_floats(steps))),
          minimum(V::mul(V::fp16(header + 32), floor)) {}
    typename V::Ints steps;
    typename V::Floats floor, unit_scale, unit_floor, scale, minimum;
};

template <class V> struct SignedBytes {
    static constexpr int sign = 0;
    SignedBytes(const uint8_t *header, int g)
        : steps(V::int8_steps(header + 32 + g * 16)), unit_scale(V::fp16(header)),
          scale(V::mul(unit_scale, V::to_floats(steps))) {}
    typename V::Ints steps;
    typename V::Floats unit_scale, scale;
};

// Four pairs of nibbles in a word: a scale and, four columns on, its minimum.
template <class V> struct NibblePairs {
    static constexpr int sign = -1;
    NibblePairs(const uint8_t *header, int g)
        : floor(V::template number<4>(words(header, g), 4 + g % 4)), unit_scale(V::fp16(header)),
          unit_floor(negated<V>(V::fp16(header + 32))),
          minimum(V::mul(V::fp16(header + 32), floor)) {
        const auto numbers = V::template number<4>(words(header, g), g % 4);
        steps = V::to_steps(numbers);
        scale = V::mul(unit_scale, numbers);
    }
    static const uint8_t *words(const uint8_t *header, int g) { return header + 64 + g / 4 * 64; }
    typename V::Ints steps;
    typename V::Floats floor, unit_scale, unit_floor, scale, minimum;
};

// Half of a power of two.
template <class V> struct Exponent {
    static constexpr int sign = 0;
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
    static constexpr int sign = packing.zero == 0 ? Scales::sign : 0; // beside integers
    static constexpr int zero = packing.zero;
    static constexpr bool has_steps = packing.has_steps(); // scales of groups are integers
    static constexpr int num_scales = Scales::sign == 0 ? 1 : 2, max_rows = most_rows;

    static typename V::Floats row(const uint8_t *chunk_start, int j, const Scales &scales) {
        constexpr int sign = Scales::sign, zero = sign == 0 ? packing.zero : 0;
        const auto number = Code::template number<zero>(chunk_start, j);
        if constexpr (sign == 0) {
            return V::mul(scales.scale, number);
        } else if constexpr (sign > 0) {
            return V::fma(scales.scale, number, scales.minimum);
        } else {
            return V::fms(scales.scale, number, scales.minimum);
        }
    }
    static auto four(const uint8_t *chunk_start, int i) { return Code::four(chunk_start, i); }
    // What `zero` adds up to, times the numbers of a part of `x`.
    static auto start(const Int16Group &x, int part) {
        if constexpr (packing.zero == 0) {
            return V::dots(0);
        } else {
            const int32_t offset = x.offset_of(part, quantized_group / group);
            return V::dots(packing.zero == 128 ? offset_of_128<V>(offset)
                                               : offset / (128 / packing.zero));
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
