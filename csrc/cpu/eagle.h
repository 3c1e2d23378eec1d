// EAGLE-3: a model of one layer, which drafts tokens from what enters three layers of another.
//
// A step of the other model writes fc . [the three inputs] of each token into the drafter's pages,
// as its hidden state. The drafter's layer attends by [norm(embedding of the next token),
// norm(hidden state)] and adds to the hidden state. Positions, and where further drafts find their
// hidden states, are those of mtp.h.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

// Keep what enters a layer, if the drafter reads it.
void tap(StepState &state, int index);

// Write the hidden states of all tokens into the drafter's pages. `sublayer` is scratch.
void store_tapped(StepState &state);

// joined = [norm(residual), norm(hidden state)], and residual = the hidden state, or its norm.
void join_tapped(StepState &state);

} // namespace headrace
