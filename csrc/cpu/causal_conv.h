// A causal depthwise convolution with a silu, over the tokens of a chunk and the columns of the
// state before it. What a token sees is the same number in both: chunks change no bits.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

struct CausalConv {
    const float *x; // [tokens, stride]
    int stride, channels, kernel_size;
    const float *weights; // [kernel_size, channels], the oldest token's first
    const float *bias;    // null: none
    float multiplier;     // of x
    size_t state_offset;  // of [kernel_size - 1, channels] in a slot, the oldest token's first

    size_t state_numbers() const { return size_t(kernel_size - 1) * channels; }
};

// The tokens of its chunk before a token, at most `most`.
int chunk_tokens_before(const Step &step, int token, int most);

bool ends_chunk(const Step &step, int token);

// out = silu(bias + multiplier * conv(x)), of one token.
void convolve_silu(const StepState &state, const CausalConv &conv, int token, float *out);

// Write the columns behind the last token of a chunk.
void write_columns(const StepState &state, const CausalConv &conv, int token);

} // namespace headrace
