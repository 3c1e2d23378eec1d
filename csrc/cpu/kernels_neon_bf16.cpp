#if defined(__aarch64__)
#include "cpu/operands.h"

#include <cstring>

#include <arm_neon.h>
#pragma GCC target("arch=armv8.2-a+bf16")
#include "cpu/kernels_neon.h"
#include "cpu/neon_vectors.h"

namespace headrace {

namespace {

struct NeonBf16 : Neon {
    static constexpr bool has_bf16 = true;

    INLINED bfloat16x8_t pairs(float32x4_t x) { return vreinterpretq_bf16_f32(x); }
    // The two products are added first, then the sum. Each rounds to odd, and denormals are zero.
    INLINED Floats add_dot(Floats x, Floats w, Floats sum) {
        return each(
            [&](int i) { return vbfdotq_f32(sum.part[i], pairs(x.part[i]), pairs(w.part[i])); });
    }
    INLINED Floats first_of_pairs(Floats x) {
        const uint32x4_t mask = vdupq_n_u32(0xffff);
        return each([&](int i) {
            return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x.part[i]), mask));
        });
    }
    INLINED void store_bf16(float *p, Floats low, Floats high) {
        for (int i = 0; i < 2; ++i) {
            const float32x4_t *first = low.part + 2 * i, *second = high.part + 2 * i;
            vst1q_f32(p + 4 * i, eight(first[0], first[1]));
            vst1q_f32(p + 8 + 4 * i, eight(second[0], second[1]));
        }
    }
    INLINED float32x4_t eight(float32x4_t first, float32x4_t second) {
        return vreinterpretq_f32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second));
    }
};

constexpr int lane_pairs = lanes / 2;

// Four columns of two rows.
bfloat16x8_t two_rows(const float *first, const float *second) {
    return NeonBf16::pairs(vcombine_f32(vld1_f32(first), vld1_f32(second)));
}

// Sums of two rows and two lanes in each vector.
template <int row_pairs> struct PairSums {
    float32x4_t sum[row_pairs][lane_pairs];

    void load(const Operands &o) {
        for (int m = 0; m < row_pairs; ++m) {
            const float *first = o.out + size_t(2 * m) * o.out_stride;
            for (int i = 0; i < lane_pairs; ++i) {
                sum[m][i] = o.accumulate ? vcombine_f32(vld1_f32(first + 2 * i),
                                                        vld1_f32(first + o.out_stride + 2 * i))
                                         : vdupq_n_f32(0.0f);
            }
        }
    }
    void store(const Operands &o) const {
        for (int m = 0; m < row_pairs; ++m) {
            float *first = o.out + size_t(2 * m) * o.out_stride;
            for (int i = 0; i < lane_pairs; ++i) {
                vst1_f32(first + 2 * i, vget_low_f32(sum[m][i]));
                vst1_f32(first + o.out_stride + 2 * i, vget_high_f32(sum[m][i]));
            }
        }
    }
    // Four columns at a time: two dot products of pairs, one after the other, as add_dot.
    void add(const Operands &o) {
        const uint8_t *weights = o.blocks;
        const float *x = o.x;
        for (int k = 0; k + 4 <= o.cols; k += 4, weights += 2 * lanes * 4, x += 2) {
            __builtin_prefetch(weights + o.ahead);
            __builtin_prefetch(weights + o.ahead + 64);
            bfloat16x8_t rows[row_pairs];
#pragma GCC unroll 3
            for (int m = 0; m < row_pairs; ++m) {
                const float *first = x + size_t(2 * m) * o.x_stride;
                rows[m] = two_rows(first, first + o.x_stride);
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const uint32x4_t first = NeonBf16::four_words(weights + 16 * i);
                const uint32x4_t second = NeonBf16::four_words(weights + 4 * lanes + 16 * i);
                const auto low = vreinterpretq_bf16_u32(vzip1q_u32(first, second));
                const auto high = vreinterpretq_bf16_u32(vzip2q_u32(first, second));
#pragma GCC unroll 3
                for (int m = 0; m < row_pairs; ++m) {
                    sum[m][2 * i] = vbfmmlaq_f32(sum[m][2 * i], rows[m], low);
                    sum[m][2 * i + 1] = vbfmmlaq_f32(sum[m][2 * i + 1], rows[m], high);
                }
            }
        }
    }
};

// Pairs of rows in tiles of so many, of one block. Returns the first row not done.
template <int row_pairs> int multiply_pairs(const Operands &o, int first_row, int rows) {
    int row = first_row;
    for (; row + 2 * row_pairs <= rows; row += 2 * row_pairs) {
        const Operands tile = o.at_row(row);
        PairSums<row_pairs> sums;
        sums.load(tile);
        sums.add(tile);
        sums.store(tile);
    }
    return row;
}

} // namespace

// Columns four at a time for all pairs of rows; the rest, and an odd row, by dot products.
template <> void gemm_bf16<NeonBf16>(const Operands &o, int rows, int num_blocks) {
    const int paired_rows = rows / 2 * 2, whole_cols = o.cols / 4 * 4;
    for (int n = 0; n < num_blocks && paired_rows > 0; ++n) {
        const Operands block = o.at_block(n);
        int row = multiply_pairs<3>(block, 0, paired_rows);
        row = multiply_pairs<2>(block, row, paired_rows);
        multiply_pairs<1>(block, row, paired_rows);
    }
    if (paired_rows > 0 && whole_cols < o.cols) {
        Operands rest = o;
        rest.blocks += block_bytes(Format::bf16, whole_cols);
        rest.x += whole_cols / 2;
        rest.cols -= whole_cols;
        rest.accumulate = true;
        gemm_blocks<NeonBf16, Bf16PairBlock<NeonBf16>>(rest, paired_rows, num_blocks);
    }
    if (paired_rows < rows) {
        gemm_blocks<NeonBf16, Bf16PairBlock<NeonBf16>>(o.at_row(paired_rows), 1, num_blocks);
    }
}

// Nothing to gain here.
template <>
void gemm<NeonBf16>(Format format, const Operands &o, int rows, int num_blocks, float *decoded) {
    neon_kernels.gemm(format, o, rows, num_blocks, decoded);
}

void gemm_bf16_by_dots(const Operands &o, int rows, int num_blocks, void *) {
    gemm_bf16<NeonBf16>(o, rows, num_blocks);
}

void round_row_to_pairs(const float *x, int cols, float *out) {
    round_row<NeonBf16>(x, cols, out);
}

void attend_segment_by_dots(const AttentionTile &tile, int segment, float *scores,
                            const Partial &partial) {
    attend_segment<NeonBf16>(tile, segment, scores, partial);
}

} // namespace headrace
#endif
