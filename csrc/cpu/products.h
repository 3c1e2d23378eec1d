// Products of activations with packed weights, cut into tasks.
#pragma once
#include "cpu/step_state.h"

#include <initializer_list>

namespace headrace {

struct Product { // out = x . weight + bias
    const Matrix &weight;
    const Activations &x;
    float *out;
    int out_stride;
    const std::vector<float> *bias; // null or empty: none
};

using Factors = std::initializer_list<const Matrix *>; // of the same width

// Round a row of `x` to what products with `weights` multiply: 8 or 16 bits, bf16 or both.
// Products take it for done: whoever computes a row rounds it in the same phase, while it is in
// the cache.
void round_activations(const StepState &state, const Activations &x, Factors weights, int row);

// One phase for all, which multiply the same `x`: their blocks are counted through.
void multiply(StepState &state, int rows, std::initializer_list<Product> products);

// gated = act(gate) * up, each task on what it has just computed, rounded for products with `next`.
// The gate's product is computed in the place of `gated`.
void multiply_gated(StepState &state, const Product &gate, const Product &up,
                    const Activations &gated, const Matrix &next);

// The step's logits, finished. Each task finds the largest of every 64 of those that it has just
// computed, while they are in its cache: [rows, num_blocks_of(tokens)] in `maxima`, if it is given.
void multiply_head(StepState &state, const Product &head, float *maxima);

} // namespace headrace
