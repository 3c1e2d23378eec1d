// Mamba-2, a mixer whose state is a matrix per head: see Mamba2Spec.
//
// A head's recurrence runs token by token, heads and sequences beside each other: neither chunks
// nor batch mates change a bit.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

// Grow the workspace for the layers of a model. Throws std::bad_alloc.
void find_mamba2_room(Model &model, int num_tokens);

// sublayer = out(norm(ssm(conv(normed)) * silu(z(normed)))), `normed` rounded for the projections.
// The sequences' states go from slot to slot.
void run_mamba2(StepState &state, const Layer &layer);

} // namespace headrace
