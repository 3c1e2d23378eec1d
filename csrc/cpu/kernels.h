// The operations that exist once per instruction set, and the choice among them.
//
// Each kernels_*.cpp defines sixteen lanes of fp32 its own way and instantiates the same templates
// over them. Everything else is compiled once, for the oldest processor.
#pragma once
#include "cpu/attention.h"
#include "cpu/delta_rule.h"
#include "cpu/gemm_fixed16.h"
#include "cpu/gemm_int16.h"
#include "cpu/latent_segment.h"
#include "cpu/rows.h"
#include "cpu/selective_scan.h"
#include "cpu/ssm.h"

namespace headrace {

enum class Isa : int32_t { best, portable, avx2, avx512, neon };
enum class Gate : int32_t { silu, gelu, gelu_tanh, relu2, xielu };

struct Kernels {
    Isa isa;
    void (*gemm)(Format, const Operands &, int rows, int num_blocks, float *decoded);
    // `room` is what panels take (gemm_panels.h).
    void (*gemm_int16)(Format, const Int16Operands &, int rows, int num_blocks, void *room);
    void (*gemm_int8)(const Int16Operands &, int rows, int num_blocks, void *room);
    void (*quantize_row)(const float *x, int cols, Rounding, Int16Group *groups);
    // See gemm_fixed16.h; whether it takes half the time of products of floats.
    void (*gemm_fixed16)(const Operands &, int rows, int num_blocks);
    void (*round_to_fixed16)(const float *x, int cols, float *out);
    bool has_fast_fixed16;
    // Null where such products are lacking or slow: rounded activations then remain floats.
    // `room` is as above.
    void (*gemm_bf16)(const Operands &, int rows, int num_blocks, void *room);
    // A band of up to `band_rows` rounded rows, for products of many. Null: they need none.
    void (*pack_rows)(const float *x, int x_stride, int rows, int cols, uint8_t *tiles);
    // Likewise a slab of a band of integers, and whether products of so many rows read bands.
    void (*pack_groups)(const Int16Group *x, int x_stride, int rows, int num_groups, uint8_t *band);
    bool (*reads_bands)(Format, int activation_bits, int rows);
    void (*round_row)(const float *x, int cols, float *out);
    void (*round_to_floats)(const float *x, int cols, float *out);
    // With activations as they are, of few rows (few_rows.h), and rounded, of at most so many.
    // Null: bf12 is not read.
    void (*gemm_bf12)(const Operands &, int rows, int num_blocks);
    void (*gemm_bf12_rounded)(const Operands &, int rows, int num_blocks, float *unpacked);
    int max_rounded_bf12;
    void (*unpack_bf12)(const uint8_t *blocks, int cols, int num_blocks, uint8_t *out);
    // Of one row, of any width; see rows.h.
    void (*norm)(const float *x, const float *weight, int n, float eps, bool layer_norm,
                 float *out);
    float (*squares)(const float *x, int n, float mean);
    void (*add)(const float *x, float multiplier, int n, float *sum);
    void (*scale)(const float *x, float factor, int n, float *out);
    void (*multiply)(const float *x, const float *y, int n, float *out);
    void (*convolve)(const ConvTap *taps, int num_taps, const float *bias, int n, float *out);
    void (*sigmoid_gate)(const float *gate, int n, float *out);
    void (*delta_rule)(const DeltaHead &); // see delta_rule.h
    void (*rotate)(float *head, int num_pairs, bool interleaved, const float *cos,
                   const float *sin);
    void (*store_head)(const HeadPlace &, const float *key, const float *value);
    bool rounds_attention; // attend_segment can multiply in bf16
    void (*attend_segment)(const AttentionTile &, int segment, float *scores, const Partial &);
    void (*attend_latent_segment)(const AttentionTile &, int segment, float *scores,
                                  const Partial &);
    void (*gate)(Gate, float *gate, const float *up, int n); // n a multiple of 16, in place
    void (*activate)(Gate, float *x, int n);                 // likewise, without a gate
    void (*xielu)(const Xielu &, float *x, int n);
    // The same of gpt-oss: (clamped up + 1) * x * sigmoid(beta * x), of the clamped gate x.
    void (*clamped_gate)(float clamp, float beta, float *gate, const float *up, int n);
    void (*softcap)(float cap, float *x, int n); // n a multiple of 16, in place
    // The largest of each block of 64; NaN counts as minus infinity.
    void (*block_maxima)(const float *logits, int n, float *maxima);
    void (*convolve_silu)(const ConvTap *taps, int num_taps, const float *bias, float multiplier,
                          int n, float *out);
    void (*update_ssm)(const SsmUpdate &);       // see ssm.h
    void (*update_channels)(const ScanUpdate &); // see selective_scan.h
};

// Null when this processor, or this build, lacks the instruction set.
const Kernels *find_kernels(Isa isa);

// What the best of them are, for people; asks the system for tiles, as they do.
const char *best_kernels();

template <class V> typename V::Floats activated(Gate kind, typename V::Floats x) {
    switch (kind) {
    case Gate::silu:
        return silu<V>(x);
    case Gate::gelu:
        return gelu<V>(x);
    case Gate::gelu_tanh:
        return gelu_tanh<V>(x);
    case Gate::relu2:
        return relu2<V>(x);
    case Gate::xielu: // is never a gate, and has a kernel of its own
        break;
    }
    return x;
}

template <class V> void apply_gate(Gate kind, float *gate, const float *up, int n) {
    for (int i = 0; i < n; i += lanes) {
        V::store(gate + i, V::mul(activated<V>(kind, V::load(gate + i)), V::load(up + i)));
    }
}

template <class V> void activate(Gate kind, float *x, int n) {
    for (int i = 0; i < n; i += lanes) {
        V::store(x + i, activated<V>(kind, V::load(x + i)));
    }
}

template <class V> void xielu(const Xielu &of, float *x, int n) {
    for (int i = 0; i < n; i += lanes) {
        V::store(x + i, xielu_of<V>(of, V::load(x + i)));
    }
}

template <class V>
void apply_clamped_gate(float clamp, float beta, float *gate, const float *up, int n) {
    const auto one = V::set(1.0f), zero = V::set(0.0f), high = V::set(clamp);
    for (int i = 0; i < n; i += lanes) {
        const auto x = V::min(V::load(gate + i), high);
        const auto y = V::max(V::min(V::load(up + i), high), V::sub(zero, high));
        const auto e = exp_of<V>(V::sub(zero, V::mul(x, V::set(beta))));
        const auto swish = V::div(x, V::add(one, e));
        V::store(gate + i, V::mul(V::add(y, one), swish));
    }
}

template <class V> void apply_softcap(float cap, float *x, int n) {
    for (int i = 0; i < n; i += lanes) {
        const auto capped = tanh_of<V>(V::mul(V::load(x + i), V::set(1.0f / cap)));
        V::store(x + i, V::mul(capped, V::set(cap)));
    }
}

// V::max of NaN and a number, in this order, is the number, on every instruction set.
template <class V> void block_maxima(const float *logits, int n, float *maxima) {
    const float lowest = -__builtin_inff();
    const float *const end = logits + n;
    for (; end - logits >= block_tokens; logits += block_tokens, ++maxima) {
        auto best = V::set(lowest);
        for (int i = 0; i < block_tokens; i += lanes) {
            best = V::max(V::load(logits + i), best);
        }
        *maxima = V::highest(best);
    }
    if (logits < end) {
        *maxima = lowest;
        for (; logits < end; ++logits) {
            *maxima = *logits > *maxima ? *logits : *maxima;
        }
    }
}

// `Byte` is V where activations have 8 bits.
template <class V, class Byte = V> constexpr Kernels kernels_over(Isa isa) {
    Kernels kernels{};
    kernels.isa = isa;
    kernels.gemm = gemm<V>;
    kernels.gemm_int16 = gemm_int16<V>;
    kernels.gemm_int8 = gemm_int8<Byte>;
    kernels.quantize_row = quantize_row<V>;
    kernels.gemm_fixed16 = gemm_fixed16<V>;
    kernels.round_to_fixed16 = round_to_fixed16<V>;
    if constexpr (V::has_bf16) {
        kernels.gemm_bf16 = [](const Operands &o, int rows, int num_blocks, void *) {
            gemm_bf16<V>(o, rows, num_blocks);
        };
    }
    kernels.round_row = round_row<V>;
    kernels.round_to_floats = round_to_floats<V>;
    kernels.norm = norm_row<V>;
    kernels.squares = squares_of<V>;
    kernels.add = add_row<V>;
    kernels.scale = scale_row<V>;
    kernels.multiply = multiply_elements<V>;
    kernels.convolve = convolve_row<V>;
    kernels.sigmoid_gate = sigmoid_gate_row<V>;
    kernels.delta_rule = apply_delta_rule<V>;
    kernels.rotate = rotate<V>;
    kernels.store_head = store_head<V>;
    kernels.rounds_attention = V::has_bf16;
    kernels.attend_segment = attend_segment<V>;
    kernels.attend_latent_segment = attend_latent_segment<V>;
    kernels.gate = apply_gate<V>;
    kernels.activate = activate<V>;
    kernels.xielu = xielu<V>;
    kernels.clamped_gate = apply_clamped_gate<V>;
    kernels.softcap = apply_softcap<V>;
    kernels.block_maxima = block_maxima<V>;
    kernels.convolve_silu = convolve_silu_row<V>;
    kernels.update_ssm = update_ssm<V>;
    kernels.update_channels = update_channels<V>;
    return kernels;
}

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_kernels;
#endif

} // namespace headrace
