// Operations on one token's row. Each is the same code for every row, so a row's result never
// depends on its batch.
#pragma once
#include "cpu/math.h"
#include "cpu/operands.h"

#include <cmath>

namespace headrace {

// Numbers [i, i + 16) of a row of n, `fill` behind its end.
template <class V> typename V::Floats load_of(const float *x, int i, int n, float fill = 0.0f) {
    if (i + lanes <= n) {
        return V::load(x + i);
    }
    float rest[lanes];
    for (int lane = 0; lane < lanes; ++lane) {
        rest[lane] = i + lane < n ? x[i + lane] : fill;
    }
    return V::load(rest);
}

// The same, the other way.
template <class V> void store_of(float *x, int i, int n, typename V::Floats numbers) {
    if (i + lanes <= n) {
        V::store(x + i, numbers);
        return;
    }
    float rest[lanes];
    V::store(rest, numbers);
    std::memcpy(x + i, rest, (n - i) * sizeof(float));
}

// The sum of term(sixteen numbers) over a row, which goes on with numbers whose term is zero. Four
// sums for each lane run beside each other: an addition waits for the one before.
template <class V, class Term> float sum_of(const float *x, int n, float fill, const Term &term) {
    constexpr int chains = 4;
    typename V::Floats sums[chains];
    for (auto &sum : sums) {
        sum = V::set(0.0f);
    }
    for (int i = 0; i < n; i += chains * lanes) {
#pragma GCC unroll 4
        for (int c = 0; c < chains; ++c) {
            sums[c] = term(load_of<V>(x, i + c * lanes, n, fill), sums[c]);
        }
    }
    return V::sum(V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3])));
}

// The sum of (x - mean) squared.
template <class V> float squares_of(const float *x, int n, float mean) {
    return sum_of<V>(x, n, mean, [mean](auto numbers, auto sum) {
        const auto off = V::sub(numbers, V::set(mean));
        return V::fma(off, off, sum);
    });
}

// The largest size of `n` numbers.
template <class V> float largest_of(const float *x, int n) {
    const auto zero = V::set(0.0f);
    auto sizes = zero;
    for (int i = 0; i < n; i += lanes) {
        const auto numbers = load_of<V>(x, i, n);
        sizes = V::max(sizes, V::max(numbers, V::sub(zero, numbers)));
    }
    return V::highest(sizes);
}

// out = x / rms(x) * weight, or (x - mean) / std * weight for a LayerNorm. May be in place.
template <class V>
void norm_row(const float *x, const float *weight, int n, float eps, bool layer_norm, float *out) {
    const auto add = [](auto numbers, auto sum) { return V::add(sum, numbers); };
    const float mean = layer_norm ? sum_of<V>(x, n, 0.0f, add) / float(n) : 0.0f;
    const float scale = 1.0f / std::sqrt(squares_of<V>(x, n, mean) / float(n) + eps);
    for (int i = 0; i < n; i += lanes) {
        const auto off = V::sub(load_of<V>(x, i, n), V::set(mean));
        const auto scaled = V::mul(off, V::set(scale));
        store_of<V>(out, i, n, V::mul(scaled, load_of<V>(weight, i, n)));
    }
}

// sum += multiplier * x
template <class V> void add_row(const float *x, float multiplier, int n, float *sum) {
    for (int i = 0; i < n; i += lanes) {
        const auto before = load_of<V>(sum, i, n);
        store_of<V>(sum, i, n, V::fma(V::set(multiplier), load_of<V>(x, i, n), before));
    }
}

// out = x * y
template <class V> void multiply_elements(const float *x, const float *y, int n, float *out) {
    for (int i = 0; i < n; i += lanes) {
        store_of<V>(out, i, n, V::mul(load_of<V>(x, i, n), load_of<V>(y, i, n)));
    }
}

// What a causal convolution sees of one token: x, or gate * x.
struct ConvTap {
    const float *weight, *x, *gate; // null: it is x
};

// out *= bias + the sum of weight * tap over the taps, in their order. Null: no bias.
template <class V>
void convolve_row(const ConvTap *taps, int num_taps, const float *bias, int n, float *out) {
    for (int i = 0; i < n; i += lanes) {
        auto sum = bias ? load_of<V>(bias, i, n) : V::set(0.0f);
        for (const ConvTap *tap = taps; tap < taps + num_taps; ++tap) {
            auto x = load_of<V>(tap->x, i, n);
            x = tap->gate ? V::mul(load_of<V>(tap->gate, i, n), x) : x;
            sum = V::fma(load_of<V>(tap->weight, i, n), x, sum);
        }
        store_of<V>(out, i, n, V::mul(load_of<V>(out, i, n), sum));
    }
}

