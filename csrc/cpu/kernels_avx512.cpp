#if defined(__x86_64__)
#include "cpu/operands.h"

#include <cstring>

// GCC 12 takes the undefined operand of its own intrinsics for a variable of ours.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vnni,avx512bf16,avx2,fma,f16c")
#include "cpu/avx512_vectors.h"
#include "cpu/kernels.h"

namespace headrace {

const Kernels avx512_kernels = kernels_over<Avx512, Avx512Byte>(Isa::avx512);

} // namespace headrace
#endif
