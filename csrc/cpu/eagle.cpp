#include "cpu/eagle.h"
#include "cpu/mtp.h"
#include "cpu/products.h"

#include <algorithm>

namespace headrace {

void tap(StepState &s, int index) {
    const auto &tapped = s.model.tapped;
    const int size = s.config.hidden_size;
    for (int part = 0; s.model.drafter && part < num_tapped; ++part) {
        if (tapped[part] == index) {
            s.each_row([&](int token) {
                const float *x = s.residual + size_t(token) * s.hidden_stride;
                std::copy_n(x, size, s.joined.row(token) + size_t(part) * size);
            });
        }
    }
}

void store_tapped(StepState &s) {
    const Matrix &fc = s.model.drafter->mtp_proj;
    s.each_row([&](int token) { round_activations(s, s.joined, {&fc}, token); });
    s.model.pool.clock.enter(StepPart::products);
    multiply(s, s.num_tokens, {{{fc, s.joined, nullptr}, s.sublayer, s.hidden_stride}});
    s.model.pool.clock.enter(StepPart::rows);
    s.each_row([&](int token) {
        const RowPlace place = place_of(s, token, s.step.positions[token]);
        const float *hidden = s.sublayer + size_t(token) * s.hidden_stride;
        s.model.drafter->kv.store_hidden(hidden, place.page, place.row);
    });
}

void join_tapped(StepState &s) {
    const Layer &layer = s.model.layers[s.first_layer];
    const int size = s.config.hidden_size;
    s.each_row([&](int token) {
        const RowPlace place = place_of(s, token, s.step.positions[token]);
        float *x = s.residual + size_t(token) * s.hidden_stride;
        float *joined = s.joined.row(token), *normed = joined + size;
        plain_norm(s, layer.vectors[slot_attn_norm], x, joined);
        s.model.kv.load_hidden(place.page, place.row, x);
        plain_norm(s, s.model.mtp_hidden_norm, x, normed);
        if (s.config.eagle == Eagle::normed) {
            std::copy_n(normed, size, x);
        }
        const Matrix *of = layer.matrices;
        round_activations(s, s.joined, {of + slot_q, of + slot_k, of + slot_v}, token);
    });
}

} // namespace headrace
