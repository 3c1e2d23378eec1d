// What Gemma 3n and 4 have around their layers. Tokens have embeddings for each layer. There are
// further residuals beside the one that layers change, and a learned augmented residual.
//
// Every worker computes all of it but the embeddings, which one of them has.
#pragma once
#include "cpu/step_state.h"

namespace headrace {

// Grow the workspace. Throws std::bad_alloc.
GemmaRoom find_gemma_room(Model &model, int num_tokens);

// Behind the embeddings: those for each layer, and the further residuals.
void begin_residuals(StepState &state);

// residual = what a layer changes, where there are several. `normed` is scratch.
void predict_residuals(const StepState &state, int layer, int token);

// laurel = normed + norm(right . left . normed); `normed` is rounded for `left`.
void compute_laurel(StepState &state, const Layer &layer);

// residual = (residual + laurel) / sqrt(2)
void add_laurel(const StepState &state, int token);

// Whether anything follows the MLP of a layer.
bool has_more(const Model &model, const Layer &layer);

// Behind a layer's MLP: change the further residuals, and add the embeddings for the layer.
// `normed` is scratch.
void leave_layer(StepState &state, const Layer &layer, int index);

// residual = the mean of all residuals, of the tokens with logits.
void join_residuals(StepState &state);

// gated = act(cut gate(normed)) * up(normed): of a token's gates, only what is above a cut is left.
void multiply_cut_gates(StepState &state, const Layer &layer);

} // namespace headrace
