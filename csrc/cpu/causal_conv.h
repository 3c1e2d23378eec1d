// A causal depthwise convolution over a step's tokens, behind the states of their sequences.
//
// A token's sum is a function of the tokens of its chunk before it and of the state before the
// chunk. What it sees is the same number in both: chunks change no bits.
#pragma once
#include "cpu/step_state.h"

#include <algorithm>

namespace headrace {

constexpr int max_conv_kernel = 16; // tokens

struct CausalConv {
    const float *weights; // [kernel_size, channels], the weight of the oldest token first
    const float *x;       // [tokens, stride], what is convolved
    int stride, channels, kernel_size;
    size_t state_offset; // of its columns in a slot, [kernel_size - 1, channels], the oldest first
    const float *bias = nullptr; // null: none
    float multiplier = 1.0f;     // of the sum, without its bias
    const float *gate = nullptr; // [tokens, stride], what multiplies x; null: none

    const float *row(int token) const { return x + size_t(token) * stride; }
    const float *gate_row(int token) const {
        return gate ? gate + size_t(token) * stride : nullptr;
    }

    // The state's column of the token that is `back` tokens, 1 or more, before a chunk's first.
    // Null where the sequence begins there.
    const float *column_before(const StepState &s, int sequence, int back) const {
        const int slot = s.step.state_in[sequence];
        if (slot < 0) {
            return nullptr;
        }
        const float *columns = s.model.states.slot(slot) + state_offset;
        return columns + size_t(kernel_size - 1 - back) * channels;
    }

    // The tokens of its chunk before a token, at most `most`.
    static int chunk_tokens_before(const Step &step, int token, int most) {
        int count = 0;
        while (count < most && token > count &&
               step.sequences[token - count - 1] == step.sequences[token]) {
            ++count;
        }
        return count;
    }

    static bool ends_chunk(const Step &step, int token) {
        return token + 1 == step.num_tokens || step.sequences[token + 1] != step.sequences[token];
    }

    // Whether a written state covers a token, and none behind it.
    static bool ends_state(const Step &step, int token) {
        return step.state_ends ? token + 1 == step.state_ends[step.sequences[token]]
                               : ends_chunk(step, token);
    }

    size_t state_numbers() const { return size_t(kernel_size - 1) * channels; }

    // What a token's sum is of, the oldest first. Returns how many.
    int taps_of(const StepState &s, int token, ConvTap (&taps)[max_conv_kernel]) const {
        const int sequence = s.step.sequences[token], last = kernel_size - 1;
        const int in_chunk = chunk_tokens_before(s.step, token, last);
        int num_taps = 0;
        for (int back = last; back >= 0; --back) {
            const float *weight = weights + size_t(last - back) * channels;
            if (back <= in_chunk) {
                taps[num_taps++] = {weight, row(token - back), gate_row(token - back)};
            } else if (const float *before = column_before(s, sequence, back - in_chunk)) {
                taps[num_taps++] = {weight, before, nullptr};
            }
        }
        return num_taps;
    }

    // out = silu(bias + multiplier * the weighted sum of a token and of those before it); no gate.
    void convolve(const StepState &s, int token, float *out) const {
        ConvTap taps[max_conv_kernel];
        const int num_taps = taps_of(s, token, taps);
        s.model.kernels->convolve_silu(taps, num_taps, bias, multiplier, channels, out);
    }

    // Write the state behind a token.
    void write_state(const StepState &s, int token) const {
        const int sequence = s.step.sequences[token], num_columns = kernel_size - 1;
        const int in_chunk = 1 + chunk_tokens_before(s.step, token, num_columns);
        float *out = s.model.states.slot(s.step.state_out[sequence]) + state_offset;
        for (int back = num_columns; back > 0; --back, out += channels) {
            if (back <= in_chunk) {
                write_column(s, token + 1 - back, out);
            } else if (const float *before = column_before(s, sequence, back - in_chunk)) {
                std::copy_n(before, channels, out);
            } else {
                std::fill_n(out, channels, 0.0f);
            }
        }
    }

private:
    void write_column(const StepState &s, int token, float *out) const {
        if (gate) {
            s.model.kernels->multiply(gate_row(token), row(token), channels, out);
        } else {
            std::copy_n(row(token), channels, out);
        }
    }
};

struct Chunk { // a sequence's tokens in the step
    int first_token, num_tokens, sequence;
    int num_covered; // by the state that is written
};

inline std::vector<Chunk> chunks_of(const Step &step) {
    std::vector<Chunk> chunks;
    for (int i = 0; i < step.num_tokens; ++i) {
        if (i == 0 || step.sequences[i - 1] != step.sequences[i]) {
            chunks.push_back({i, 0, step.sequences[i], 0});
        }
        ++chunks.back().num_tokens;
        if (CausalConv::ends_state(step, i)) {
            chunks.back().num_covered = chunks.back().num_tokens;
        }
    }
    return chunks;
}

} // namespace headrace
