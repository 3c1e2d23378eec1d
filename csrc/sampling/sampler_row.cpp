#pragma GCC optimize("fp-contract=off") // for every function below: the same bits everywhere
#include "sampling/sampler_row.h"
#include "cpu/numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace headrace {

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// A number that is larger the larger the float is. Not for NaN.
uint32_t order_of(float x) {
    const uint32_t bits = to_bits(x);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

float float_of(uint32_t order) {
    return from_bits(order >> 31 ? order & 0x7fffffff : ~order);
}

uint64_t candidate_of(float logit, int32_t token) {
    return uint64_t(order_of(logit + 0.0f)) << 32 | uint32_t(~token); // -0 equals 0
}

float logit_of(uint64_t candidate) {
    return float_of(uint32_t(candidate >> 32));
}

int32_t token_of(uint64_t candidate) {
    return int32_t(~uint32_t(candidate));
}

} // namespace

// The largest score plus Gumbel noise so far; the lower token among equals. The noise of a token
// is -log(-log(u)), u = (bits + 1/2) / 2^52, bits a pure function of (seed, position, token).
class GumbelDraw {
public:
    GumbelDraw(uint64_t seed, uint64_t position, const Softmax &softmax)
        : key(mix(mix(seed) + position)), softmax(softmax) {}

    // How far below the largest possible the bits of a token of this weight can be if it is to
    // win; negative if it cannot. Never too strict, and cheap: most tokens need no logarithm.
    //   score + noise >= best  <=>  -log(u) <= exp(score - best)  =>  1 - u <= exp(score - best)
    int64_t distance(double weight) const {
        const double distance = weight * reach_ * 0x1p52 - 0.5;
        return distance >= 0 ? int64_t(std::min(distance, 0x1p52 - 1)) : -1; // NaN: weight is 0
    }

    static int64_t distance_of(uint64_t counter) { return int64_t(~mix(counter) >> 12); }

    void consider(int32_t token, float logit) {
        const double score = softmax.score(logit);
        if (score - softmax.highest < softmax.floor) {
            return;
        }
        const double u = (double(mix(key + uint64_t(token)) >> 12) + 0.5) * 0x1p-52;
        const double value = score - std::log(-std::log(u));
        if (value > best_ || (value == best_ && token < this->token)) {
            best_ = value;
            this->token = token;
            // Slack for the rounding of logarithms and of sums.
            reach_ = std::exp(softmax.highest - best_ + 1e-9 + std::fabs(best_) * 0x1p-51);
        }
    }

    const uint64_t key;
    const Softmax softmax;
    int32_t token = 0;

private:
    double best_ = -infinity;
    double reach_ = infinity; // exp(highest score - best)
};

RowSampler::RowSampler(int vocab_size, const Kernels &common, const SamplerKernels &kernels)
    : vocab_size_(vocab_size), num_blocks_(num_blocks_of(vocab_size)), common_(common),
      kernels_(kernels), adjusted_(vocab_size), maxima_(num_blocks_), counts_(vocab_size),
      candidates_(vocab_size), others_(vocab_size), logits_(vocab_size), weights_(vocab_size) {
    seen_.reserve(vocab_size);
}

int32_t RowSampler::choose(const float *logits, const float *maxima, const SamplingRow &row,
                           const RowContext &context, const uint32_t *mask) {
    if (row.target >= 0) {
        return row.target;
    }
    const float *adjusted = adjust(logits, row, context, mask);
    float highest = find_highest(adjusted, adjusted == logits ? maxima : nullptr);
    if (mask && highest == -infinity) {
        kernels_.mask(logits, mask, vocab_size_, adjusted_.data());
        highest = find_highest(adjusted, nullptr);
    }
    logits = adjusted;
    const int32_t likeliest = first_with(logits, highest);
    if (!(row.temperature > 0) || !std::isfinite(highest)) {
        return likeliest;
    }
    Softmax softmax = {1.0 / row.temperature, 0, -infinity};
    softmax.highest = softmax.score(highest);
    if (row.min_p > 0) {
        softmax.floor = std::min(0.0, std::log(double(row.min_p)));
    }
    GumbelDraw draw(row.seed, row.position, softmax);
    const bool is_top_k = row.top_k > 0 && row.top_k < vocab_size_;
    if (!is_top_k && !(row.top_p < 1)) {
        draw_from_all(logits, likeliest, draw);
        return draw.token;
    }
    if (is_top_k) {
        keep_top_k(logits, row.top_k);
    }
    if (row.top_p < 1) {
        const double p = row.top_p;
        if (is_top_k) {
            cut(softmax, p * weight_of_candidates(0, num_candidates_, softmax));
        } else {
            keep_top_p(logits, softmax, p);
        }
    }
    draw_from_candidates(draw);
    return draw.token;
}

