#if defined(__aarch64__)
#include "cpu/neon_vectors.h"

namespace headrace {

const Kernels neon_kernels = kernels_over<Neon>(Isa::neon);

} // namespace headrace
#endif
