// What some processors have beside AVX2 (AVX-VNNI: Alder Lake, Zen 5 and later): dot products of
// bytes and of pairs of 16 bits.
#pragma once
#include "cpu/kernels.h"

namespace headrace {

#if defined(__x86_64__)

// Those of AVX2, but for products of integers. Their bits are the same.
const Kernels &avx_vnni_kernels();

#endif

} // namespace headrace