void RowSampler::report(const float *logits, const float *maxima, int32_t token, int num_top,
                        char *out) {
    const float highest = find_highest(logits, maxima);
    const Softmax softmax = {1.0, highest, -infinity};
    const double log_sum = highest + std::log(kernels_.sum_weights(logits, vocab_size_, softmax));
    const auto write = [&out](const auto &number) {
        std::memcpy(out, &number, 4);
        out += 4;
    };
    const auto logprob = [&](int32_t token) {
        const float difference = float(logits[token] - log_sum);
        return difference == difference ? difference : -infinity;
    };
    write(logprob(token));
    write(int32_t(1 + kernels_.count_above(logits, vocab_size_, logits[token])));
    if (num_top == 0) {
        return;
    }
    keep_top_k(logits, num_top);
    std::sort(candidates_.begin(), candidates_.begin() + num_candidates_, std::greater<>());
    for (int i = 0; i < num_candidates_; ++i) {
        write(token_of(candidates_[i]));
        write(logprob(token_of(candidates_[i])));
    }
    int num_left = num_top - num_candidates_;
    for (int32_t token = 0; token < vocab_size_ && num_left > 0; ++token) {
        if (!(logits[token] > -infinity)) {
            write(token);
            write(-infinity);
            --num_left;
        }
    }
    for (; num_left > 0; --num_left) {
        write(int32_t(-1));
        write(-infinity);
    }
}

// The mask, then biases, then penalties, in a copy.
const float *RowSampler::adjust(const float *logits, const SamplingRow &row,
                                const RowContext &context, const uint32_t *mask) {
    if (!mask && row.num_bias == 0 && row.num_history == 0) {
        return logits;
    }
    if (mask) {
        kernels_.mask(logits, mask, vocab_size_, adjusted_.data());
    } else {
        std::copy(logits, logits + vocab_size_, adjusted_.begin());
    }
    for (int i = row.bias_start; i < row.bias_start + row.num_bias; ++i) {
        const uint32_t token = uint32_t(context.bias_tokens[i]);
        if (token < uint32_t(vocab_size_)) {
            const float bias = context.bias[i];
            adjusted_[token] = bias == -infinity ? bias : adjusted_[token] + bias;
        }
    }
    if (row.num_history > 0) {
        penalize(row, context.history);
    }
    return adjusted_.data();
}

void RowSampler::penalize(const SamplingRow &row, const int32_t *history) {
    seen_.clear();
    for (int i = 0; i < row.num_history; ++i) {
        const uint32_t token = uint32_t(history[i]);
        if (token < uint32_t(vocab_size_)) {
            if (counts_[token] == 0) {
                seen_.push_back(int32_t(token));
                counts_[token] = 1;
            }
            counts_[token] += i < row.num_prompt ? 0 : 2;
        }
    }
    for (const int32_t token : seen_) {
        const uint32_t num_generated = counts_[token] >> 1;
        counts_[token] = 0;
        float &logit = adjusted_[token];
        if (logit == -infinity) {
            continue;
        }
        logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
        if (num_generated > 0) {
            logit -= row.frequency_penalty * float(num_generated);
            logit -= row.presence_penalty;
        }
    }
}

float RowSampler::find_highest(const float *logits, const float *maxima) {
    if (maxima) {
        std::copy_n(maxima, num_blocks_, maxima_.begin());
    } else {
        common_.block_maxima(logits, vocab_size_, maxima_.data());
    }
    return *std::max_element(maxima_.begin(), maxima_.end());
}

// The first token that has the highest logit.
int32_t RowSampler::first_with(const float *logits, float logit) const {
    const auto block = std::find(maxima_.begin(), maxima_.end(), logit) - maxima_.begin();
    const float *end = logits + vocab_size_;
    const float *found = std::find(logits + block * block_tokens, end, logit);
    return found == end ? 0 : int32_t(found - logits); // all are NaN
}

// Make all tokens above `limit` the candidates.
void RowSampler::gather(const float *logits, float limit) {
    num_candidates_ = 0;
    for (int block = 0; block < num_blocks_; ++block) {
        if (maxima_[block] > limit) {
            const int first = block * block_tokens;
            const int num_tokens = std::min(vocab_size_ - first, block_tokens);
            uint64_t bits = kernels_.bits_above(logits + first, num_tokens, limit);
            for (; bits != 0; bits &= bits - 1) {
                const int32_t token = first + __builtin_ctzll(bits);
                candidates_[num_candidates_++] = candidate_of(logits[token], token);
            }
        }
    }
}

// Make the k best tokens the candidates, or fewer where no more are possible at all.
void RowSampler::keep_top_k(const float *logits, int k) {
    gather(logits, limit_of_top(logits, k));
    if (num_candidates_ > k) {
        const auto first = candidates_.begin();
        std::nth_element(first, first + k, first + num_candidates_, std::greater<>());
        num_candidates_ = k;
    }
}

