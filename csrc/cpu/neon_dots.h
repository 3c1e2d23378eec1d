// As neon_vectors.h, where the processor multiplies four bytes by four: for activations of 8 or 16
// bits. The target is then Armv8.2 with `dotprod`.
#pragma once
#include "cpu/neon_vectors.h"

namespace headrace {

namespace {

// A number of `x` is 256 * high + low, both signed bytes: all high ones of a group come first.
struct NeonDot : Neon {
    static constexpr int num_streams = 2;
    static constexpr int num_together = 2;
    // Both factors are signed: of bytes that are 128 more than the weight, 128 is taken away.
    static constexpr bool has_signed_bytes = true;

    struct Dots {
        Ints high, low;
    };
    struct Fours {
        int8x16_t part[4];
    };
    INLINED Dots dots(int32_t start) { return {steps(0), steps(start)}; }
    using Neon::to_floats;
    using Neon::to_steps;
    INLINED Ints to_steps(const Dots &x) {
        return each_int(
            [&](int i) { return vaddq_s32(vshlq_n_s32(x.high.part[i], 8), x.low.part[i]); });
    }
    INLINED Floats to_floats(const Dots &x) { return to_floats(to_steps(x)); }
    INLINED void store_steps(Int16Group &group, int first, Floats x) {
        int16x4_t high[4], low[4];
        for (int i = 0; i < 4; ++i) {
            const int32x4_t steps = vcvtq_s32_f32(x.part[i]);
            high[i] = vshrn_n_s32(vaddq_s32(steps, vdupq_n_s32(128)), 8);
            low[i] = vmovn_s32(steps);
        }
        for (int i = 0; i < 4; i += 2) {
            uint8_t *numbers = group.numbers + first + 4 * i;
            vst1_u8(numbers, bytes_of(high[i], high[i + 1]));
            vst1_u8(numbers + quantized_group, bytes_of(low[i], low[i + 1]));
        }
    }
    INLINED uint8x8_t bytes_of(int16x4_t first, int16x4_t second) {
        return vreinterpret_u8_s8(vmovn_s16(vcombine_s16(first, second)));
    }
    INLINED int8x16_t less_128(uint8x16_t bytes) {
        return vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(128)));
    }
    INLINED Fours fours(Bytes x) {
        return {{vreinterpretq_s8_u8(x.part[0]), vreinterpretq_s8_u8(x.part[1]),
                 vreinterpretq_s8_u8(x.part[2]), vreinterpretq_s8_u8(x.part[3])}};
    }
    INLINED Fours weights(const uint8_t *p) {
        return {{less_128(vld1q_u8(p)), less_128(vld1q_u8(p + 16)), less_128(vld1q_u8(p + 32)),
                 less_128(vld1q_u8(p + 48))}};
    }
    INLINED Bytes look_up(const uint8_t *table, Bytes places) {
        const uint8x16_t numbers = vreinterpretq_u8_s8(less_128(vld1q_u8(table)));
        return each_bytes([&](int i) { return vqtbl1q_u8(numbers, places.part[i]); });
    }
    INLINED Ints add_dot(Ints sum, Fours weights, const uint8_t *four) {
        int32_t numbers;
        std::memcpy(&numbers, four, 4);
        const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(numbers));
        return {{vdotq_s32(sum.part[0], weights.part[0], x),
                 vdotq_s32(sum.part[1], weights.part[1], x),
                 vdotq_s32(sum.part[2], weights.part[2], x),
                 vdotq_s32(sum.part[3], weights.part[3], x)}};
    }
    INLINED Dots dot(Dots sum, Fours weights, const Int16Group &x, int k) {
        return {add_dot(sum.high, weights, x.numbers + k),
                add_dot(sum.low, weights, x.numbers + quantized_group + k)};
    }
};

// The low byte alone of each number.
struct NeonByteDot : NeonDot {
    using Dots = Ints;
    INLINED Dots dots(int32_t start) { return steps(start); }
    using Neon::to_floats;
    using Neon::to_steps;
    INLINED Ints to_steps(Ints x) { return x; }
    INLINED Dots dot(Dots sum, Fours weights, const Int16Group &x, int k) {
        return add_dot(sum, weights, x.numbers + quantized_group + k);
    }
};

} // namespace

} // namespace headrace
