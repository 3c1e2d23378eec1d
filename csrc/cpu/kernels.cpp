#include "cpu/kernels.h"

namespace headrace {

const Kernels *find_kernels(Isa isa) {
#if defined(__x86_64__)
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f");
    if (isa == Isa::avx512 || (isa == Isa::best && has_avx512)) {
        return has_avx512 ? &avx512_kernels : nullptr;
    }
    if (isa == Isa::avx2 || (isa == Isa::best && has_avx2)) {
        return has_avx2 ? &avx2_kernels : nullptr;
    }
#endif
    return isa == Isa::best || isa == Isa::portable ? &portable_kernels : nullptr;
}

} // namespace headrace
