// Products of activations with packed weights, cut into tasks.
#pragma once
#include "cpu/step_state.h"

#include <initializer_list>

namespace headrace {

struct Linear { // x . weight + bias
    const Matrix &weight;
    const Activations &x;
    const std::vector<float> *bias; // null or empty: none
};

struct Product : Linear {
    float *out; // [tokens, stride]
    int stride;

    float *at(int row, int block) const { return out + size_t(row) * stride + block * lanes; }
};

using Factors = std::initializer_list<const Matrix *>; // of the same width

// Round a row of `x` to what products with `weights` multiply: 8 or 16 bits, bf16 or both.
// Products assume that this is done: the code that computes a row rounds it in the same phase,
// while it is in the cache.
void round_activations(const StepState &state, const Activations &x, Factors weights, int row);

// One phase for all, which multiply the same `x`: their blocks are counted through.
void multiply(StepState &state, int rows, std::initializer_list<Product> products);

// Floats that a thread needs for gates of so many tokens.
size_t room_for_gates(int num_tokens);

// gated = act(gate) * up, each task on what it has just computed, rounded for products with `next`.
// Unread values are not written, and gates leave no core's cache.
void multiply_gated(StepState &state, const Linear &gate, const Linear &up,
                    const Activations &gated, const Matrix &next);

// The step's logits, finished. Each task finds the largest of every 64 that it has just computed,
// while they are in its cache. They are [rows, num_blocks_of(tokens)] in `maxima`, if it is given.
void multiply_head(StepState &state, const Product &head, float *maxima);

} // namespace headrace
