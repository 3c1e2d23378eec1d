// Qwen3-Next's gated delta net: see GatedDeltaNetSpec.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

// Grow the workspace for the delta nets of a model. Throws std::bad_alloc.
void find_delta_room(Model &model, int num_tokens);

// sublayer = out(delta net of normed); the sequences' states go from slot to slot.
void run_gated_delta_net(StepState &state, const Layer &layer);

} // namespace headrace
