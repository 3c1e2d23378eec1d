// LFM2's gated short convolution: see ShortConvSpec.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

// sublayer = out(c * conv(b * x)) of normed; the sequences' states go from slot to slot.
void run_short_conv(StepState &state, const Layer &layer);

} // namespace headrace
