// Products of activations with packed weights, cut into tasks.
#pragma once
#include "cpu/step_state.h"

#include <initializer_list>

namespace headrace {

struct Product { // out = x . weight + bias
    const Matrix &weight;
    const float *x;
    int x_stride;
    float *out;
    int out_stride;
    const std::vector<float> *bias; // null or empty: none
};

// One phase for all, which multiply the same `x`: their blocks are counted through.
void multiply(StepState &state, int rows, std::initializer_list<Product> products);

// gate = act(gate) * up, each task on what it has just computed.
void multiply_gated(StepState &state, const Product &gate, const Product &up);

// The step's logits, finished. Each task finds the largest of every 64 of those that it has just
// computed, while they are in its cache: [rows, num_blocks_of(tokens)] in `maxima`, if it is given.
void multiply_head(StepState &state, const Product &head, float *maxima);

} // namespace headrace
