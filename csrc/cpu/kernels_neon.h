// What some arm64 processors have beside NEON: members of Kernels that replace those of
// `neon_kernels`.
#pragma once
#include "cpu/kernels.h"

namespace headrace {

#if defined(__aarch64__)

// By dot products of four bytes (FEAT_DotProd). All three go together: activations have an order
// of their own.
void gemm_int16_by_dots(Format, const Int16Operands &, int rows, int num_blocks, void *room);
void gemm_int8_by_dots(const Int16Operands &, int rows, int num_blocks, void *room);
void quantize_row_for_dots(const float *x, int cols, Rounding, Int16Group *groups);

// The same products, of several rows by those of small matrices (FEAT_I8MM). Equal bits: sums of
// integers have no order.
void gemm_int16_by_matrices(Format, const Int16Operands &, int rows, int num_blocks, void *room);
void gemm_int8_by_matrices(const Int16Operands &, int rows, int num_blocks, void *room);

// By products of bf16 (FEAT_BF16), which round their sums otherwise than fp32.
void gemm_bf16_by_dots(const Operands &, int rows, int num_blocks, void *room);
void round_row_to_pairs(const float *x, int cols, float *out);
void attend_segment_by_dots(const AttentionTile &, int segment, float *scores, const Partial &);

#endif

} // namespace headrace
