// Multi-token prediction, as DeepSeek V3 has it: a layer more, which drafts tokens.
//
// A token's hidden state is what the head sees of it. From that of the token at p, and the
// embedding of the one at p + 1, it predicts the one at p + 2. Hidden states lie in pages,
// where every step of the model writes them. So drafts need nothing but the pages that a text has.
// A draft's step has the tokens at p + 1 with the positions p, at which their keys and values lie,
// too.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

struct RowPlace {
    int page, row;
};

// Where the keys and values of a position are, in a token's sequence.
RowPlace place_of(const StepState &state, int token, int position);

// A norm without bias of numbers as many as the hidden size.
void plain_norm(const StepState &state, const std::vector<float> &weight, const float *x,
                float *out);

// residual = proj . [norm(residual), norm(hidden state at the token's position)]
void join_hidden(StepState &state);

// Write the hidden states of all tokens into pages, if a layer drafts from them. A draft's step
// writes those of tokens with logits, each in the place of the next token, which the model has yet
// to compute. `normed` is scratch.
void store_hidden(StepState &state);

// What the head sees of a token.
void head_input(const StepState &state, int token, float *out);

} // namespace headrace
