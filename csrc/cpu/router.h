// Which experts a token goes to, and with which weights, from its router's logits.
#pragma once
#include "cpu/model.h"

namespace headrace {

// Write the experts of one token and their weights, the best first; among equals, the lower index
// is better. Experts are distinct for any logits, NaN included. `selection_bias` may be null;
// `scratch` has room for two numbers per expert.
void choose_experts(const MixtureConfig &config, const float *logits, const float *selection_bias,
                    float *scratch, int32_t *experts, float *weights);

} // namespace headrace