// A limit above which there are the k best, and not many more.
float RowSampler::limit_of_top(const float *logits, int k) {
    if (k <= num_blocks_) { // k blocks have a token that is no less than the k-th of the maxima
        const auto first = logits_.begin();
        std::copy(maxima_.begin(), maxima_.end(), first);
        std::nth_element(first, first + k - 1, first + num_blocks_, std::greater<>());
        return std::nextafter(logits_[k - 1], -infinity);
    }
    uint32_t low = order_of(-infinity), high = order_of(infinity);
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        const int count = kernels_.count_above(logits, vocab_size_, float_of(middle));
        (count >= k ? low : high) = middle;
        if (count >= k && count <= k + k / 4) {
            break;
        }
    }
    return float_of(low);
}

// Make the fewest best tokens that together weigh `p` of all the candidates.
void RowSampler::keep_top_p(const float *logits, const Softmax &softmax, double p) {
    const double total = kernels_.sum_weights(logits, vocab_size_, softmax);
    // Those that weigh less than (1 - p) * total / vocab_size are not needed, even all together.
    const double deepest = 1e-6 - std::log((1 - p) * total / vocab_size_);
    const float highest = *std::max_element(maxima_.begin(), maxima_.end());
    for (double depth = 2;; depth *= 2) {
        const double limit = softmax.highest - std::min(depth, deepest);
        gather(logits, std::min(float(limit / softmax.inverse_temperature),
                                std::nextafter(highest, -infinity)));
        if (depth >= deepest || weight_of_candidates(0, num_candidates_, softmax) >= p * total) {
            break;
        }
    }
    cut(softmax, p * total);
}

// Drop the worst candidates that are not needed for those left to weigh `target`.
void RowSampler::cut(const Softmax &softmax, double target) {
    int first = 0, last = num_candidates_; // where the one that reaches it is
    double weight = 0;                     // of those before `first`
    uint64_t worst = candidates_[0], best = candidates_[0];
    for (int i = 1; i < last; ++i) {
        worst = std::min(worst, candidates_[i]);
        best = std::max(best, candidates_[i]);
    }
    float low = logit_of(worst), high = logit_of(best);
    while (last - first > 1) {
        const float limit = low + (high - low) / 2;
        const bool is_narrow = last - first <= 32 || !(low < limit && limit < high);
        const int middle = is_narrow ? halve(first, last) : split(first, last, limit);
        const double more = weight_of_candidates(first, middle, softmax);
        if (weight + more >= target) {
            last = middle;
            low = limit;
        } else {
            weight += more;
            first = middle;
            high = limit;
        }
    }
    num_candidates_ = last;
}

// Bring the better half of these candidates to the front; return where the worse half begins.
int RowSampler::halve(int first, int last) {
    const int middle = first + (last - first) / 2;
    const auto begin = candidates_.begin();
    std::nth_element(begin + first, begin + middle, begin + last, std::greater<>());
    return middle;
}

// Bring those above `limit` to the front; return where the others begin. Much faster than
// halving: there is no branch to mispredict.
int RowSampler::split(int first, int last, float limit) {
    const uint64_t bound = candidate_of(limit, 0);
    int num_above = 0, num_others = 0;
    for (int i = first; i < last; ++i) {
        const uint64_t candidate = candidates_[i];
        const int is_above = candidate > bound;
        candidates_[first + num_above] = candidate;
        others_[num_others] = candidate;
        num_above += is_above;
        num_others += 1 - is_above;
    }
    std::copy(others_.begin(), others_.begin() + num_others,
              candidates_.begin() + first + num_above);
    return first + num_above;
}

double RowSampler::weight_of_candidates(int first, int last, const Softmax &softmax) {
    for (int i = first; i < last; ++i) {
        logits_[i] = logit_of(candidates_[i]);
    }
    return kernels_.sum_weights(logits_.data() + first, last - first, softmax);
}

void RowSampler::draw_from_all(const float *logits, int32_t likeliest, GumbelDraw &draw) {
    draw.consider(likeliest, logits[likeliest]); // a good one first, to skip many
    kernels_.weigh(maxima_.data(), num_blocks_, draw.softmax, weights_.data());
    for (int block = 0; block < num_blocks_; ++block) {
        const int64_t distance = draw.distance(weights_[block]);
        const int first = block * block_tokens;
        if (distance < 0 || !kernels_.any_within(draw.key + uint64_t(first), uint64_t(distance))) {
            continue;
        }
        const int last = std::min(vocab_size_, first + block_tokens);
        for (int token = first; token < last; ++token) {
            if (draw.distance_of(draw.key + uint64_t(token)) <= distance) {
                draw.consider(token, logits[token]);
            }
        }
    }
}

void RowSampler::draw_from_candidates(GumbelDraw &draw) {
    for (int i = 0; i < num_candidates_; ++i) {
        logits_[i] = logit_of(candidates_[i]);
    }
    kernels_.weigh(logits_.data(), num_candidates_, draw.softmax, weights_.data());
    for (int i = 0; i < num_candidates_; ++i) {
        const int32_t token = token_of(candidates_[i]);
        if (draw.distance_of(draw.key + uint64_t(token)) <= draw.distance(weights_[i])) {
            draw.consider(token, logits_[i]);
        }
    }
}

} // namespace headrace
