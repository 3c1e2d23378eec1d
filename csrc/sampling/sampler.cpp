// sampler: the tokens of a step, and their log probabilities, from its logits.
//   logits: [rows, stride] f32, of which the first vocab_size columns count; never written.
//   A row's result depends on nothing but the row: not on its batch mates, the number of threads
//   or the instruction set. (The two logarithms of the noise, and log and exp once per row, are
//   the C library's.)
//   Bound by compute. Times are of a row of 49,152, with AVX-512 or AVX2. It takes 8 or 27 us to
//   find which noise may win, and 35 or 71 us for a sum of exponentials (top_p, log probabilities).
//   Finding the best takes 2 us where the executor has not.

#include "cpu/thread_pool.h"
#include "sampling/histories.h"
#include "sampling/sampler_row.h"

#include <new>

namespace headrace {

namespace {

struct SampleStep { // cpu_sampler.py
    const float *logits;
    const float *maxima; // [rows, num_blocks_of(vocab_size)], of each 64 logits of a row, or null
    const SamplingRow *rows;
    const int32_t *bias_tokens;
    const float *bias;
    const uint32_t *masks;    // [masks, mask_words], a bit for each token that may be chosen
    const int32_t *mask_rows; // [rows], the row of `masks`, or -1; null where there are none
    int32_t *token_ids;       // out, [rows]
    char *logprobs;           // out, 8 * (num_logprobs + 1) bytes per row
    int64_t stride, mask_words;
    int32_t num_rows, num_bias;
};

class Sampler {
public:
    Sampler(int vocab_size, int num_threads, const Kernels &common, const SamplerKernels &kernels)
        : vocab_size_(vocab_size), pool_(num_threads) {
        for (int thread = 0; thread < num_threads; ++thread) {
            threads_.emplace_back(vocab_size, common, kernels);
        }
    }

    bool update(const HistoryUpdate *updates, int32_t num_updates, const int32_t *tokens,
                int64_t num_tokens) {
        return histories_.update(updates, num_updates, tokens, num_tokens);
    }

    bool is_valid(const SampleStep &step) const {
        for (int i = 0; i < step.num_rows; ++i) {
            const SamplingRow &row = step.rows[i];
            if (row.target >= vocab_size_ || row.num_logprobs < -1 ||
                !histories_.have(row.history_slot, row.num_history) ||
                !is_within(row.bias_start, row.num_bias, step.num_bias)) {
                return false;
            }
        }
        return true;
    }

    void sample(const SampleStep &step) {
        logprobs_.clear();
        char *end = step.logprobs;
        for (int i = 0; i < step.num_rows; ++i) {
            logprobs_.push_back(end);
            end += 8 * (int64_t(step.rows[i].num_logprobs) + 1);
        }
        const auto sample_row = [&](int i, int thread) {
            const SamplingRow &row = step.rows[i];
            const float *logits = step.logits + i * step.stride;
            const float *maxima =
                step.maxima ? step.maxima + int64_t(i) * num_blocks_of(vocab_size_) : nullptr;
            const int32_t mask_row = step.mask_rows ? step.mask_rows[i] : -1;
            const uint32_t *mask = mask_row < 0 ? nullptr : step.masks + mask_row * step.mask_words;
            const RowContext context = {row.num_history ? histories_.tokens_of(row.history_slot)
                                                        : nullptr,
                                        step.bias_tokens, step.bias};
            step.token_ids[i] = threads_[thread].choose(logits, maxima, row, context, mask);
            if (row.num_logprobs >= 0) {
                threads_[thread].report(logits, maxima, step.token_ids[i], row.num_logprobs,
                                        logprobs_[i]);
            }
        };
        int num_slow = 0;
        for (int i = 0; i < step.num_rows; ++i) {
            num_slow += !is_lookup(step, i);
        }
        if (num_slow <= 1) { // done before another thread is awake
            for (int i = 0; i < step.num_rows; ++i) {
                sample_row(i, 0);
            }
        } else {
            ThreadPool::Awake awake(pool_);
            pool_.run(step.num_rows, sample_row);
        }
    }

private:
    // Whether it takes a microsecond: the maxima say which token it is.
    static bool is_lookup(const SampleStep &step, int i) {
        const SamplingRow &row = step.rows[i];
        return step.maxima && !(row.temperature > 0) && row.num_logprobs < 0 && row.num_bias == 0 &&
               row.num_history == 0 && !(step.mask_rows && step.mask_rows[i] >= 0);
    }

    static bool is_within(int64_t start, int64_t count, int64_t size) {
        return start >= 0 && count >= 0 && start + count <= size;
    }

    const int vocab_size_;
    ThreadPool pool_;
    std::vector<RowSampler> threads_;
    std::vector<char *> logprobs_; // where each row's go
    Histories histories_;
};

} // namespace

} // namespace headrace

using headrace::Isa;
using headrace::Sampler;

extern "C" {

// Null when memory does not suffice, or this processor lacks the instruction set.
void *headrace_sampler_create(int32_t vocab_size, int32_t num_threads, int32_t isa) {
    const auto *common = headrace::find_kernels(Isa(isa));
    const auto *kernels = headrace::find_sampler_kernels(Isa(isa));
    if (!common || !kernels) {
        return nullptr;
    }
    try {
        return new Sampler(vocab_size, num_threads, *common, *kernels);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void headrace_sampler_destroy(void *sampler) {
    delete static_cast<Sampler *>(sampler);
}

// 0, or 1 when an update has no slot, leaves a gap or lacks tokens, or 2 when memory does not
// suffice. Rows see the tokens from here on.
int32_t headrace_sampler_update(void *sampler, const headrace::HistoryUpdate *updates,
                                int32_t num_updates, const int32_t *tokens, int64_t num_tokens) {
    try {
        auto &self = *static_cast<Sampler *>(sampler);
        return self.update(updates, num_updates, tokens, num_tokens) ? 0 : 1;
    } catch (const std::bad_alloc &) {
        return 2;
    }
}

// 0, or 1 when a row points out of range, or 2 when memory does not suffice.
int32_t headrace_sampler_sample(void *sampler, const headrace::SampleStep *step) {
    auto &self = *static_cast<Sampler *>(sampler);
    if (!self.is_valid(*step)) {
        return 1;
    }
    try {
        self.sample(*step);
        return 0;
    } catch (const std::bad_alloc &) {
        return 2;
    }
}

} // extern "C"
