#include "cpu/router.h"

#include <algorithm>
#include <cmath>

namespace headrace {

namespace {

constexpr float lowest = -INFINITY;

void softmax(const float *logits, int n, float *out) {
    const float largest = *std::max_element(logits, logits + n);
    float sum = 0.0f;
    for (int i = 0; i < n; ++i) {
        out[i] = std::exp(logits[i] - largest);
        sum += out[i];
    }
    for (int i = 0; i < n; ++i) {
        out[i] /= sum;
    }
}

void sigmoid(const float *logits, int n, float *out) {
    for (int i = 0; i < n; ++i) {
        out[i] = 1.0f / (1.0f + std::exp(-logits[i]));
    }
}

// The first of the largest; -1 where none is above minus infinity.
int highest(const float *numbers, int n) {
    int best = -1;
    float largest = lowest;
    for (int i = 0; i < n; ++i) {
        if (numbers[i] > largest) {
            best = i;
            largest = numbers[i];
        }
    }
    return best;
}

// Take the best one out of `ranks`; where none is a number, the first that is not in `taken`.
int take_best(float *ranks, int n, const int32_t *taken, int num_taken) {
    int best = highest(ranks, n);
    while (best < 0 || std::find(taken, taken + num_taken, best) != taken + num_taken) {
        ++best;
    }
    ranks[best] = lowest;
    return best;
}

float sum_of_best(const float *ranks, int n, int count) {
    float best[8]; // the largest so far, in order
    count = std::min({count, n, 8});
    std::fill_n(best, count, lowest);
    for (int i = 0; i < n; ++i) {
        float number = ranks[i];
        for (int place = 0; place < count; ++place) {
            if (number > best[place]) {
                std::swap(number, best[place]);
            }
        }
    }
    float sum = 0.0f;
    for (int place = 0; place < count; ++place) {
        sum += best[place];
    }
    return sum;
}

// Leave the experts of the best groups in `ranks`.
void keep_best_groups(const MixtureConfig &config, float *ranks) {
    const int size = config.num_experts / config.num_groups;
    uint64_t kept = 0;
    for (int n = 0; n < config.groups_per_token; ++n) {
        int best = -1;
        float largest = lowest;
        for (int group = 0; group < config.num_groups; ++group) {
            const float score = sum_of_best(ranks + group * size, size, config.group_score_experts);
            if ((kept >> group & 1) == 0 && (best < 0 || score > largest)) {
                best = group;
                largest = score;
            }
        }
        kept |= uint64_t(1) << best;
    }
    for (int group = 0; group < config.num_groups; ++group) {
        if ((kept >> group & 1) == 0) {
            std::fill_n(ranks + group * size, size, lowest);
        }
    }
}

// As PhimoeSparseMoeBlock of transformers: the weight of each choice is its share in a softmax of
// those that are not far below it. Ones that were chosen before are in no later softmax.
void mix_sparsely(const MixtureConfig &config, const float *logits, float *ranks, int32_t *experts,
                  float *weights) {
    const int n = config.num_experts;
    for (int slot = 0; slot < config.experts_per_token; ++slot) {
        const int best = take_best(ranks, n, experts, slot);
        const float largest = logits[best];
        float sum = 1.0f;
        for (int i = 0; i < n; ++i) {
            const float factor = std::max(std::fabs(logits[i]), largest);
            const bool is_far = (largest - logits[i]) / factor > 2.0f * config.sparsemixer_eps;
            if (ranks[i] > lowest && !is_far) {
                sum += std::exp(logits[i] - largest);
            }
        }
        experts[slot] = best;
        weights[slot] = 1.0f / sum;
    }
}

void choose_by_score(const MixtureConfig &config, const float *scores, float *ranks,
                     int32_t *experts, float *weights) {
    for (int slot = 0; slot < config.experts_per_token; ++slot) {
        experts[slot] = take_best(ranks, config.num_experts, experts, slot);
        weights[slot] = scores[experts[slot]];
    }
}

void scale_weights(const MixtureConfig &config, float *weights) {
    float sum = 0.0f;
    for (int slot = 0; slot < config.experts_per_token; ++slot) {
        sum += weights[slot];
    }
    sum = std::max(sum, config.weight_sum_min);
    const float divisor = config.normalized ? sum + config.weight_sum_eps : 1.0f;
    for (int slot = 0; slot < config.experts_per_token; ++slot) {
        weights[slot] = weights[slot] / divisor * config.weight_scale;
    }
}

} // namespace

void choose_experts(const MixtureConfig &config, const float *logits, const float *selection_bias,
                    float *scratch, int32_t *experts, float *weights) {
    const int n = config.num_experts;
    float *scores = scratch, *ranks = scratch + n;
    if (config.score == RouterScore::sparsemixer) {
        std::copy_n(logits, n, ranks);
        mix_sparsely(config, logits, ranks, experts, weights);
    } else {
        config.score == RouterScore::softmax ? softmax(logits, n, scores)
                                             : sigmoid(logits, n, scores);
        for (int i = 0; i < n; ++i) {
            ranks[i] = selection_bias ? scores[i] + selection_bias[i] : scores[i];
        }
        if (config.num_groups > 1) {
            keep_best_groups(config, ranks);
        }
        choose_by_score(config, scores, ranks, experts, weights);
    }
    scale_weights(config, weights);
}

} // namespace headrace
