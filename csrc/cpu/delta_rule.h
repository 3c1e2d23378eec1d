// The gated delta rule of one head, token by token.
//
// Each token's state is decay * state + key x delta, where delta = beta * (value - what the decayed
// state has for the key). What is read of it for the query is the output. Columns of the state are
// independent of each other: sixteen go through all tokens of a chunk before the next ones do.
#pragma once
#include "cpu/rows.h"

#include <algorithm>

namespace headrace {

struct DeltaHead {
    const float *queries, *keys; // [tokens, key_stride], of key_dim numbers
    const float *decays, *betas; // [tokens, gate_stride], one number
    float *values;               // [tokens, value_stride]; become the outputs
    int key_stride, gate_stride, value_stride;
    int num_tokens, key_dim, value_dim;
    // [blocks of 16 columns, key_dim, columns], before the first token and behind the last. Null:
    // zeros.
    const float *before;
    float *state;
};

// Columns [first, first + lanes), of which there are fewer unless `is_whole`.
template <class V, bool is_whole> void delta_columns(const DeltaHead &head, int first) {
    using Floats = typename V::Floats;
    constexpr int chains = 4; // an addition waits for the one before
    const int width = is_whole ? lanes : head.value_dim - first, num_rows = head.key_dim;
    float *const state = head.state + size_t(first) * num_rows;
    const float *before = head.before ? head.before + size_t(first) * num_rows : state;
    if (!head.before) {
        std::fill_n(state, size_t(num_rows) * width, 0.0f);
    }
    for (int t = 0; t < head.num_tokens; ++t, before = state) {
        const float *key = head.keys + size_t(t) * head.key_stride;
        const float *query = head.queries + size_t(t) * head.key_stride;
        float *value = head.values + size_t(t) * head.value_stride + first;
        const Floats decay = V::set(head.decays[size_t(t) * head.gate_stride]);
        const Floats beta = V::set(head.betas[size_t(t) * head.gate_stride]);
        Floats sums[chains], outs[chains];
        for (int c = 0; c < chains; ++c) {
            sums[c] = outs[c] = V::set(0.0f);
        }
        const auto add_known = [&](int i, Floats &sum) {
            sum = V::fma(load_of<V>(before + size_t(i) * width, 0, width), V::set(key[i]), sum);
        };
        const auto update = [&](int i, Floats delta, Floats &out) {
            const auto old = load_of<V>(before + size_t(i) * width, 0, width);
            const auto row = V::fma(delta, V::set(key[i]), V::mul(old, decay));
            store_of<V>(state + size_t(i) * width, 0, width, row);
            out = V::fma(row, V::set(query[i]), out);
        };
        int i = 0;
        for (; i + chains <= num_rows; i += chains) {
#pragma GCC unroll 4
            for (int c = 0; c < chains; ++c) {
                add_known(i + c, sums[c]);
            }
        }
        for (; i < num_rows; ++i) {
            add_known(i, sums[0]);
        }
        const Floats known = V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3]));
        const Floats wrong = V::sub(load_of<V>(value, 0, width), V::mul(known, decay));
        const Floats delta = V::mul(wrong, beta);
        for (i = 0; i + chains <= num_rows; i += chains) {
#pragma GCC unroll 4
            for (int c = 0; c < chains; ++c) {
                update(i + c, delta, outs[c]);
            }
        }
        for (; i < num_rows; ++i) {
            update(i, delta, outs[0]);
        }
        store_of<V>(value, 0, width, V::add(V::add(outs[0], outs[1]), V::add(outs[2], outs[3])));
    }
}

template <class V> void apply_delta_rule(const DeltaHead &head) {
    int first = 0;
    for (; first + lanes <= head.value_dim; first += lanes) {
        delta_columns<V, true>(head, first);
    }
    if (first < head.value_dim) {
        delta_columns<V, false>(head, first);
    }
}

} // namespace headrace
