#include "cpu/kernels.h"
#include "cpu/numbers.h"

#include <cmath>

namespace headrace {

namespace {

// Plain loops over sixteen lanes: right everywhere, and as fast as the compiler makes them.
struct Portable {
    struct Floats {
        float lane[lanes];
    };
    struct Dots {
        int32_t lane[lanes];
    };
    struct Fours {
        uint8_t byte[4 * lanes];
    };
    static constexpr int max_sums = 2; // four of SSE's 16 registers each
    static constexpr int num_unpacked = 1;
    static constexpr int num_streams = 1;
    static constexpr int num_together = 1;
    static constexpr bool has_bf16 = false;
    static constexpr bool has_signed_bytes = false;

    template <class Body> static Floats each(const Body &body) {
        Floats result;
        for (int i = 0; i < lanes; ++i) {
            result.lane[i] = body(i);
        }
        return result;
    }
    static Floats set(float x) {
        return each([&](int) { return x; });
    }
    static Floats load(const float *p) {
        return each([&](int i) { return p[i]; });
    }
    static void store(float *p, const Floats &x) { std::memcpy(p, x.lane, sizeof x.lane); }
    static Floats add(const Floats &a, const Floats &b) {
        return each([&](int i) { return a.lane[i] + b.lane[i]; });
    }
    static Floats sub(const Floats &a, const Floats &b) {
        return each([&](int i) { return a.lane[i] - b.lane[i]; });
    }
    static Floats mul(const Floats &a, const Floats &b) {
        return each([&](int i) { return a.lane[i] * b.lane[i]; });
    }
    static Floats div(const Floats &a, const Floats &b) {
        return each([&](int i) { return a.lane[i] / b.lane[i]; });
    }
    static Floats inverse(const Floats &x) { return div(set(1.0f), x); }
    static Floats fma(const Floats &a, const Floats &b, const Floats &c) { // rounds twice
        return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
    }
    static Floats fms(const Floats &a, const Floats &b, const Floats &c) {
        return each([&](int i) { return a.lane[i] * b.lane[i] - c.lane[i]; });
    }
    static Floats max(const Floats &a, const Floats &b) {
        return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
    }
    static Floats min(const Floats &a, const Floats &b) {
        return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
    }
    static Floats round(const Floats &x) {
        return each([&](int i) { return std::nearbyintf(x.lane[i]); });
    }
    static Floats times_power_of_two(const Floats &x, const Floats &n) {
        return each(
            [&](int i) { return x.lane[i] * from_bits(uint32_t(int(n.lane[i]) + 127) << 23); });
    }
    static Floats zero_below(const Floats &x, float limit, const Floats &y) {
        return each([&](int i) { return x.lane[i] < limit ? 0.0f : y.lane[i]; });
    }
    static float sum(const Floats &x) {
        float total = 0.0f;
        for (float lane : x.lane) {
            total += lane;
        }
        return total;
    }
    static float highest(const Floats &x) {
        float result = x.lane[0];
        for (float lane : x.lane) {
            result = lane > result ? lane : result;
        }
        return result;
    }

