// What adapters (LoRA) add to products: out = gain * (W x + B (scale * A x)), by each row's own.
//
// A row's A x is computed before the phase of its product (shrink). Tasks of the product add B
// (expand) to what they have just computed, while it is in the cache. Every sum runs in one order,
// so batch mates, chunks and threads change no bits of a row. With some rows for each of many
// adapters the factors are read about as fast as memory can, so what is read next is fetched.
#pragma once
#include "cpu/matrix.h"

#include <initializer_list>
#include <memory>
#include <vector>

namespace headrace {

struct StepState;
struct Linear;
struct ProductPart;

// The factors for one weight [rows, cols]; of several workers, for this one's share. Those of
// experts lie as their weights do: each expert's begin with a whole block, of `a` and of `b`.
struct LowRankPair {
    Matrix a; // [rank, cols], of embeddings [cols, rank]; without rows it is the identity
    Matrix b; // [rows, rank]
    float scale = 1.0f;
    std::vector<float> gain; // [rows], of DoRA; empty: none
    int column = 0;          // of A x, behind those of the layer's matrices before
};

// Consecutive rows of one adapter, and of one local expert. Rows without an adapter are in no run.
struct AdapterRun {
    int first, rows, adapter;
    int expert = 0;
};

// A x of the rows of a product, scaled, rounded as `x` is. Null rows: no adapter of the step
// changes the product.
struct Shrunk {
    const std::vector<AdapterRun> *runs = nullptr;
    float *rows = nullptr; // [rows, stride], from `first_column` on
    int stride = 0, first_column = 0;

    float *at(int row, const LowRankPair &pair) const {
        return rows + size_t(row) * stride + pair.column - first_column;
    }
};

// The factors for the weight of a layer and slot as they are given, see LowRankPair. `gain` may be
// null. Of experts, those of one place follow each other, with one rank and one scale.
struct GivenFactors {
    int32_t layer, slot, expert, num_experts; // 0 and 1 where there are none
    int32_t a_rows, a_cols, b_rows, b_cols;
    float scale;
    NumberRows a, b;
    const float *gain;
};

// An adapter: its factors, by the layers and slots of their weights. See Model::install. All lie in
// one buffer: the system limits the mappings of a process. Each A of a layer lies behind the one
// before, so those that multiply the same rows may be multiplied as one matrix.
class Adapter {
public:
    // Factors are in the order of layers and slots. Throws std::bad_alloc.
    Adapter(Format format, const GivenFactors *given, int count);

    struct Place {
        int layer, slot;
        std::unique_ptr<LowRankPair> pair;
    };
    const std::vector<Place> &places() const { return places_; }

private:
    void find_room();
    void add(LowRankPair &pair, const GivenFactors &own);

    Buffer memory_;
    std::vector<Place> places_;
};

// The runs of so many rows, of which row i is of the sequence sequence_of(i).
template <class SequenceOf>
std::vector<AdapterRun> adapter_runs(const int32_t *adapters, int rows,
                                     const SequenceOf &sequence_of) {
    std::vector<AdapterRun> runs;
    for (int i = 0; adapters && i < rows; ++i) {
        const int adapter = adapters[sequence_of(i)];
        if (adapter < 0) {
            continue;
        }
        if (!runs.empty() && runs.back().adapter == adapter &&
            runs.back().first + runs.back().rows == i) {
            ++runs.back().rows;
        } else {
            runs.push_back({i, 1, adapter});
        }
    }
    return runs;
}

// Whether an adapter of some rows changes products with a weight.
bool is_adapted(const std::vector<AdapterRun> &runs, const Matrix &weight);

// Whether adapters of the step read what a weight multiplies as it is, or as bf16. They round where
// all activations are rounded, and factors are bf16. See round_activations.
bool adapters_read_floats(const StepState &state, const Matrix &weight);
bool adapters_read_bf16(const StepState &state, const Matrix &weight);

// Products of the same rows, which they read as the same activations.
struct AdaptedProducts {
    const std::vector<AdapterRun> &runs;
    int rows;
    std::vector<Linear *> products;
};

// One phase for products that run in one phase: fill their `shrunk`.
void shrink(StepState &state, std::initializer_list<AdaptedProducts> groups);

// Add to a token's embedding, [hidden], which is row `index` of the table.
void add_to_embedding(const StepState &state, int token, int index, float *embedding);

// Add to part of a product, [rows of the part, stride], before its bias.
void expand(StepState &state, const Linear &product, const ProductPart &part, float *out,
            int out_stride);

} // namespace headrace
