// Products of activations with packed weights, cut into tasks.
#pragma once
#include "cpu/low_rank.h"
#include "cpu/step_state.h"

#include <functional>
#include <initializer_list>

namespace headrace {

struct Linear { // x . weight + bias
    const Matrix &weight;
    const Activations &x;
    const std::vector<float> *bias; // null or empty: none
    Shrunk shrunk{};                // of the phase; see shrink
    const uint8_t *tiles = nullptr; // x of the phase in bands (operands.h); null: there are none
    const uint8_t *bands = nullptr; // likewise, in bands of integers
    size_t slab_bytes = 0;          // of these
};

struct Product : Linear {
    float *out; // [tokens, stride]
    int stride;

    float *at(int row, int block) const { return out + size_t(row) * stride + block * lanes; }
};

// An MLP up to its last product: gated = act(gate) * up, or act(up) without a gate, rounded for
// products with `next`. Experts' weights are some blocks of a matrix, and meet some rows of the
// activations.
struct GatedProduct {
    Linear gate, up;
    const Activations &gated;
    const Matrix &next;
    const MixtureConfig *clamped = nullptr; // null: the decoder's activation
    int first_block = 0;                    // of gate and up
    int first_x = 0, first_row = 0;         // of what they multiply; of `gated`
    const float *x_weights = nullptr;       // [rows of `gated`]: what x is multiplied by, or null
    bool has_gate = true;                   // else `gate` is not read
    const Xielu *xielu = nullptr;           // null: the decoder's activation
};

// A piece of a product: rows of the activations times blocks of the weights.
struct ProductPart {
    int row, rows, block, blocks, thread;
    int next_block; // where the thread likely goes on; it need not be a block of the product
};

// What is cut into parts.
struct Extent {
    int rows, blocks;
};

using Factors = std::initializer_list<const Matrix *>; // of the same width

// Round a row of `x` to what products with `weights` multiply: 8 or 16 bits, bf16 or both.
// Products assume that this is done: the code that computes a row rounds it in the same phase,
// while it is in the cache.
void round_activations(const StepState &state, const Activations &x, Factors weights, int row);

// Copy a row as products with `weights` read it.
void copy_activations(const StepState &state, const Activations &x, int row, Factors weights,
                      const Activations &out, int out_row);

// One phase for all, which multiply the same `x`: their blocks are counted through. Adapters add to
// them, as to the gates and the head below.
void multiply(StepState &state, int rows, std::initializer_list<Product> products);

// One phase of products of their own, of weights in the same format. Parts are rounded for `next`,
// if they are gates.
using MultiplyPart = std::function<void(int index, const ProductPart &part)>;
void multiply_each(StepState &state, const std::vector<Extent> &extents, const Matrix &weight,
                   const MultiplyPart &multiply, Factors next = {});
// `next`: the weights that the thread likely reads next.
void multiply_part(StepState &state, const Linear &product, const ProductPart &part,
                   const uint8_t *next, float *out, int out_stride);
const uint8_t *next_weights(const Matrix &weight, const ProductPart &part);
void multiply_gated_part(StepState &state, const GatedProduct &product, const ProductPart &part);

// Floats that a thread needs for gates of so many rows.
size_t room_for_gates(int num_rows);

// Floats that products of integers need, each thread of its own.
size_t room_for_panels();

// Each task applies the activation to what it has just computed. Unread values are not written.
// Gates that are read rounded alone leave no core's cache.
void multiply_gated(StepState &state, const GatedProduct &product);

// The step's logits, finished. Each task finds the largest of every 64 that it has just computed,
// while they are in its cache. They are [rows, num_blocks_of(tokens)] in `maxima`, if it is given.
void multiply_head(StepState &state, const Product &head, float *maxima);

} // namespace headrace
