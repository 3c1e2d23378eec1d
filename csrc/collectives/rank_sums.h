// Sums over ranks: out[i] = ((x0[i] + x1[i]) + x2[i]) + ..., in fp32, rounded once at the end.
//
// Every instruction set gives the same bits, NaNs included: there is one of them.
#pragma once
#include "cpu/kernels.h" // Isa

#include <cstddef>
#include <cstdint>

namespace headrace {

enum class Number : int32_t { fp32, fp16, bf16 };

inline size_t bytes_of(Number number) {
    return number == Number::fp32 ? 4 : 2;
}

struct RankSums {
    Isa isa;
    // `out` may be one of `terms`. Nothing needs to be aligned but to its own size.
    void (*add)(Number, const void *const *terms, int num_terms, size_t n, void *out);
};

// Null when this processor, or this build, lacks the instruction set.
const RankSums *find_rank_sums(Isa isa);

} // namespace headrace
