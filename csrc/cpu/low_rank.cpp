#include "cpu/low_rank.h"
#include "cpu/products.h"

namespace headrace {

namespace {

constexpr int rows_per_task = 32;

// Factors that meet some rows of a product.
struct Shrinking {
    const Linear *product;
    const LowRankPair *pair;
    int first, rows;
};

const LowRankPair *pair_of(const Matrix &weight, int adapter) {
    return size_t(adapter) < weight.low_rank.size() ? weight.low_rank[adapter] : nullptr;
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

void run(const StepState &state, const Shrinking &s, int thread) {
    const Kernels &kernels = *state.model.kernels;
    const Linear &p = *s.product;
    const Matrix &a = s.pair->a;
    float *out = p.shrunk.rows + size_t(s.first) * p.shrunk.stride;
    if (a.rows > 0) {
        const Operands operands =
            operands_of(a, 0, p.x.row(s.first), p.x.stride, out, p.shrunk.stride, false);
        kernels.gemm(a.format, operands, s.rows, blocks_of(a.rows),
                     state.model.workspace.scratch[thread].as<float>());
    }
    for (int i = 0; i < s.rows; ++i, out += p.shrunk.stride) {
        const float *factors = a.rows > 0 ? out : p.x.row(s.first + i);
        kernels.scale(factors, s.pair->scale, s.pair->b.cols, out);
    }
}

} // namespace

Adapter::Adapter(Format format, const GivenFactors *given, int count) {
    size_t size = 0;
    for (int i = 0; i < count; ++i) {
        size += packed_bytes(format, given[i].a_rows, given[i].a_cols) +
                packed_bytes(format, given[i].b_rows, given[i].b_cols);
    }
    memory_.allocate(size);
    auto *next = memory_.as<uint8_t>();
    const auto pack = [&](Matrix &matrix, int rows, int cols, const NumberRows &source) {
        matrix.borrow(format, rows, cols, next);
        pack_numbers(matrix, 0, rows, source);
        next += packed_bytes(format, rows, cols);
    };
    for (int i = 0; i < count; ++i) {
        const GivenFactors &own = given[i];
        auto pair = std::make_unique<LowRankPair>();
        pack(pair->a, own.a_rows, own.a_cols, own.a);
        pack(pair->b, own.b_rows, own.b_cols, own.b);
        pair->scale = own.scale;
        if (own.gain) {
            pair->gain.assign(own.gain, own.gain + own.b_rows);
        }
        places_.push_back({own.layer, own.slot, std::move(pair)});
    }
}

bool is_adapted(const std::vector<AdapterRun> &runs, const Matrix &weight) {
    return std::any_of(runs.begin(), runs.end(), [&](const AdapterRun &run) {
        return pair_of(weight, run.adapter) != nullptr;
    });
}

void shrink(StepState &state, const std::vector<AdapterRun> &runs, int rows,
            const std::vector<Linear *> &products) {
    std::vector<Shrinking> tasks;
    int max_rank = 0;
    for (Linear *product : products) {
        for (const AdapterRun &run : runs) {
            const LowRankPair *pair = pair_of(product->weight, run.adapter);
            for (int i = 0; pair && i < run.rows; i += rows_per_task) {
                const int count = std::min(rows_per_task, run.rows - i);
                tasks.push_back({product, pair, run.first + i, count});
                max_rank = std::max(max_rank, pair->b.cols);
            }
        }
    }
    if (tasks.empty()) {
        return;
    }
    const int stride = stride_of(max_rank);
    const size_t size = size_t(rows) * stride;
    float *room = state.model.workspace.shrunk.floats(products.size() * size);
    for (Linear *product : products) {
        product->shrunk = {&runs, room, stride};
        room += size;
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
        kernels.gemm(pair->b.format,
                     operands_of(pair->b, part.block, x, p.shrunk.stride, sums, out_stride, true),
                     end - begin, part.blocks,
                     state.model.workspace.scratch[part.thread].as<float>());
        for (int i = begin; i < end && !pair->gain.empty(); ++i, sums += out_stride) {
            kernels.multiply(sums, pair->gain.data() + column, width, sums);
        }
    }
}

} // namespace headrace