    using Ints = Dots;
    static constexpr int panel_rows = 0, scaled_rows = 0;
    template <class Body> static Ints each_int(const Body &body) {
        Ints result;
        for (int i = 0; i < lanes; ++i) {
            result.lane[i] = body(i);
        }
        return result;
    }
    static Ints to_steps(const Dots &x) { return x; }
    static Ints to_steps(const Floats &x) {
        return each_int([&](int i) { return int32_t(x.lane[i]); });
    }
    static Ints steps(int32_t x) {
        return each_int([&](int) { return x; });
    }
    static Ints int8_steps(const uint8_t *p) {
        return each_int([&](int i) { return int8_t(p[i]); });
    }
    static Ints uint8_steps(const uint8_t *p) {
        return each_int([&](int i) { return p[i]; });
    }
    static Ints times(const Ints &a, const Ints &b) {
        return each_int([&](int i) { return a.lane[i] * b.lane[i]; });
    }
    static Ints plus(const Ints &a, const Ints &b) {
        return each_int([&](int i) { return a.lane[i] + b.lane[i]; });
    }
    static Floats to_floats(const Ints &x) {
        return each([&](int i) { return float(x.lane[i]); });
    }
    static void store_steps(Int16Group &group, int first, const Floats &x) {
        for (int i = 0; i < lanes; ++i) {
            const auto number = int16_t(x.lane[i]);
            std::memcpy(group.numbers + 2 * (first + i), &number, 2);
        }
    }
    static constexpr int fixed16_rows = 2, fixed16_blocks = 1;
    struct Pairs {
        int16_t number[2 * lanes];
    };
    static void hold(Ints &) {}
    static Pairs load_pairs(const uint8_t *p) {
        Pairs pairs;
        std::memcpy(pairs.number, p, sizeof pairs.number);
        return pairs;
    }
    static Pairs same_pair(int32_t pair) {
        Pairs pairs;
        for (int i = 0; i < lanes; ++i) {
            std::memcpy(pairs.number + 2 * i, &pair, 4);
        }
        return pairs;
    }
    static void add_pairs(Ints &sum, const Pairs &x, const Pairs &weights) {
        for (int i = 0; i < 2 * lanes; ++i) {
            sum.lane[i / 2] += x.number[i] * weights.number[i];
        }
    }
    static void store_int16(int16_t *p, const Floats &x) {
        for (int i = 0; i < lanes; ++i) {
            p[i] = int16_t(std::nearbyintf(x.lane[i]));
        }
    }
    static Dots dots(int32_t x) { return steps(x); }
    template <class Body> static Fours each_byte(const Body &body) {
        Fours result;
        for (int i = 0; i < 4 * lanes; ++i) {
            result.byte[i] = uint8_t(body(i));
        }
        return result;
    }
    static Fours weights(const uint8_t *p) {
        return each_byte([&](int i) { return p[i]; });
    }
    static Dots dot(Dots sum, const Fours &weights, const Int16Group &x, int k) {
        int16_t numbers[4];
        std::memcpy(numbers, x.numbers + 2 * k, 8);
        for (int i = 0; i < 4 * lanes; ++i) {
            sum.lane[i / 4] += weights.byte[i] * numbers[i % 4];
        }
        return sum;
    }
    // Of each byte of the words at `p`, the i-th `width` bits, moved to `place`.
    using Bytes = Fours;
    template <int width, int place = 0> static Bytes bits(const uint8_t *p, int i) {
        return each_byte(
            [&](int k) { return (p[k] >> (i * width) & ((1 << width) - 1)) << place; });
    }
    static Bytes either(const Bytes &a, const Bytes &b) {
        return each_byte([&](int k) { return a.byte[k] | b.byte[k]; });
    }
    static Bytes look_up(const uint8_t *table, const Bytes &places) {
        return each_byte([&](int k) { return table[places.byte[k]]; });
    }
    static Fours fours(const Bytes &bytes) { return bytes; }

    static uint32_t word(const uint8_t *p, int i) {
        uint32_t result;
        std::memcpy(&result, p + 4 * i, 4);
        return result;
    }
    static Floats bf16_even(const uint8_t *p) {
        return each([&](int i) { return from_bits(word(p, i) << 16); });
    }
    static Floats bf16_odd(const uint8_t *p) {
        return each([&](int i) { return from_bits(word(p, i) & 0xffff0000); });
    }
    static Floats fp16(const uint8_t *p) {
        return each([&](int i) {
            uint16_t half;
            std::memcpy(&half, p + 2 * i, 2);
            return from_fp16(half);
        });
    }
    static Floats int8(const uint8_t *p) { return to_floats(int8_steps(p)); }
    static Floats uint8(const uint8_t *p) { return to_floats(uint8_steps(p)); }
    // first + step * code, of `width` bits, of the j-th column of the words at `p`.
    template <int width, int first = 0, int step = 1>
    static Floats number(const uint8_t *p, int j) {
        const int place = j % 4 * 8 + j / 4 * width;
        return each([&](int i) {
            return float(first + step * int(word(p, i) >> place & ((1 << width) - 1)));
        });
    }
    // As table[code], of four bits.
    static Floats number_in(const float *table, const uint8_t *p, int j) {
        const int place = j % 4 * 8 + j / 4 * 4;
        return each([&](int i) { return table[word(p, i) >> place & 15]; });
    }
    static Floats half_power(const uint8_t *p) {
        return each([&](int i) { return half_power_of_two(p[i]); });
    }
};

} // namespace

const Kernels portable_kernels = kernels_over<Portable>(Isa::portable);

} // namespace headrace
