#include "cpu/kernels.h"
#include "cpu/attention_amx.h"
#include "cpu/few_rows.h"
#include "cpu/kernels_amx.h"
#include "cpu/kernels_avx_vnni.h"
#include "cpu/kernels_neon.h"

#include <climits>

#if defined(__aarch64__)
#include <sys/auxv.h>
#else
#include <cpuid.h>
#endif

namespace headrace {

#if defined(__x86_64__)
namespace {

// Products that need no room to unpack.
template <void (*multiply)(const Operands &, int rows, int num_blocks)>
void few_rows(const Operands &o, int rows, int num_blocks, float *) {
    multiply(o, rows, num_blocks);
}

bool has_avx_vnni() {
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax & 1 << 4;
}

// AVX2, and what this processor has beside it.
const Kernels &avx2_here() {
    return has_avx_vnni() ? avx_vnni_kernels() : avx2_kernels;
}

// What this processor has of AVX-512: before Cascade Lake products of integers are AVX2's. With
// tiles, all products of bf16 are theirs, and those of integers of many rows. Without them,
// products of bf16 are products of floats but on AMD. Intel's vectors of bf16 run at half the flops
// of fp32 (Xeon, family 6 model 207).
const Kernels &avx512_here() {
    static const Kernels kernels = [] {
        Kernels mixed = avx512_kernels;
        if (!__builtin_cpu_supports("avx512vnni")) {
            mixed.gemm_int16 = avx2_kernels.gemm_int16;
            mixed.gemm_int8 = avx2_kernels.gemm_int8;
            mixed.quantize_row = avx2_kernels.quantize_row;
            mixed.gemm_fixed16 = avx2_kernels.gemm_fixed16;
        }
        mixed.has_fast_fixed16 = mixed.gemm_fixed16 == avx512_kernels.gemm_fixed16;
        const bool has_bf16 = __builtin_cpu_supports("avx512bf16");
        if (has_bf16 && may_use_tiles()) {
            mixed.gemm_int16 = gemm_int16_by_tiles;
            mixed.gemm_int8 = gemm_int8_by_tiles;
            mixed.gemm_bf16 = gemm_bf16_by_tiles;
            mixed.pack_rows = pack_rows_as_tiles;
            mixed.pack_groups = pack_groups_as_tiles;
            mixed.reads_bands = tiles_read_bands;
            mixed.attend_segment = attend_segment_by_tiles;
        } else if (!has_bf16 || !__builtin_cpu_is("amd")) {
            mixed.gemm_bf16 = nullptr;
            mixed.round_row = mixed.round_to_floats;
            mixed.rounds_attention = false;
        }
        if (__builtin_cpu_supports("avx512vbmi")) {
            mixed.gemm_bf12 = bf12_by_floats;
            mixed.unpack_bf12 = unpack_bf12;
            if (mixed.gemm_bf16 == gemm_bf16_by_tiles) {
                mixed.gemm_bf12_rounded = gemm_bf12_by_tiles;
                mixed.max_rounded_bf12 = INT_MAX;
            } else {
                mixed.gemm_bf12_rounded =
                    mixed.gemm_bf16 ? few_rows<bf12_by_dots> : few_rows<bf12_by_floats>;
                mixed.max_rounded_bf12 = max_few_rows;
            }
        }
        return mixed;
    }();
    return kernels;
}

} // namespace
#elif defined(__aarch64__)
namespace {

// Of Linux's arm64 ABI; the C library's headers may be older than the processor.
constexpr unsigned long hwcap_asimddp = 1 << 20, hwcap2_i8mm = 1 << 13, hwcap2_bf16 = 1 << 14;

bool has_dots() {
    return getauxval(AT_HWCAP) & hwcap_asimddp;
}

bool has_i8mm() {
    return has_dots() && getauxval(AT_HWCAP2) & hwcap2_i8mm;
}

bool has_bf16() {
    return getauxval(AT_HWCAP2) & hwcap2_bf16;
}

// NEON, and what this processor has beside it.
const Kernels &neon_here() {
    static const Kernels kernels = [] {
        Kernels mixed = neon_kernels;
        if (has_dots()) {
            mixed.gemm_int16 = has_i8mm() ? gemm_int16_by_matrices : gemm_int16_by_dots;
            mixed.gemm_int8 = has_i8mm() ? gemm_int8_by_matrices : gemm_int8_by_dots;
            mixed.quantize_row = quantize_row_for_dots;
        }
        if (has_bf16()) {
            mixed.gemm_bf16 = gemm_bf16_by_dots;
            mixed.round_row = round_row_to_pairs;
            mixed.attend_segment = attend_segment_by_dots;
            mixed.rounds_attention = true;
        }
        return mixed;
    }();
    return kernels;
}

} // namespace
#endif

const char *best_kernels() {
#if defined(__x86_64__)
    const Kernels *best = find_kernels(Isa::best);
    if (best->isa == Isa::avx512) {
        if (best->gemm_bf16 == nullptr) {
            const bool has_vnni = best->gemm_int16 == avx512_kernels.gemm_int16;
            return has_vnni ? "avx512" : "avx512 without vnni";
        }
        return best->gemm_bf16 == gemm_bf16_by_tiles ? "avx512 with amx" : "avx512 with bf16";
    }
    if (best->isa == Isa::avx2) {
        return has_avx_vnni() ? "avx2 with vnni" : "avx2";
    }
#elif defined(__aarch64__)
    if (has_i8mm() && has_dots()) {
        return has_bf16() ? "neon with i8mm and bf16" : "neon with i8mm";
    }
    if (has_dots()) {
        return has_bf16() ? "neon with dot products and bf16" : "neon with dot products";
    }
    return has_bf16() ? "neon with bf16" : "neon";
#endif
    return "portable";
}

const Kernels *find_kernels(Isa isa) {
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512bw");
    if (isa == Isa::avx512 || (isa == Isa::best && has_avx512)) {
        return has_avx512 ? &avx512_here() : nullptr;
    }
    if (isa == Isa::avx2 || (isa == Isa::best && has_avx2)) {
        return has_avx2 ? &avx2_here() : nullptr;
    }
#elif defined(__aarch64__)
    if (isa == Isa::neon || isa == Isa::best) {
        return &neon_here();
    }
#endif
    return isa == Isa::best || isa == Isa::portable ? &portable_kernels : nullptr;
}

} // namespace headrace
