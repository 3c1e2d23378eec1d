#include "cpu/row_ops.h"

#include <cmath>

namespace headrace {

namespace {

// Sixteen running sums, then one total: vectors without reassociation left to the compiler.
template <class Term> float sum_of(int n, const Term &term) {
    float sums[lanes] = {};
    int i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (int lane = 0; lane < lanes; ++lane) {
            sums[lane] += term(i + lane);
        }
    }
    for (; i < n; ++i) {
        sums[i % lanes] += term(i);
    }
    float total = 0.0f;
    for (float sum : sums) {
        total += sum;
    }
    return total;
}

} // namespace

void norm_row(const float *x, const float *weight, int n, float eps, bool layer_norm, float *out) {
    const float mean = layer_norm ? sum_of(n, [&](int i) { return x[i]; }) / float(n) : 0.0f;
    const float squares = sum_of(n, [&](int i) { return (x[i] - mean) * (x[i] - mean); });
    const float scale = 1.0f / std::sqrt(squares / float(n) + eps);
    for (int i = 0; i < n; ++i) {
        out[i] = (x[i] - mean) * scale * weight[i];
    }
}

float squares_of(const float *x, int n) {
    return sum_of(n, [&](int i) { return x[i] * x[i]; });
}

void scale_row(float *x, const float *weight, int n, float scale) {
    for (int i = 0; i < n; ++i) {
        x[i] *= scale * weight[i];
    }
}

void add_row(const float *x, float multiplier, int n, float *sum) {
    for (int i = 0; i < n; ++i) {
        sum[i] += multiplier * x[i];
    }
}

void rope_angles(const Rope &rope, const int32_t *positions, float *cos, float *sin) {
    for (size_t i = 0; i < rope.inv_freq.size(); ++i) {
        const float angle = float(positions[rope.axes[i]]) * rope.inv_freq[i];
        cos[i] = std::cos(angle) * rope.scale;
        sin[i] = std::sin(angle) * rope.scale;
    }
}

void rotate(float *head, int num_pairs, bool interleaved, const float *cos, const float *sin) {
    const int step = interleaved ? 2 : 1;
    const int distance = interleaved ? 1 : num_pairs;
    for (int i = 0; i < num_pairs; ++i) {
        float &a = head[i * step], &b = head[i * step + distance];
        const float x = a, y = b;
        a = x * cos[i] - y * sin[i];
        b = y * cos[i] + x * sin[i];
    }
}

} // namespace headrace
