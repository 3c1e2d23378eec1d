// GGUF's block formats: from rows as stored to packed blocks (matrix.h), and single numbers back.
#pragma once
#include "cpu/matrix.h"

namespace headrace {

// Store one row in lane `lane` of a zeroed packed block. Returns the end of the row's source.
const uint8_t *pack_gguf_row(Format format, int cols, const uint8_t *source, uint8_t *block,
                             int lane);

float gguf_number(Format format, const uint8_t *block, int lane, int col);

} // namespace headrace
