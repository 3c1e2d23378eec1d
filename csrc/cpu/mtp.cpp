#include "cpu/mtp.h"
#include "cpu/eagle.h"
#include "cpu/products.h"

#include <algorithm>

namespace headrace {

RowPlace place_of(const StepState &s, int token, int position) {
    const Step &step = s.step;
    const int32_t *pages = step.page_table + int64_t(step.sequences[token]) * step.max_pages;
    return {pages[position / s.config.page_tokens], position % s.config.page_tokens};
}

void plain_norm(const StepState &s, const std::vector<float> &weight, const float *x, float *out) {
    s.model.kernels->norm(x, weight.data(), s.config.hidden_size, s.config.norm_eps,
                          s.config.layer_norm != 0, out);
}

void join_hidden(StepState &s) {
    if (s.config.eagle != Eagle::none) {
        join_tapped(s);
        return;
    }
    const Matrix &proj = s.model.mtp_proj;
    const int size = s.config.hidden_size;
    s.each_row([&](int token) {
        const auto [page, row] = place_of(s, token, s.step.positions[token]);
        float *joined = s.joined.row(token), *hidden = s.normed.row(token);
        s.model.kv.load_hidden(page, row, hidden);
        plain_norm(s, s.model.mtp_embed_norm, s.residual + size_t(token) * s.hidden_stride, joined);
        plain_norm(s, s.model.mtp_hidden_norm, hidden, joined + size);
        round_activations(s, s.joined, {&proj}, token);
    });
    s.model.pool.clock.enter(StepPart::products);
    multiply(s, s.num_tokens, {{{proj, s.joined, nullptr}, s.residual, s.hidden_stride}});
    s.model.pool.clock.enter(StepPart::rows);
}

void store_hidden(StepState &s) {
    if (s.model.drafter) {
        store_tapped(s);
    }
    if (s.config.num_mtp_layers == 0) {
        return;
    }
    const bool is_draft = s.step.is_draft != 0;
    s.each_row(is_draft ? s.step.num_logit_rows : s.num_tokens, [&](int i) {
        const int token = is_draft ? s.step.logit_rows[i] : i;
        const int position = s.step.positions[token] + is_draft;
        const auto [page, row] = place_of(s, token, position);
        if (s.config.eagle != Eagle::none) {
            s.model.kv.store_hidden(s.residual + size_t(token) * s.hidden_stride, page, row);
            return;
        }
        head_input(s, token, s.normed.row(token));
        s.model.kv.store_hidden(s.normed.row(token), page, row);
    });
}

void head_input(const StepState &s, int token, float *out) {
    const float *x = s.residual + size_t(token) * s.hidden_stride;
    const bool has_own = s.step.is_draft && s.config.eagle == Eagle::none;
    const auto &weight = has_own ? s.model.mtp_norm : s.model.norm;
    if (weight.empty()) {
        std::copy_n(x, s.config.hidden_size, out);
        return;
    }
    plain_norm(s, weight, x, out);
    if (!s.step.is_draft && !s.model.norm_bias.empty()) {
        s.model.kernels->add(s.model.norm_bias.data(), 1.0f, s.config.hidden_size, out);
    }
}

} // namespace headrace
