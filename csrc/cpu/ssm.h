// The recurrence of a state space model over one token of one head of Mamba-2.
#pragma once
#include "cpu/rows.h"

namespace headrace {

// after = decay * before + step * x . b, of [state_size, head_dim]; out = c . after + skip * x.
struct SsmUpdate {
    const float *x;     // [head_dim]
    const float *b, *c; // [state_size]
    float decay, step, skip;
    const float *before; // null: zeros. It may be `after`.
    float *after;
    float *out; // [head_dim]
    int head_dim, state_size;
};

// Columns from `first` on, as many as the vectors have. Each has a sum of its own, over the state.
template <class V, int vectors> void update_ssm_columns(const SsmUpdate &u, int first) {
    const int n = u.head_dim;
    typename V::Floats stepped[vectors], sums[vectors];
    for (int v = 0; v < vectors; ++v) {
        stepped[v] = V::mul(load_of<V>(u.x, first + v * lanes, n), V::set(u.step));
        sums[v] = V::set(0.0f);
    }
    const auto decay = V::set(u.decay);
    for (int i = 0; i < u.state_size; ++i) {
        const auto b = V::set(u.b[i]), c = V::set(u.c[i]);
        const size_t row = size_t(i) * n;
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            const int at = first + v * lanes;
            const auto before = u.before ? load_of<V>(u.before + row, at, n) : V::set(0.0f);
            const auto after = V::fma(stepped[v], b, V::mul(before, decay));
            store_of<V>(u.after + row, at, n, after);
            sums[v] = V::fma(after, c, sums[v]);
        }
    }
    for (int v = 0; v < vectors; ++v) {
        const int at = first + v * lanes;
        store_of<V>(u.out, at, n, V::fma(load_of<V>(u.x, at, n), V::set(u.skip), sums[v]));
    }
}

template <class V> void update_ssm(const SsmUpdate &u) {
    constexpr int together = 4; // sums that run beside each other
    int first = 0;
    for (; first + together * lanes <= u.head_dim; first += together * lanes) {
        update_ssm_columns<V, together>(u, first);
    }
    for (; first < u.head_dim; first += lanes) {
        update_ssm_columns<V, 1>(u, first);
    }
}

} // namespace headrace