// out = silu(bias + multiplier * the sum of weight * x over the taps, in their order). No gates.
template <class V>
void convolve_silu_row(const ConvTap *taps, int num_taps, const float *bias, float multiplier,
                       int n, float *out) {
    for (int i = 0; i < n; i += lanes) {
        auto sum = V::set(0.0f);
        for (const ConvTap *tap = taps; tap < taps + num_taps; ++tap) {
            sum = V::fma(load_of<V>(tap->weight, i, n), load_of<V>(tap->x, i, n), sum);
        }
        const auto added = bias ? load_of<V>(bias, i, n) : V::set(0.0f);
        store_of<V>(out, i, n, silu<V>(V::fma(V::set(multiplier), sum, added)));
    }
}

// out *= sigmoid(gate)
template <class V> void sigmoid_gate_row(const float *gate, int n, float *out) {
    for (int i = 0; i < n; i += lanes) {
        const auto e = exp_of<V>(V::sub(V::set(0.0f), load_of<V>(gate, i, n)));
        store_of<V>(out, i, n, V::div(load_of<V>(out, i, n), V::add(V::set(1.0f), e)));
    }
}

// out = factor * x
template <class V> void scale_row(const float *x, float factor, int n, float *out) {
    for (int i = 0; i < n; i += lanes) {
        store_of<V>(out, i, n, V::mul(load_of<V>(x, i, n), V::set(factor)));
    }
}

// Rotate the first 2 * num_pairs numbers of one head, in place.
template <class V>
void rotate(float *head, int num_pairs, bool interleaved, const float *cos, const float *sin) {
    if (interleaved) {
        for (int i = 0; i < num_pairs; ++i, head += 2) {
            const float x = head[0], y = head[1];
            head[0] = x * cos[i] - y * sin[i];
            head[1] = y * cos[i] + x * sin[i];
        }
        return;
    }
    float *other = head + num_pairs;
    for (int i = 0; i < num_pairs; i += lanes) {
        const auto x = load_of<V>(head, i, num_pairs), y = load_of<V>(other, i, num_pairs);
        const auto c = load_of<V>(cos, i, num_pairs), s = load_of<V>(sin, i, num_pairs);
        store_of<V>(head, i, num_pairs, V::fms(x, c, V::mul(y, s)));
        store_of<V>(other, i, num_pairs, V::fma(y, c, V::mul(x, s)));
    }
}

// Store a key in its place; see kv_pages.h. Nothing is written but that: a neighbor's may be at the
// same time.
template <class V> void store_key(const HeadPlace &place, const float *key) {
    const int n = place.head_dim;
    if (place.format == Format::f32) {
        float *keys = reinterpret_cast<float *>(place.key);
        for (int d = 0; d < n; ++d) {
            keys[d * lanes] = key[d];
        }
        return;
    }
    for (int d = 0; d < n; d += lanes) {
        float numbers[lanes];
        V::store(numbers, load_of<V>(key, d, n));
        uint16_t halves[lanes];
        for (int lane = 0; lane < lanes; ++lane) {
            halves[lane] = to_bf16(numbers[lane]);
        }
        uint8_t *pairs = place.key + d / 2 * lanes * 4;
        for (int lane = 0; lane < lanes && lane < n - d; lane += 2) {
            std::memcpy(pairs + lane / 2 * lanes * 4, halves + lane, 4);
        }
    }
}

// The same of a value.
template <class V> void store_value(const HeadPlace &place, const float *value) {
    const int n = place.head_dim;
    for (int d = 0; d < n; d += lanes) {
        uint8_t *numbers = place.value + d / lanes * place.value_block;
        const int count = n - d < lanes ? n - d : lanes;
        if (place.format == Format::f32) {
            store_of<V>(reinterpret_cast<float *>(numbers), 0, count, load_of<V>(value, d, n));
            continue;
        }
        for (int lane = 0; lane < count; ++lane) {
            const uint16_t half = to_bf16(value[d + lane]);
            std::memcpy(numbers + lane * 4, &half, 2);
        }
    }
}

// Store what there are places for.
template <class V> void store_head(const HeadPlace &place, const float *key, const float *value) {
    if (place.key) {
        store_key<V>(place, key);
    }
    store_value<V>(place, value);
}

} // namespace headrace
