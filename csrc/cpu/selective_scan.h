// The recurrence of Mamba over one token, of channels beside each other.
#pragma once
#include "cpu/rows.h"

namespace headrace {

// after = exp(step * decay) * before + step * x . b, of [state_size, channels], where step is
// softplus(step + bias). out = c . after + skip * x.
struct ScanUpdate {
    const float *x, *steps; // [channels]
    const float *b, *c;     // [state_size]
    const float *bias, *skip;
    const float *decay;  // [state_size, channels], below 0
    const float *before; // likewise; null: zeros. It may be `after`.
    float *after;
    float *out;
    int channels, state_size;
    int first, end; // of the channels to update; `first` is a multiple of 16
};

// log(1 + e^x) = max(x, 0) + log(1 + u), u = e^-|x|, and log(1 + u) = 2 artanh(u / (2 + u)). The
// series of that ends below fp32: its argument is at most a third.
template <class V> typename V::Floats softplus(typename V::Floats x) {
    const auto zero = V::set(0.0f), positive = V::max(x, zero);
    const auto u = exp_of<V>(V::sub(V::sub(x, positive), positive));
    const auto s = V::div(u, V::add(V::set(2.0f), u)), square = V::mul(s, s);
    auto p = V::set(2.0f / 17);
    for (int i = 15; i > 0; i -= 2) {
        p = V::fma(p, square, V::set(2.0f / float(i)));
    }
    return V::fma(p, s, positive);
}

template <class V> void update_channels(const ScanUpdate &u) {
    for (int i = u.first; i < u.end; i += lanes) {
        const auto x = load_of<V>(u.x, i, u.channels);
        const auto step = softplus<V>(
            V::add(load_of<V>(u.steps, i, u.channels), load_of<V>(u.bias, i, u.channels)));
        const auto stepped = V::mul(step, x);
        auto sum = V::set(0.0f);
        for (int n = 0; n < u.state_size; ++n) {
            const size_t row = size_t(n) * u.channels;
            const auto before = u.before ? load_of<V>(u.before + row, i, u.channels) : V::set(0.0f);
            const auto kept = exp_of<V>(V::mul(step, load_of<V>(u.decay + row, i, u.channels)));
            const auto after = V::fma(stepped, V::set(u.b[n]), V::mul(before, kept));
            store_of<V>(u.after + row, i, u.channels, after);
            sum = V::fma(after, V::set(u.c[n]), sum);
        }
        const auto skip = load_of<V>(u.skip, i, u.channels);
        store_of<V>(u.out, i, u.channels, V::fma(x, skip, sum));
    }
}

} // namespace headrace
