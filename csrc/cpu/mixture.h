// The MLP of a layer that is a mixture of experts.
//
// Each token's router scores pick its experts. (token, slot) pairs are sorted by expert, so that a
// product reads the weights of each chosen expert once. A row's product has the same bits among any
// others. A token's experts are added in the order of its choice: no sum knows of other tokens.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

// Grow the workspace for the mixtures of a model. Throws std::bad_alloc.
void find_mixture_room(Model &model, int num_tokens);

// sublayer = mixture(normed), of this worker's experts and its part of the shared MLP. `normed` is
// rounded for the gates.
void run_mixture(StepState &state, const Layer &layer);

} // namespace headrace
