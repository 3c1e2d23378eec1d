// A token's convolution is a function of the tokens of its chunk before it and of the state before
// the chunk. What it sees is the same number in both: chunks change no bits.
#include "cpu/short_conv.h"
#include "cpu/products.h"

#include <algorithm>

namespace headrace {

namespace {

// The state's column of the token that is `back` tokens, 1 or more, before a chunk's first. Null
// where the sequence begins there.
const float *column_before(const StepState &s, const Layer &layer, int sequence, int back) {
    const ShortConvConfig &conv = layer.config.short_conv;
    const int slot = s.step.state_in[sequence];
    if (slot < 0) {
        return nullptr;
    }
    const float *columns = s.model.states.slot(slot) + layer.state_offset;
    return columns + size_t(conv.kernel_size - 1 - back) * conv.channels;
}

// The tokens of its chunk before a token, at most `most`.
int chunk_tokens_before(const Step &step, int token, int most) {
    int count = 0;
    while (count < most && token > count &&
           step.sequences[token - count - 1] == step.sequences[token]) {
        ++count;
    }
    return count;
}

// c *= conv(b * x), of one token.
void convolve(const StepState &s, const Layer &layer, int token) {
    const ShortConvConfig &conv = layer.config.short_conv;
    const float *weights = layer.vectors[slot_conv].data();
    const std::vector<float> &bias = layer.vectors[slot_conv_bias];
    const int sequence = s.step.sequences[token], last = conv.kernel_size - 1;
    const int in_chunk = chunk_tokens_before(s.step, token, last);
    ConvTap taps[max_conv_kernel];
    int num_taps = 0;
    for (int back = last; back >= 0; --back) {
        const float *weight = weights + size_t(last - back) * conv.channels;
        if (back <= in_chunk) {
            const size_t at = size_t(token - back) * s.conv_stride;
            taps[num_taps++] = {weight, s.conv_x + at, s.conv_b + at};
        } else if (const float *x = column_before(s, layer, sequence, back - in_chunk)) {
            taps[num_taps++] = {weight, x, nullptr};
        }
    }
    s.model.kernels->convolve(taps, num_taps, bias.empty() ? nullptr : bias.data(), conv.channels,
                              s.convolved.row(token));
}

// Write the state behind the last token of a chunk.
void write_state(const StepState &s, const Layer &layer, int token) {
    const ShortConvConfig &conv = layer.config.short_conv;
    const int sequence = s.step.sequences[token], num_columns = conv.kernel_size - 1;
    const int in_chunk = 1 + chunk_tokens_before(s.step, token, num_columns);
    float *out = s.model.states.slot(s.step.state_out[sequence]) + layer.state_offset;
    for (int back = num_columns; back > 0; --back, out += conv.channels) {
        if (back <= in_chunk) {
            const size_t at = size_t(token + 1 - back) * s.conv_stride;
            s.model.kernels->multiply(s.conv_b + at, s.conv_x + at, conv.channels, out);
        } else if (const float *x = column_before(s, layer, sequence, back - in_chunk)) {
            std::copy_n(x, conv.channels, out);
        } else {
            std::fill_n(out, conv.channels, 0.0f);
        }
    }
}

bool ends_chunk(const Step &step, int token) {
    return token + 1 == step.num_tokens || step.sequences[token + 1] != step.sequences[token];
}

} // namespace

void run_short_conv(StepState &s, const Layer &layer) {
    StepClock &clock = s.model.pool.clock;
    const Matrix &out = layer.matrices[slot_out];
    const auto product = [&](MatrixSlot matrix, VectorSlot bias, float *to) {
        return Product{{layer.matrices[matrix], s.normed, &layer.vectors[bias]}, to, s.conv_stride};
    };
    clock.enter(StepPart::products);
    multiply(s, s.num_tokens,
             {product(slot_in_b, slot_in_b_bias, s.conv_b),
              product(slot_in_c, slot_in_c_bias, s.convolved.rows),
              product(slot_in_x, slot_in_x_bias, s.conv_x)});
    clock.enter(StepPart::rows);
    s.each_row([&](int token) {
        convolve(s, layer, token);
        if (ends_chunk(s.step, token)) {
            write_state(s, layer, token);
        }
        round_activations(s, s.convolved, {&out}, token);
    });
    clock.enter(StepPart::products);
    multiply(s, s.num_tokens,
             {{{out, s.convolved, &layer.vectors[slot_out_bias]}, s.sublayer, s.hidden_stride}});
}

} // namespace headrace
