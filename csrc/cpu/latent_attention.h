// Multi-head latent attention: see LatentAttentionSpec.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

// sublayer = o(attention(normed)); the tokens' latents go to their pages.
void run_latent_attention(StepState &state, int index);

} // namespace headrace
