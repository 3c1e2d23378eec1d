// Mamba, a mixer whose state is a vector per channel: see MambaSpec.
//
// A channel's recurrence runs token by token, channels and sequences beside each other: neither
// chunks nor batch mates change a bit.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

// Grow the workspace for the layers of a model. Throws std::bad_alloc.
void find_mamba_room(Model &model, int num_tokens);

// sublayer = out(scan(conv(x(normed))) * silu(z(normed))), `normed` rounded for the projections.
// The sequences' states go from slot to slot.
void run_mamba(StepState &state, const Layer &layer);

} // namespace headrace
