// Operations on one token's row: norm, residual sum, rotation. Each is the same code for every
// row, so a row's result never depends on its batch. A few percent of a step at most.
#pragma once
#include "cpu/model.h"

namespace headrace {

// out = x / rms(x) * weight, or (x - mean) / std * weight for a LayerNorm. May be in place.
void norm_row(const float *x, const float *weight, int n, float eps, bool layer_norm, float *out);

float squares_of(const float *x, int n);

// x *= scale * weight
void scale_row(float *x, const float *weight, int n, float scale);

// sum += multiplier * x
void add_row(const float *x, float multiplier, int n, float *sum);

// cos and sin of a token's three `positions`, [num_pairs] each, scaled.
void rope_angles(const Rope &rope, const int32_t *positions, float *cos, float *sin);

// Rotate the first 2 * num_pairs numbers of one head, in place.
void rotate(float *head, int num_pairs, bool interleaved, const float *cos, const float *sin);

} // namespace headrace
