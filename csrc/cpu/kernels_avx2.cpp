#if defined(__x86_64__)
#include "cpu/operands.h"

#include <cstring>

#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c")
#include "cpu/avx2_vectors.h"

namespace headrace {

const Kernels avx2_kernels = kernels_over<Avx2>(Isa::avx2);

} // namespace headrace
#endif
