// The functions that cpu_executor.py calls through ctypes. Nothing is thrown out of them.
#include "cpu/step.h"

#include <algorithm>
#include <new>
#include <utility>

using headrace::Config;
using headrace::Format;
using headrace::LayerConfig;
using headrace::Model;
using headrace::RopeConfig;
using headrace::Step;

extern "C" {

const char *headrace_cpu_kernels() {
    return headrace::best_kernels();
}

// The bytes of the structs that follow: a caller of another version has other ones.
int32_t headrace_cpu_struct_bytes() {
    return sizeof(Config) + sizeof(LayerConfig) + sizeof(RopeConfig) + sizeof(Step);
}

// GELU of n numbers, a multiple of 16, in place: the one of layers.
void headrace_cpu_gelu(float *x, int32_t n) {
    headrace::find_kernels(headrace::Isa::best)->activate(headrace::Gate::gelu, x, n);
}

// out = (x - mean) / std * weight + bias of each row, [rows, cols]: the LayerNorm of layers.
void headrace_cpu_layer_norm(const float *x, const float *weight, const float *bias, int32_t rows,
                             int32_t cols, float eps, float *out) {
    const headrace::Kernels *kernels = headrace::find_kernels(headrace::Isa::best);
    for (int64_t row = 0; row < rows; row++) {
        float *to = out + row * cols;
        kernels->norm(x + row * cols, weight, cols, eps, true, to);
        kernels->add(bias, 1.0f, cols, to);
    }
}

// Null when memory does not suffice. Pages and states lie in `memory`, unless that is null.
void *headrace_cpu_create(const Config *config, const LayerConfig *layers, const RopeConfig *ropes,
                          void *memory) {
    try {
        return new Model(*config, layers, ropes, memory);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void headrace_cpu_destroy(void *model) {
    delete static_cast<Model *>(model);
}

// The instruction set in use, as `Isa`; 0 when this processor lacks the one asked for.
int32_t headrace_cpu_isa(void *model) {
    const auto *kernels = static_cast<Model *>(model)->kernels;
    return kernels ? int32_t(kernels->isa) : 0;
}

// Write where the time of steps went since the last call, [StepPart]; the first call begins.
void headrace_cpu_step_seconds(void *model, double *seconds) {
    headrace::StepClock &clock = static_cast<Model *>(model)->pool.clock;
    clock.is_on = true;
    for (double &noted : clock.seconds) {
        *seconds++ = std::exchange(noted, 0.0);
    }
}

// Layer -1 holds `embed` (slot 0), `head` (1), `positions` (2) and `token_types` (3). Returns
// whether there was memory.
int32_t headrace_cpu_allocate(void *model, int32_t layer, int32_t slot, int32_t format,
                              int32_t rows, int32_t cols) {
    try {
        static_cast<Model *>(model)->matrix(layer, slot).allocate(Format(format), rows, cols);
        return 1;
    } catch (const std::bad_alloc &) {
        return 0;
    }
}

// What a matrix takes, packed.
int64_t headrace_cpu_matrix_bytes(int32_t format, int32_t rows, int32_t cols) {
    return int64_t(headrace::blocks_of(rows)) *
           headrace::block_bytes(headrace::Format(format), cols);
}

// Whether products of fixed16 are faster here than those of fp32, or of bf16 with rounded
// activations.
int32_t headrace_cpu_prefers_fixed16(int32_t is_bf16) {
    const headrace::Kernels *kernels = headrace::find_kernels(headrace::Isa::best);
    return kernels->has_fast_fixed16 && !(is_bf16 && kernels->gemm_bf16);
}

// Whether a matrix of bf16, of which these are rows, is better stored as bf12.
int32_t headrace_cpu_suits_bf12(void *model, const void *source, int32_t num_rows, int32_t cols) {
    return static_cast<Model *>(model)->kernels->gemm_bf12 &&
           headrace::suits_bf12(static_cast<const uint16_t *>(source), num_rows, cols);
}

void headrace_cpu_pack_float(void *model, int32_t layer, int32_t slot, int32_t first_row,
                             int32_t num_rows, const float *source) {
    pack_float(static_cast<Model *>(model)->matrix(layer, slot), first_row, num_rows, source);
}

void headrace_cpu_pack_stored(void *model, int32_t layer, int32_t slot, int32_t first_row,
                              int32_t num_rows, const void *source) {
    pack_stored(static_cast<Model *>(model)->matrix(layer, slot), first_row, num_rows, source);
}

// Layer -1 holds the final norm (slot 0), its bias (1), that of the head (2), the norm of
// embeddings (3) and its bias (4). Vectors of experts are set one by one, from `first` on.
void headrace_cpu_set_vector(void *model, int32_t layer, int32_t slot, int32_t first,
                             const float *numbers, int32_t n) {
    std::vector<float> &vector = static_cast<Model *>(model)->vector(layer, slot);
    vector.resize(std::max(vector.size(), size_t(first) + n));
    std::copy_n(numbers, n, vector.begin() + first);
}

// Make it one of several, which meet in `group`. `first_tokens` has [ranks + 1] numbers.
void headrace_cpu_join(void *model, int32_t rank, int32_t num_ranks, void *group,
                       const int32_t *first_tokens, int32_t num_heads, int32_t num_kv_heads,
                       int32_t owns_keys) {
    static_cast<Model *>(model)->peers = {
        static_cast<headrace::ShmAllReduce *>(group),
        rank,
        std::vector<int>(first_tokens, first_tokens + num_ranks + 1),
        num_heads,
        num_kv_heads,
        owns_keys != 0};
}

// Have a model of EAGLE-3 draft from what enters [num_tapped] layers of another, which it outlives.
void headrace_cpu_draft_for(void *drafter, void *model, const int32_t *tapped) {
    Model &of = *static_cast<Model *>(model);
    of.drafter = static_cast<Model *>(drafter);
    std::copy_n(tapped, headrace::num_tapped, of.tapped.begin());
}

// The bytes of a struct that follows, as `headrace_cpu_struct_bytes`.
int32_t headrace_cpu_adapter_struct_bytes() {
    return sizeof(headrace::GivenFactors);
}

// An adapter of `count` factors, in layers and slots as `allocate` counts them, packed in a format.
// Null when memory does not suffice. It need not wait for a step.
void *headrace_cpu_adapter_create(int32_t format, const headrace::GivenFactors *factors,
                                  int32_t count) {
    try {
        return new headrace::Adapter(Format(format), factors, count);
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

// Of one that is not installed.
void headrace_cpu_adapter_destroy(void *adapter) {
    delete static_cast<headrace::Adapter *>(adapter);
}

// Give an adapter to the model, in a slot; null empties it. Waits for a running step.
void headrace_cpu_adapter_install(void *model, int32_t slot, void *adapter) {
    static_cast<Model *>(model)->install(
        slot, std::unique_ptr<headrace::Adapter>(static_cast<headrace::Adapter *>(adapter)));
}

// Give back what steps take beside weights and pages. Waits for a running step.
void headrace_cpu_rest(void *model) {
    static_cast<Model *>(model)->rest();
}

// 0, or 1 when the batch is out of range, 2 when memory does not suffice, 3 when a peer is lost.
int32_t headrace_cpu_step(void *model, const Step *step) {
    auto &decoder = *static_cast<Model *>(model);
    if (!is_valid(decoder, *step)) {
        return 1;
    }
    try {
        run_step(decoder, *step);
        return 0;
    } catch (const std::bad_alloc &) {
        return 2;
    } catch (const headrace::PeerLost &) {
        return 3;
    }
}

} // extern "C"
