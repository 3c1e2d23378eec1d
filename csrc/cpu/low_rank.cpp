#include "cpu/low_rank.h"
#include "cpu/products.h"

#include <climits>
#include <utility>

namespace headrace {

namespace {

constexpr int rows_per_task = 32;

// Factors of one adapter for some products, that meet some rows of them. They lie one behind the
// other, as one matrix.
struct Shrinking {
    Linear *const *products;
    int num_products, adapter, first, rows, expert;
};

const LowRankPair *pair_of(const Matrix &weight, int adapter) {
    return size_t(adapter) < weight.low_rank.size() ? weight.low_rank[adapter] : nullptr;
}

// Rows of all experts, each from a whole block on.
int rows_of_experts(int num_experts, int rows) {
    return (num_experts - 1) * padded(rows) + rows;
}

// `ahead`: how far behind what is read lies what is read later.
Operands operands_of(const Matrix &factor, int block, const float *x, int x_stride, float *out,
                     int out_stride, bool accumulate, ptrdiff_t ahead = prefetch_bytes) {
    return {factor.block(block),
            block_bytes(factor.format, factor.cols),
            factor.cols,
            x,
            x_stride,
            out,
            out_stride,
            accumulate,
            ahead};
}

bool is_rounded(const StepState &state, const LowRankPair &pair) {
    return state.config.rounds_activations && pair.b.format == Format::bf16;
}

void multiply(const StepState &state, const LowRankPair &pair, const Operands &o, int rows,
              int num_blocks, int thread) {
    const Kernels &kernels = *state.model.kernels;
    float *scratch = state.model.workspace.scratch[thread].as<float>();
    if (is_rounded(state, pair) && kernels.gemm_bf16) {
        kernels.gemm_bf16(o, rows, num_blocks, scratch);
    } else {
        kernels.gemm(pair.b.format, o, rows, num_blocks, scratch);
    }
}

void run(const StepState &state, const Shrinking &s, int thread) {
    const Kernels &kernels = *state.model.kernels;
    const Linear &p = *s.products[0];
    const Shrunk &shrunk = p.shrunk;
    const LowRankPair &pair = *pair_of(p.weight, s.adapter);
    const bool rounds = is_rounded(state, pair);
    if (pair.a.rows > 0) {
        int num_blocks = 0;
        for (int i = 0; i < s.num_products; ++i) {
            num_blocks += blocks_of(pair_of(s.products[i]->weight, s.adapter)->b.cols);
        }
        const float *x = (rounds ? p.x.rounded : p.x.rows) + size_t(s.first) * p.x.stride;
        multiply(state, pair,
                 operands_of(pair.a, s.expert * blocks_of(pair.b.cols), x, p.x.stride,
                             shrunk.at(s.first, pair), shrunk.stride, false),
                 s.rows, num_blocks, thread);
    }
    for (int i = 0; i < s.num_products; ++i) {
        const LowRankPair &own = *pair_of(s.products[i]->weight, s.adapter);
        for (int row = s.first; row < s.first + s.rows; ++row) {
            float *out = shrunk.at(row, own);
            kernels.scale(own.a.rows > 0 ? out : p.x.row(row), own.scale, own.b.cols, out);
            if (rounds) {
                kernels.round_row(out, own.b.cols, out);
            }
        }
    }
}

// Whether the second A lies behind the first, as the next blocks of the same matrix.
bool follows(const LowRankPair &first, const LowRankPair &second) {
    return first.a.rows > 0 && second.a.rows > 0 && first.a.cols == second.a.cols &&
           first.a.block(blocks_of(first.a.rows)) == second.a.block(0) &&
           first.a.rows == first.b.cols && second.a.rows == second.b.cols &&
           first.column + padded(first.b.cols) == second.column;
}

// What a run has to shrink, with several products at a time where `joins` is set.
void add_tasks(const AdaptedProducts &group, const AdapterRun &run, bool joins,
               std::vector<Shrinking> &tasks) {
    const int num_products = int(group.products.size());
    const auto pair_at = [&](int i) { return pair_of(group.products[i]->weight, run.adapter); };
    for (int i = 0, count; i < num_products; i += count) {
        for (count = 1; joins && pair_at(i) && i + count < num_products; ++count) {
            const LowRankPair *next = pair_at(i + count);
            if (!next || !follows(*pair_at(i + count - 1), *next)) {
                break;
            }
        }
        for (int row = 0; pair_at(i) && row < run.rows; row += rows_per_task) {
            const int rows = std::min(rows_per_task, run.rows - row);
            tasks.push_back(
                {&group.products[i], count, run.adapter, run.first + row, rows, run.expert});
        }
    }
}

// Of an adapter of the step; null: none changes products with the weight.
const LowRankPair *any_pair(const std::vector<AdapterRun> &runs, const Matrix &weight) {
    for (const AdapterRun &run : runs) {
        if (const LowRankPair *pair = pair_of(weight, run.adapter)) {
            return pair;
        }
    }
    return nullptr;
}

} // namespace

Adapter::Adapter(Format format, const GivenFactors *given, int count) {
    std::vector<int> places(count); // of the factors
    for (int i = 0; i < count; ++i) {
        const GivenFactors &own = given[i];
        const bool is_further = // expert of a place
            i > 0 && own.layer == given[i - 1].layer && own.slot == given[i - 1].slot;
        if (!is_further) {
            auto pair = std::make_unique<LowRankPair>();
            pair->a.shape(format, rows_of_experts(own.num_experts, own.a_rows), own.a_cols);
            pair->b.shape(format, rows_of_experts(own.num_experts, own.b_rows), own.b_cols);
            pair->scale = own.scale;
            places_.push_back({own.layer, own.slot, std::move(pair)});
        }
        places[i] = int(places_.size()) - 1;
    }
    find_room();
    for (int i = 0; i < count; ++i) {
        add(*places_[places[i]].pair, given[i]);
    }
}

void Adapter::find_room() {
    size_t size = 0;
    for (const Place &place : places_) {
        size += place.pair->a.num_bytes() + place.pair->b.num_bytes();
    }
    memory_.allocate(size);
    auto *next = memory_.as<uint8_t>();
    const auto put = [&](Matrix &matrix) {
        matrix.packed.borrow(next);
        next += matrix.num_bytes();
    };
    for (size_t i = 0, end; i < places_.size(); i = end) {
        int column = 0;
        for (end = i; end < places_.size() && places_[end].layer == places_[i].layer; ++end) {
            LowRankPair &pair = *places_[end].pair;
            put(pair.a);
            pair.column = std::exchange(column, column + padded(pair.b.cols));
        }
        for (size_t own = i; own < end; ++own) {
            put(places_[own].pair->b);
        }
    }
}

void Adapter::add(LowRankPair &pair, const GivenFactors &own) {
    const int first_row = own.expert * padded(own.b_rows);
    pack_numbers(pair.a, own.expert * padded(own.a_rows), own.a_rows, own.a);
    pack_numbers(pair.b, first_row, own.b_rows, own.b);
    if (own.gain) {
        pair.gain.resize(pair.b.rows, 1.0f);
        std::copy_n(own.gain, own.b_rows, pair.gain.begin() + first_row);
    }
}

bool is_adapted(const std::vector<AdapterRun> &runs, const Matrix &weight) {
    return any_pair(runs, weight) != nullptr;
}

bool adapters_read_floats(const StepState &state, const Matrix &weight) {
    const LowRankPair *pair = any_pair(state.token_runs, weight);
    return pair && !is_rounded(state, *pair);
}

bool adapters_read_bf16(const StepState &state, const Matrix &weight) {
    const LowRankPair *pair = any_pair(state.token_runs, weight);
    return pair && is_rounded(state, *pair);
}

void shrink(StepState &state, std::initializer_list<AdaptedProducts> groups) {
    const int num_threads = state.model.pool.num_threads();
    std::vector<Shrinking> tasks;
    int first_column = INT_MAX, end_column = 0;
    size_t num_rows = 0;
    for (const AdaptedProducts &group : groups) {
        num_rows += group.rows;
        for (const AdapterRun &run : group.runs) {
            // Products that are joined have one task, so threads may want them apart.
            add_tasks(group, run, int(group.runs.size()) >= num_threads, tasks);
        }
    }
    for (const Shrinking &task : tasks) {
        for (int i = 0; i < task.num_products; ++i) {
            const LowRankPair &pair = *pair_of(task.products[i]->weight, task.adapter);
            first_column = std::min(first_column, pair.column);
            end_column = std::max(end_column, pair.column + pair.b.cols);
        }
    }
    if (tasks.empty()) {
        return;
    }
    const int stride = stride_of(end_column - first_column);
    float *room = state.model.workspace.shrunk.floats(num_rows * stride);
    for (const AdaptedProducts &group : groups) {
        for (Linear *product : group.products) {
            product->shrunk = {&group.runs, room, stride, first_column};
        }
        room += size_t(group.rows) * stride;
    }
    state.model.pool.run(int(tasks.size()),
                         [&](int task, int thread) { run(state, tasks[task], thread); });
}

void add_to_embedding(const StepState &state, int token, int index, float *embedding) {
    const auto run =
        std::find_if(state.token_runs.begin(), state.token_runs.end(), [&](const AdapterRun &run) {
            return token >= run.first && token < run.first + run.rows;
        });
    const LowRankPair *pair =
        run == state.token_runs.end() ? nullptr : pair_of(state.model.adapted_embed, run->adapter);
    if (!pair) {
        return;
    }
    const Kernels &kernels = *state.model.kernels;
    float *row = state.sublayer + size_t(token) * state.hidden_stride;
    unpack_row(pair->b, index, row);
    if (pair->a.rows == 0) {
        kernels.add(row, pair->scale, pair->b.cols, embedding);
        return;
    }
    kernels.scale(row, pair->scale, pair->b.cols, row);
    kernels.gemm(pair->a.format, operands_of(pair->a, 0, row, 0, embedding, 0, true), 1,
                 blocks_of(pair->a.rows), nullptr);
}

void expand(StepState &state, const Linear &p, const ProductPart &part, float *out,
            int out_stride) {
    if (!p.shrunk.rows) {
        return;
    }
    const Kernels &kernels = *state.model.kernels;
    const std::vector<AdapterRun> &runs = *p.shrunk.runs;
    const int column = part.block * lanes;
    const int width = std::min(part.blocks * lanes, p.weight.rows - column);
    const int end_row = part.row + part.rows;
    // The factors of the i-th run, if it has rows of the part.
    const auto pair_at = [&](size_t i) {
        const bool is_here = runs[i].first < end_row && runs[i].first + runs[i].rows > part.row;
        return is_here ? pair_of(p.weight, runs[i].adapter) : nullptr;
    };
    const auto next_from = [&](size_t i) {
        while (i < runs.size() && !pair_at(i)) {
            ++i;
        }
        return i;
    };
    const size_t first = next_from(0);
    for (size_t i = first, next; i < runs.size(); i = next) {
        next = next_from(i + 1);
        const LowRankPair &pair = *pair_at(i);
        const auto bytes = ptrdiff_t(block_bytes(pair.b.format, pair.b.cols));
        const uint8_t *later = next < runs.size() ? pair_at(next)->b.block(part.block)
                                                  : pair_at(first)->b.block(part.block) +
                                                        (part.next_block - part.block) * bytes;
        const int begin = std::max(runs[i].first, part.row);
        const int end = std::min(runs[i].first + runs[i].rows, end_row);
        float *sums = out + size_t(begin - part.row) * out_stride;
        multiply(state, pair,
                 operands_of(pair.b, part.block, p.shrunk.at(begin, pair), p.shrunk.stride, sums,
                             out_stride, true, later - pair.b.block(part.block)),
                 end - begin, part.blocks, part.thread);
        for (int row = begin; row < end && !pair.gain.empty(); ++row, sums += out_stride) {
            kernels.multiply(sums, pair.gain.data() + column, width, sums);
        }
    }
}

} // namespace headrace
