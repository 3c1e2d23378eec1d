// Sixteen lanes of fp32 as four vectors of NEON, for the kernels_neon files. These include it
// after they raise the target.
#pragma once
#include "cpu/kernels.h"

#include <arm_neon.h>

// A call that stays one would keep a tile's sums in memory, even if it is never made.
#define INLINED static inline __attribute__((always_inline))

namespace headrace {

namespace {

struct Neon {
    struct Floats {
        float32x4_t part[4];
    };
    static constexpr int max_sums = 6; // four of 32 registers each
    static constexpr int num_unpacked = 1;
    static constexpr int num_streams = 1;
    static constexpr int num_together = 1;
    static constexpr bool has_bf16 = false;
    static constexpr bool has_signed_bytes = false;

    template <class Body> INLINED Floats each(const Body &body) {
        return {{body(0), body(1), body(2), body(3)}};
    }
    INLINED Floats set(float x) {
        const float32x4_t same = vdupq_n_f32(x);
        return {{same, same, same, same}};
    }
    INLINED Floats load(const float *p) {
        return each([&](int i) { return vld1q_f32(p + 4 * i); });
    }
    INLINED void store(float *p, Floats x) {
        vst1q_f32(p, x.part[0]);
        vst1q_f32(p + 4, x.part[1]);
        vst1q_f32(p + 8, x.part[2]);
        vst1q_f32(p + 12, x.part[3]);
    }
    INLINED Floats add(Floats a, Floats b) {
        return each([&](int i) { return vaddq_f32(a.part[i], b.part[i]); });
    }
    INLINED Floats sub(Floats a, Floats b) {
        return each([&](int i) { return vsubq_f32(a.part[i], b.part[i]); });
    }
    INLINED Floats mul(Floats a, Floats b) {
        return each([&](int i) { return vmulq_f32(a.part[i], b.part[i]); });
    }
    INLINED Floats div(Floats a, Floats b) {
        return each([&](int i) { return vdivq_f32(a.part[i], b.part[i]); });
    }
    INLINED Floats inverse(Floats x) { return div(set(1.0f), x); }
    INLINED Floats fma(Floats a, Floats b, Floats c) {
        return each([&](int i) { return vfmaq_f32(c.part[i], a.part[i], b.part[i]); });
    }
    INLINED Floats fms(Floats a, Floats b, Floats c) {
        return each([&](int i) { return vfmaq_f32(vnegq_f32(c.part[i]), a.part[i], b.part[i]); });
    }
    // As x86 has it: the second, unless the first is larger. NEON's own maximum keeps NaN.
    INLINED float32x4_t larger(float32x4_t a, float32x4_t b) {
        return vbslq_f32(vcgtq_f32(a, b), a, b);
    }
    INLINED Floats max(Floats a, Floats b) {
        return each([&](int i) { return larger(a.part[i], b.part[i]); });
    }
    INLINED Floats min(Floats a, Floats b) {
        return each([&](int i) {
            return vbslq_f32(vcltq_f32(a.part[i], b.part[i]), a.part[i], b.part[i]);
        });
    }
    INLINED Floats round(Floats x) {
        return each([&](int i) { return vrndnq_f32(x.part[i]); });
    }
    INLINED Floats times_power_of_two(Floats x, Floats n) {
        return each([&](int i) {
            const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n.part[i]), vdupq_n_s32(127));
            return vmulq_f32(x.part[i], vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
        });
    }
    INLINED Floats zero_below(Floats x, float limit, Floats y) {
        return each([&](int i) {
            const uint32x4_t below = vcltq_f32(x.part[i], vdupq_n_f32(limit));
            return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y.part[i]), below));
        });
    }
    // In the order of AVX2's and AVX-512's.
    INLINED float sum(Floats x) {
        const float32x4_t four =
            vaddq_f32(vaddq_f32(x.part[0], x.part[2]), vaddq_f32(x.part[1], x.part[3]));
        const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
    }
    INLINED float highest(Floats x) {
        const float32x4_t four = larger(larger(x.part[0], x.part[2]), larger(x.part[1], x.part[3]));
        const float32x4_t two = larger(four, vextq_f32(four, four, 2));
        const float first = vgetq_lane_f32(two, 0), second = vgetq_lane_f32(two, 1);
        return first > second ? first : second;
    }

    struct Ints {
        int32x4_t part[4];
    };
    template <class Body> INLINED Ints each_int(const Body &body) {
        return {{body(0), body(1), body(2), body(3)}};
    }
    INLINED Floats to_floats(Ints x) {
        return each([&](int i) { return vcvtq_f32_s32(x.part[i]); });
    }
    INLINED Ints to_steps(Floats x) {
        return each_int([&](int i) { return vcvtq_s32_f32(x.part[i]); });
    }
    INLINED Ints steps(int32_t x) {
        const int32x4_t same = vdupq_n_s32(x);
        return {{same, same, same, same}};
    }
    INLINED Ints times(Ints a, Ints b) {
        return each_int([&](int i) { return vmulq_s32(a.part[i], b.part[i]); });
    }
    INLINED Ints plus(Ints a, Ints b) {
        return each_int([&](int i) { return vaddq_s32(a.part[i], b.part[i]); });
    }

    // Two columns of four lanes each, in 16 bits.
    static constexpr int fixed16_rows = 4, fixed16_blocks = 1;
    struct Pairs {
        int16x8_t part[4];
    };
    INLINED void hold(Ints &) {}
    INLINED Pairs load_pairs(const uint8_t *p) {
        const auto *numbers = reinterpret_cast<const int16_t *>(p);
        return {{vld1q_s16(numbers), vld1q_s16(numbers + 8), vld1q_s16(numbers + 16),
                 vld1q_s16(numbers + 24)}};
    }
    INLINED int16x8_t same_pair(int32_t pair) { return vreinterpretq_s16_s32(vdupq_n_s32(pair)); }
    INLINED void add_pairs(Ints &sum, int16x8_t x, const Pairs &weights) {
        for (int i = 0; i < 4; ++i) {
            const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(weights.part[i]));
            const int32x4_t high = vmull_high_s16(x, weights.part[i]);
            sum.part[i] = vaddq_s32(sum.part[i], vpaddq_s32(low, high));
        }
    }
    INLINED void store_int16(int16_t *p, Floats x) {
        for (int i = 0; i < 4; ++i) {
            vst1_s16(p + 4 * i, vmovn_s32(vcvtnq_s32_f32(x.part[i])));
        }
    }

    static constexpr int panel_rows = 0, scaled_rows = 0;
    // Four sums of a lane, one for each column of four.
    struct Dots {
        int32x4_t lane[lanes];
    };
    INLINED Ints to_steps(const Dots &x) {
        return each_int([&](int i) {
            const int32x4_t *four = x.lane + 4 * i;
            return vpaddq_s32(vpaddq_s32(four[0], four[1]), vpaddq_s32(four[2], four[3]));
        });
    }
    INLINED Floats to_floats(const Dots &x) { return to_floats(to_steps(x)); }
    INLINED void store_steps(Int16Group &group, int first, Floats x) {
        for (int i = 0; i < 4; ++i) {
            const int16x4_t steps = vmovn_s32(vcvtq_s32_f32(x.part[i]));
            vst1_u8(group.numbers + 2 * first + 8 * i, vreinterpret_u8_s16(steps));
        }
    }
    INLINED Dots dots(int32_t x) {
        Dots result;
        for (int32x4_t &lane : result.lane) {
            lane = vsetq_lane_s32(x, vdupq_n_s32(0), 0);
        }
        return result;
    }
    // Four columns of two lanes each, in 16 bits.
    struct Fours {
        int16x8_t pair[lanes / 2];
    };
    struct Bytes {
        uint8x16_t part[4];
    };
    template <class Body> INLINED Bytes each_bytes(const Body &body) {
        return {{body(0), body(1), body(2), body(3)}};
    }
    INLINED Bytes bytes(const uint8_t *p) {
        return each_bytes([&](int i) { return vld1q_u8(p + 16 * i); });
    }
    INLINED Fours fours(Bytes x) {
        Fours result;
        for (int i = 0; i < 4; ++i) {
            result.pair[2 * i] = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x.part[i])));
            result.pair[2 * i + 1] = vreinterpretq_s16_u16(vmovl_high_u8(x.part[i]));
        }
        return result;
    }
    INLINED Fours weights(const uint8_t *p) { return fours(bytes(p)); }
    INLINED Dots dot(Dots sum, const Fours &weights, const Int16Group &x, int k) {
        const uint8x8_t numbers = vld1_u8(x.numbers + 2 * k);
        const int16x8_t twice = vreinterpretq_s16_u8(vcombine_u8(numbers, numbers));
        for (int i = 0; i < lanes / 2; ++i) {
            int32x4_t *lane = sum.lane + 2 * i;
            lane[0] = vmlal_s16(lane[0], vget_low_s16(weights.pair[i]), vget_low_s16(twice));
            lane[1] = vmlal_high_s16(lane[1], weights.pair[i], twice);
        }
        return sum;
    }
    // Of each byte of the words at `p`, the i-th `width` bits, moved to `place`.
    template <int width, int place = 0> INLINED Bytes bits(const uint8_t *p, int i) {
        const int shift = i * width - place;
        const uint8x16_t mask = vdupq_n_u8(((1 << width) - 1) << place);
        return each_bytes([&](int part) {
            const uint32x4_t words = four_words(p + 16 * part);
            return vandq_u8(vreinterpretq_u8_u32(shift >= 0 ? words >> shift : words << -shift),
                            mask);
        });
    }
    INLINED Bytes either(Bytes a, Bytes b) {
        return each_bytes([&](int i) { return vorrq_u8(a.part[i], b.part[i]); });
    }
    INLINED Bytes look_up(const uint8_t *table, Bytes places) {
        const uint8x16_t bytes = vld1q_u8(table);
        return each_bytes([&](int i) { return vqtbl1q_u8(bytes, places.part[i]); });
    }

    INLINED uint32x4_t four_words(const uint8_t *p) { return vreinterpretq_u32_u8(vld1q_u8(p)); }
    INLINED Floats bf16_even(const uint8_t *p) {
        return each(
            [&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(four_words(p + 16 * i), 16)); });
    }
    INLINED Floats bf16_odd(const uint8_t *p) {
        const uint32x4_t mask = vdupq_n_u32(0xffff0000);
        return each(
            [&](int i) { return vreinterpretq_f32_u32(vandq_u32(four_words(p + 16 * i), mask)); });
    }
    INLINED Floats fp16(const uint8_t *p) {
        return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
    }
    INLINED uint32x4_t four_bytes(uint8x16_t bytes, int i) {
        const uint16x8_t eight = i < 2 ? vmovl_u8(vget_low_u8(bytes)) : vmovl_high_u8(bytes);
        return i % 2 == 0 ? vmovl_u16(vget_low_u16(eight)) : vmovl_high_u16(eight);
    }
    INLINED Ints int8_steps(const uint8_t *p) {
        const int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
        return each_int([&](int i) {
            const int16x8_t eight = i < 2 ? vmovl_s8(vget_low_s8(bytes)) : vmovl_high_s8(bytes);
            return i % 2 == 0 ? vmovl_s16(vget_low_s16(eight)) : vmovl_high_s16(eight);
        });
    }
    INLINED Ints uint8_steps(const uint8_t *p) {
        const uint8x16_t bytes = vld1q_u8(p);
        return each_int([&](int i) { return vreinterpretq_s32_u32(four_bytes(bytes, i)); });
    }
    INLINED Floats int8(const uint8_t *p) { return to_floats(int8_steps(p)); }
    INLINED Floats uint8(const uint8_t *p) { return to_floats(uint8_steps(p)); }
    // first + step * code, of `width` bits, of the j-th column of the words at `p`.
    template <int width, int first = 0, int step = 1>
    INLINED Floats number(const uint8_t *p, int j) {
        const int place = j % 4 * 8 + j / 4 * width;
        const uint32x4_t mask = vdupq_n_u32((1 << width) - 1);
        return each([&](int i) {
            const uint32x4_t code = vandq_u32(four_words(p + 16 * i) >> place, mask);
            if constexpr (first == 0 && step == 1) {
                return vcvtq_f32_u32(code);
            }
            return vfmaq_f32(vdupq_n_f32(first), vcvtq_f32_u32(code), vdupq_n_f32(step));
        });
    }
    // As table[code], of four bits.
    INLINED Floats number_in(const float *table, const uint8_t *p, int j) {
        const int place = j % 4 * 8 + j / 4 * 4;
        const uint8x16x4_t bytes = vld1q_u8_x4(reinterpret_cast<const uint8_t *>(table));
        return each([&](int i) {
            const uint32x4_t code = vandq_u32(four_words(p + 16 * i) >> place, vdupq_n_u32(15));
            const uint32x4_t places =
                vmlaq_u32(vdupq_n_u32(0x03020100), code, vdupq_n_u32(0x04040404));
            return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(places)));
        });
    }
    // 2^(byte - 128), whose exponent is 0 at the lowest two.
    INLINED Floats half_power(const uint8_t *p) {
        const uint8x16_t bytes = vld1q_u8(p);
        const int32x4_t one = vdupq_n_s32(1);
        return each([&](int i) {
            const int32x4_t four = vreinterpretq_s32_u32(four_bytes(bytes, i));
            const int32x4_t normal = vshlq_n_s32(vsubq_s32(four, one), 23);
            const int32x4_t lowest = vshlq_n_s32(vaddq_s32(four, one), 21);
            return vreinterpretq_f32_s32(vmaxq_s32(normal, lowest));
        });
    }
};

} // namespace

} // namespace headrace
