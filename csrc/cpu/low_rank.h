// What adapters (LoRA) add to products: out = gain * (W x + B (scale * A x)), by each row's own.
//
// A row's A x is computed before the phase of its product (shrink). Tasks of the product add B
// (expand) to what they have just computed, while it is in the cache. Every sum runs in one order,
// so batch mates, chunks and threads change no bits of a row.
#pragma once
#include "cpu/matrix.h"

#include <memory>
#include <vector>

namespace headrace {

struct StepState;
struct Linear;
struct ProductPart;

// The factors for one weight [rows, cols]; of several workers, for this one's share.
struct LowRankPair {
    Matrix a; // [rank, cols], of embeddings [cols, rank]; without rows it is the identity
    Matrix b; // [rows, rank]
    float scale = 1.0f;
    std::vector<float> gain; // [rows], of DoRA; empty: none
};

// Consecutive rows of one adapter. Rows without an adapter are in no run.
struct AdapterRun {
    int first, rows, adapter;
};

// A x of the rows of a product, scaled. Null rows: no adapter of the step changes the product.
struct Shrunk {
    const std::vector<AdapterRun> *runs = nullptr;
    float *rows = nullptr; // [rows, stride]
    int stride = 0;
};

// The factors for the weight of a layer and slot as they are given, see LowRankPair. `gain` may be
// null.
struct GivenFactors {
    int32_t layer, slot, a_rows, a_cols, b_rows, b_cols;
    float scale;
    NumberRows a, b;
    const float *gain;
};

// An adapter: its factors, by the layers and slots of their weights. See Model::install. All lie in
// one buffer: the system limits the mappings of a process.
class Adapter {
public:
    // Throws std::bad_alloc.
    Adapter(Format format, const GivenFactors *given, int count);

    struct Place {
        int layer, slot;
        std::unique_ptr<LowRankPair> pair;
    };
    const std::vector<Place> &places() const { return places_; }

private:
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

// One phase for products that run in one phase: fill their `shrunk`. They read `x` as floats.
void shrink(StepState &state, const std::vector<AdapterRun> &runs, int rows,
            const std::vector<Linear *> &products);

// Add to a token's embedding, [hidden], which is row `index` of the table.
void add_to_embedding(const StepState &state, int token, int index, float *embedding);

// Add to part of a product, [rows of the part, stride], before its bias.
void expand(StepState &state, const Linear &product, const ProductPart &part, float *out,
            int out_stride);

} // namespace headrace
