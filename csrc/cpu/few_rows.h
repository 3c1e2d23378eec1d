// out[rows, 16 * blocks] = x[rows, cols] . packed blocks of bf16 or bf12, for few rows: memory
// bounds them, so they are multiplied while weights are unpacked. With more rows than these it is
// faster to unpack some blocks first, for all rows (products.cpp).
#pragma once
#include "cpu/operands.h"

namespace headrace {

constexpr int max_few_rows = 16;

#if defined(__x86_64__)

constexpr int max_rows_as_tiles = 2; // vectors read memory faster than tiles

// The same bits as the products of many rows give: those of fp32 (gemm.h), those of AMD's dot
// products of bf16, those of Intel's tiles (kernels_amx.cpp). `x` is as it is there.
void bf12_by_floats(const Operands &o, int rows, int num_blocks);
void bf12_by_dots(const Operands &o, int rows, int num_blocks);
void bf12_as_tiles(const Operands &o, int rows, int num_blocks);
void bf16_as_tiles(const Operands &o, int rows, int num_blocks);

// Blocks of bf12 as bf16.
void unpack_bf12(const uint8_t *blocks, int cols, int num_blocks, uint8_t *out);

#endif

} // namespace headrace
