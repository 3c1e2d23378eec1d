// Products by Intel's tiles (AMX), which the system lets a process use that asks for them.
#pragma once
#include "cpu/operands.h"

namespace headrace {

// Whether this processor has tiles for bf16 and int8; then this process may use them from now on.
bool may_use_tiles();

// As `gemm_bf16`, `gemm_bf12_rounded` and `pack_rows` of Kernels; the second always from zero.
// `ahead` is for short blocks alone. Of 33 to 256 rows, each slab of two blocks is unpacked once.
// Wide rows are multiplied some columns at a time.
void gemm_bf16_by_tiles(const Operands &o, int rows, int num_blocks, void *room);
void gemm_bf12_by_tiles(const Operands &o, int rows, int num_blocks, float *room);
void pack_rows_as_tiles(const float *x, int x_stride, int rows, int cols, uint8_t *tiles);

// As `gemm_int16`, `gemm_int8`, `pack_groups` and `reads_bands` of Kernels. Products of few rows
// are the vectors'.
void gemm_int16_by_tiles(Format format, const Int16Operands &o, int rows, int num_blocks,
                         void *room);
void gemm_int8_by_tiles(const Int16Operands &o, int rows, int num_blocks, void *room);
void pack_groups_as_tiles(const Int16Group *x, int x_stride, int rows, int num_groups,
                          uint8_t *band);
bool tiles_read_bands(Format format, int activation_bits, int rows);

} // namespace headrace
