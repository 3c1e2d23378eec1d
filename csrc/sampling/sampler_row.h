// Chooses the token of one row of logits.
#pragma once
#include "sampling/sampler_kernels.h"

#include <vector>

namespace headrace {

struct SamplingRow { // worker_messages.SamplingRow; a test compares both
    uint64_t seed, position;
    float temperature, top_p, min_p;
    float presence_penalty, frequency_penalty, repetition_penalty;
    int32_t top_k, num_logprobs, target;
    int32_t history_slot, num_prompt, num_history;
    int32_t bias_start, num_bias;
};
static_assert(sizeof(SamplingRow) == 72, "as worker_messages.SAMPLING_ROW");

// What a row points into: the tokens of its slot, and the arrays of biases.
struct RowContext {
    const int32_t *history;
    const int32_t *bias_tokens;
    const float *bias;
};

class GumbelDraw;

// Holds what one thread needs, so that sampling allocates nothing. Tokens beyond the vocabulary
// in a history or among the biases are passed over. NaN is as unlikely as minus infinity, as far
// as it may matter which token a broken model gets.
class RowSampler {
public:
    RowSampler(int vocab_size, const Kernels &common, const SamplerKernels &kernels);

    // `maxima` are those of blocks of the logits. If null, or once a mask, biases or penalties have
    // changed the logits, they are found here. `mask` has a bit for each token that may be chosen,
    // or is null: all may. Where biases and penalties leave none of them, they do not count.
    int32_t choose(const float *logits, const float *maxima, const SamplingRow &row,
                   const RowContext &context, const uint32_t *mask);

    // Write f32 logprob and i32 rank of `token`, then `num_top` pairs of i32 token and f32 logprob,
    // best first. Where the vocabulary has fewer, the token is -1.
    void report(const float *logits, const float *maxima, int32_t token, int num_top, char *out);

private:
    const float *adjust(const float *logits, const SamplingRow &row, const RowContext &context,
                        const uint32_t *mask);
    void penalize(const SamplingRow &row, const int32_t *history);

    // Candidates are numbers whose order is that of the sampler: by logit, then by lower token.
    void gather(const float *logits, float limit);
    void keep_top_k(const float *logits, int k);
    void keep_top_p(const float *logits, const Softmax &softmax, double p);
    void cut(const Softmax &softmax, double target);
    int halve(int first, int last);
    int split(int first, int last, float limit);
    float limit_of_top(const float *logits, int k);
    double weight_of_candidates(int first, int last, const Softmax &softmax);

    float find_highest(const float *logits, const float *maxima);
    int32_t first_with(const float *logits, float logit) const;
    void draw_from_all(const float *logits, int32_t likeliest, GumbelDraw &draw);
    void draw_from_candidates(GumbelDraw &draw);

    const int vocab_size_;
    const int num_blocks_;
    const Kernels &common_;
    const SamplerKernels &kernels_;
    std::vector<float> adjusted_;
    std::vector<float> maxima_;    // of the row's blocks
    std::vector<uint32_t> counts_; // by token: bit 0 is seen, the rest is how often generated
    std::vector<int32_t> seen_;
    int num_candidates_ = 0;
    std::vector<uint64_t> candidates_;
    std::vector<uint64_t> others_; // space to move candidates
    std::vector<float> logits_;    // of candidates
    std::vector<double> weights_;
};

} // namespace headrace
