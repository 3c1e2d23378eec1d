// LFM2's gated short convolution: see ShortConvSpec.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

constexpr int max_conv_kernel = 16; // tokens

// sublayer = out(c * conv(b * x)) of normed; the sequences' states go from slot to slot.
void run_short_conv(StepState &state, const Layer &layer);

} // namespace headrace
