// Attention of a whole batch: queries, keys and values in, attended values out.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

// What the queries of later tokens are multiplied by, as in transformers' Llama4TextAttention.
float temperature(const LayerConfig &layer, int position);

// Normalize and rotate q and k of every token; store keys and values in their pages.
void store_keys_and_values(StepState &state, int layer);

// attended = softmax(queries . keys) . values, over the pages of each token's sequence.
void attend(StepState &state, int layer);

} // namespace headrace
