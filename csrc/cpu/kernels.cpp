#include "cpu/kernels.h"

namespace headrace {

#if defined(__x86_64__)
namespace {

// Skylake's: its 8-bit products are those of AVX2.
const Kernels &avx512_without_vnni() {
    static const Kernels kernels = [] {
        Kernels mixed = avx512_kernels;
        mixed.gemm_int8 = avx2_kernels.gemm_int8;
        return mixed;
    }();
    return kernels;
}

} // namespace
#endif

const Kernels *find_kernels(Isa isa) {
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f");
    if (isa == Isa::avx512 || (isa == Isa::best && has_avx512)) {
        return !has_avx512                            ? nullptr
               : __builtin_cpu_supports("avx512vnni") ? &avx512_kernels
                                                      : &avx512_without_vnni();
    }
    if (isa == Isa::avx2 || (isa == Isa::best && has_avx2)) {
        return has_avx2 ? &avx2_kernels : nullptr;
    }
#endif
    return isa == Isa::best || isa == Isa::portable ? &portable_kernels : nullptr;
}

} // namespace headrace
