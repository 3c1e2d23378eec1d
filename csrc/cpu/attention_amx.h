// Attention in bf16 on processors with Intel's tiles (AMX).
#pragma once
#include "cpu/operands.h"

namespace headrace {

// As `attend_segment` of Kernels, where `may_use_tiles` (kernels_amx.h).
void attend_segment_by_tiles(const AttentionTile &, int segment, float *scores, const Partial &);

} // namespace headrace
