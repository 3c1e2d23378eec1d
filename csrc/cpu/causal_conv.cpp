#include "cpu/causal_conv.h"
#include "cpu/short_conv.h"

#include <algorithm>

namespace headrace {

namespace {

// The column of the token that is `back` tokens, 1 or more, before a chunk's first. Null where the
// sequence begins there.
const float *column_before(const StepState &s, const CausalConv &conv, int sequence, int back) {
    const int slot = s.step.state_in[sequence];
    if (slot < 0) {
        return nullptr;
    }
    const float *columns = s.model.states.slot(slot) + conv.state_offset;
    return columns + size_t(conv.kernel_size - 1 - back) * conv.channels;
}

} // namespace

int chunk_tokens_before(const Step &step, int token, int most) {
    int count = 0;
    while (count < most && token > count &&
           step.sequences[token - count - 1] == step.sequences[token]) {
        ++count;
    }
    return count;
}

bool ends_chunk(const Step &step, int token) {
    return token + 1 == step.num_tokens || step.sequences[token + 1] != step.sequences[token];
}

void convolve_silu(const StepState &s, const CausalConv &conv, int token, float *out) {
    const int sequence = s.step.sequences[token], last = conv.kernel_size - 1;
    const int in_chunk = chunk_tokens_before(s.step, token, last);
    ConvTap taps[max_conv_kernel];
    int num_taps = 0;
    for (int back = last; back >= 0; --back) {
        const float *weight = conv.weights + size_t(last - back) * conv.channels;
        if (back <= in_chunk) {
            const float *x = conv.x + size_t(token - back) * conv.stride;
            taps[num_taps++] = {weight, x, nullptr};
        } else if (const float *x = column_before(s, conv, sequence, back - in_chunk)) {
            taps[num_taps++] = {weight, x, nullptr};
        }
    }
    s.model.kernels->convolve_silu(taps, num_taps, conv.bias, conv.multiplier, conv.channels, out);
}

void write_columns(const StepState &s, const CausalConv &conv, int token) {
    const int sequence = s.step.sequences[token], num_columns = conv.kernel_size - 1;
    const int in_chunk = 1 + chunk_tokens_before(s.step, token, num_columns);
    float *out = s.model.states.slot(s.step.state_out[sequence]) + conv.state_offset;
    for (int back = num_columns; back > 0; --back, out += conv.channels) {
        if (back <= in_chunk) {
            std::copy_n(conv.x + size_t(token + 1 - back) * conv.stride, conv.channels, out);
        } else if (const float *x = column_before(s, conv, sequence, back - in_chunk)) {
            std::copy_n(x, conv.channels, out);
        } else {
            std::fill_n(out, conv.channels, 0.0f);
        }
    }
}

} // namespace headrace
