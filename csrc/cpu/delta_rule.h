// The gated delta rule of one head, token by token.
//
// A token's state is decay * state + key x delta, and delta is beta * (value - known). `known` is
// what the decayed state has for the key. The output is what the new one has for the query. Columns
// of the state are independent: sixteen go through all tokens of a chunk before the next ones do.
#pragma once
#include "cpu/rows.h"

namespace headrace {

struct DeltaHead {
    const float *queries, *keys; // [tokens, key_stride], of key_dim numbers
    const float *betas;          // [tokens, beta_stride], one number
    const float *decays;         // [tokens, decay_stride], one number or, `by_row`, of key_dim
    float *values;               // [tokens, value_stride]; become the outputs
    int key_stride, beta_stride, decay_stride, value_stride;
    bool by_row;
    int num_tokens, key_dim, value_dim;
    // [blocks of 16 columns, key_dim, columns], before the first token and behind the last. Null:
    // zeros.
    const float *before;
    float *state;

    // Begin so many tokens later.
    void skip(int tokens) {
        queries += size_t(tokens) * key_stride;
        keys += size_t(tokens) * key_stride;
        betas += size_t(tokens) * beta_stride;
        decays += size_t(tokens) * decay_stride;
        values += size_t(tokens) * value_stride;
    }
};

// The sum of what `term` adds for each row. Four sums run beside each other: an addition waits for
// the one before.
template <class V, class Term> typename V::Floats sum_over_rows(int num_rows, const Term &term) {
    constexpr int chains = 4;
    typename V::Floats sums[chains];
    for (auto &sum : sums) {
        sum = V::set(0.0f);
    }
    int row = 0;
    for (; row + chains <= num_rows; row += chains) {
#pragma GCC unroll 4
        for (int c = 0; c < chains; ++c) {
            sums[c] = term(row + c, sums[c]);
        }
    }
    for (; row < num_rows; ++row) {
        sums[0] = term(row, sums[0]);
    }
    return V::add(V::add(sums[0], sums[1]), V::add(sums[2], sums[3]));
}

// Columns from `first` on: sixteen, or `width`, fewer, unless `is_whole`.
template <class V, bool is_whole, bool by_row>
void delta_columns(const DeltaHead &head, int first) {
    using Floats = typename V::Floats;
    const int width = is_whole ? lanes : head.value_dim - first, num_rows = head.key_dim;
    float *const state = head.state + size_t(first) * num_rows;
    const float *before = head.before ? head.before + size_t(first) * num_rows : state;
    for (int i = 0; i < num_rows && !head.before; ++i) {
        store_of<V>(state + size_t(i) * width, 0, width, V::set(0.0f));
    }
    for (int t = 0; t < head.num_tokens; ++t, before = state) {
        const float *key = head.keys + size_t(t) * head.key_stride;
        const float *query = head.queries + size_t(t) * head.key_stride;
        float *value = head.values + size_t(t) * head.value_stride + first;
        const float *decays = head.decays + size_t(t) * head.decay_stride;
        const Floats beta = V::set(head.betas[size_t(t) * head.beta_stride]);
        const Floats known = sum_over_rows<V>(num_rows, [&](int i, Floats sum) {
            const float factor = by_row ? key[i] * decays[i] : key[i];
            return V::fma(load_of<V>(before + size_t(i) * width, 0, width), V::set(factor), sum);
        });
        const Floats decayed = by_row ? known : V::mul(known, V::set(decays[0]));
        const Floats wrong = V::sub(load_of<V>(value, 0, width), decayed);
        const Floats delta = V::mul(wrong, beta);
        const Floats read = sum_over_rows<V>(num_rows, [&](int i, Floats sum) {
            const auto old = load_of<V>(before + size_t(i) * width, 0, width);
            const auto row =
                V::fma(delta, V::set(key[i]), V::mul(old, V::set(decays[by_row ? i : 0])));
            store_of<V>(state + size_t(i) * width, 0, width, row);
            return V::fma(row, V::set(query[i]), sum);
        });
        store_of<V>(value, 0, width, read);
    }
}

template <class V, bool by_row> void delta_head(const DeltaHead &head) {
    int first = 0;
    for (; first + lanes <= head.value_dim; first += lanes) {
        delta_columns<V, true, by_row>(head, first);
    }
    if (first < head.value_dim) {
        delta_columns<V, false, by_row>(head, first);
    }
}

template <class V> void apply_delta_rule(const DeltaHead &head) {
    head.by_row ? delta_head<V, true>(head) : delta_head<V, false>(head);
}

} // namespace headrace
