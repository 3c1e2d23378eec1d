#include "cpu/low_rank.h"
#include "cpu/products.h"

namespace headrace {

namespace {

constexpr int rows_per_task = 32;

// Factors that meet some rows of a product.
struct Shrinking {
    const Linear *product;
    const LowRankPair *pair;
    int first, rows, expert;
};

const LowRankPair *pair_of(const Matrix &weight, int adapter) {
    return size_t(adapter) < weight.low_rank.size() ? weight.low_rank[adapter] : nullptr;
}

// Rows of all experts, each from a whole block on.
int rows_of_experts(int num_experts, int rows) {
    return (num_experts - 1) * padded(rows) + rows;
}

Operands operands_of(const Matrix &factor, int block, const float *x, int x_stride, float *out,
                     int out_stride, bool accumulate) {
    return {factor.block(block),
            block_bytes(factor.format, factor.cols),
            factor.cols,
            x,
            x_stride,
            out,
            out_stride,
            accumulate,
            prefetch_bytes};
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
    const Linear &p = *s.product;
    const Matrix &a = s.pair->a, &b = s.pair->b;
    const bool rounds = is_rounded(state, *s.pair);
    float *out = p.shrunk.rows + size_t(s.first) * p.shrunk.stride;
    if (a.rows > 0) {
        const float *x = (rounds ? p.x.rounded : p.x.rows) + size_t(s.first) * p.x.stride;
        const int blocks = blocks_of(b.cols);
        multiply(state, *s.pair,
                 operands_of(a, s.expert * blocks, x, p.x.stride, out, p.shrunk.stride, false),
                 s.rows, blocks, thread);
    }
    for (int i = 0; i < s.rows; ++i, out += p.shrunk.stride) {
        kernels.scale(a.rows > 0 ? out : p.x.row(s.first + i), s.pair->scale, b.cols, out);
        if (rounds) {
            kernels.round_row(out, b.cols, out);
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
    const auto is_further = [&](int i) { // expert of a place
        return i > 0 && given[i].layer == given[i - 1].layer && given[i].slot == given[i - 1].slot;
    };
    size_t size = 0;
    for (int i = 0; i < count; ++i) {
        const GivenFactors &own = given[i];
        if (!is_further(i)) {
            size += packed_bytes(format, rows_of_experts(own.num_experts, own.a_rows), own.a_cols) +
                    packed_bytes(format, rows_of_experts(own.num_experts, own.b_rows), own.b_cols);
        }
    }
    memory_.allocate(size);
    auto *next = memory_.as<uint8_t>();
    const auto place = [&](Matrix &matrix, int rows, int cols) {
        matrix.borrow(format, rows, cols, next);
        next += packed_bytes(format, rows, cols);
    };
    for (int i = 0; i < count; ++i) {
        const GivenFactors &own = given[i];
        if (!is_further(i)) {
            places_.push_back({own.layer, own.slot, std::make_unique<LowRankPair>()});
            LowRankPair &pair = *places_.back().pair;
            place(pair.a, rows_of_experts(own.num_experts, own.a_rows), own.a_cols);
            place(pair.b, rows_of_experts(own.num_experts, own.b_rows), own.b_cols);
            pair.scale = own.scale;
        }
        add(own);
    }
}

void Adapter::add(const GivenFactors &own) {
    LowRankPair &pair = *places_.back().pair;
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
    std::vector<Shrinking> tasks;
    int max_rank = 0;
    size_t num_rows = 0;
    for (const AdaptedProducts &group : groups) {
        for (Linear *product : group.products) {
            num_rows += group.rows;
            for (const AdapterRun &run : group.runs) {
                const LowRankPair *pair = pair_of(product->weight, run.adapter);
                for (int i = 0; pair && i < run.rows; i += rows_per_task) {
                    const int count = std::min(rows_per_task, run.rows - i);
                    tasks.push_back({product, pair, run.first + i, count, run.expert});
                    max_rank = std::max(max_rank, pair->b.cols);
                }
            }
        }
    }
    if (tasks.empty()) {
        return;
    }
    const int stride = stride_of(max_rank);
    float *room = state.model.workspace.shrunk.floats(num_rows * stride);
    for (const AdaptedProducts &group : groups) {
        for (Linear *product : group.products) {
            product->shrunk = {&group.runs, room, stride};
            room += size_t(group.rows) * stride;
        }
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
    const int column = part.block * lanes;
    const int width = std::min(part.blocks * lanes, p.weight.rows - column);
    for (const AdapterRun &run : *p.shrunk.runs) {
        const LowRankPair *pair = pair_of(p.weight, run.adapter);
        const int begin = std::max(run.first, part.row);
        const int end = std::min(run.first + run.rows, part.row + part.rows);
        if (!pair || begin >= end) {
            continue;
        }
        float *sums = out + size_t(begin - part.row) * out_stride;
        const float *x = p.shrunk.rows + size_t(begin) * p.shrunk.stride;
        multiply(state, *pair,
                 operands_of(pair->b, part.block, x, p.shrunk.stride, sums, out_stride, true),
                 end - begin, part.blocks, part.thread);
        for (int i = begin; i < end && !pair->gain.empty(); ++i, sums += out_stride) {
            kernels.multiply(sums, pair->gain.data() + column, width, sums);
        }
    }
}

} // namespace headrace
