#if defined(__aarch64__)
#include "cpu/operands.h"

#include <cstring>

#include <arm_neon.h>
#pragma GCC target("arch=armv8.2-a+dotprod")
#include "cpu/kernels_neon.h"
#include "cpu/neon_dots.h"

namespace headrace {

void gemm_int16_by_dots(Format format, const Int16Operands &o, int rows, int num_blocks,
                        void *room) {
    gemm_int16<NeonDot>(format, o, rows, num_blocks, room);
}

void gemm_int8_by_dots(const Int16Operands &o, int rows, int num_blocks, void *room) {
    gemm_int8<NeonByteDot>(o, rows, num_blocks, room);
}

void quantize_row_for_dots(const float *x, int cols, Rounding to, Int16Group *groups) {
    quantize_row<NeonDot>(x, cols, to, groups);
}

} // namespace headrace
#endif
