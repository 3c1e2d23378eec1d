// out[rows, 16 * blocks] = x[rows, cols] . packed blocks, fp32 sums whatever the weight format.
//
// Every sum runs along k in order, one fused multiply-add per step, in every tile. So a row's
// result has the same bits whatever rows it is batched with. Tiles differ only in how many rows and
// blocks they keep in registers. One row is bound by memory: 54 of 70 GB/s on two Zen 5 cores,
// bf16. From about ten rows on it is arithmetic: 512 rows run at 420 GFLOP/s there, at 850 where
// both factors are bf16.
#pragma once
#include "cpu/gemm_f32.h"
#include "cpu/packed_blocks.h"

#include <type_traits>

namespace headrace {

// How to read one packed block. A unit of columns lies behind one header, a group of them shares
// its scales, a chunk is decoded unrolled. `num_scales` are worth a register each while a tile
// passes over a group. With more than `max_rows` rows, decoding once into fp32 is cheaper than in
// every tile; where that is 0, there are no tiles.
template <class V> struct F32Block {
    static constexpr int unit = 2, group = 2, chunk = 2, header_bytes = 0, chunk_bytes = 128;
    static constexpr int num_scales = 0, max_rows = 1 << 30;
    struct Scales {
        Scales(const uint8_t *, int) {}
    };
    static typename V::Floats row(const uint8_t *chunk_start, int j, const Scales &) {
        return V::load(reinterpret_cast<const float *>(chunk_start) + j * lanes);
    }
};

template <class V> struct Bf16Block {
    static constexpr int unit = 2, group = 2, chunk = 2, header_bytes = 0, chunk_bytes = 64;
    static constexpr int num_scales = 0, max_rows = 48;
    struct Scales {
        Scales(const uint8_t *, int) {}
    };
    static typename V::Floats row(const uint8_t *chunk_start, int j, const Scales &) {
        return j == 0 ? V::bf16_even(chunk_start) : V::bf16_odd(chunk_start);
    }
};

// The same block where activations are bf16 too. A step is the dot product of two columns, for
// which `x` holds a pair of numbers in the place of each float.
template <class V> struct Bf16PairBlock {
    static constexpr int unit = 2, group = 2, chunk = 2, header_bytes = 0, chunk_bytes = 64;
    static constexpr int num_scales = 0, max_rows = 1 << 30;
    struct Scales {
        Scales(const uint8_t *, int) {}
    };
    static typename V::Floats row(const uint8_t *chunk_start, int, const Scales &) {
        return V::load(reinterpret_cast<const float *>(chunk_start));
    }
};

template <class V> struct Q8Block {
    static constexpr int unit = quantized_group, group = unit, chunk = 8;
    static constexpr int header_bytes = 32, chunk_bytes = 128;
    static constexpr int num_scales = 0, max_rows = 8; // one, but as fast from the cache
    struct Scales {
        Scales(const uint8_t *header, int) : scale(V::fp16(header)) {}
        typename V::Floats scale;
    };
    static typename V::Floats row(const uint8_t *chunk_start, int j, const Scales &scales) {
        return V::mul(scales.scale, V::int8(chunk_start + j * lanes));
    }
};

template <class W> constexpr int unit_bytes = W::header_bytes + W::unit / W::chunk * W::chunk_bytes;

template <class V, class W> constexpr bool is_paired = std::is_same_v<W, Bf16PairBlock<V>>;

template <class V, class W>
typename V::Floats add_product(typename V::Floats x, typename V::Floats w, typename V::Floats sum) {
    if constexpr (is_paired<V, W>) {
        return V::add_dot(x, w, sum);
    } else {
        return V::fma(x, w, sum);
    }
}

constexpr int prefetch_bytes = 1536; // ahead, in each block: about one DRAM latency of reading
// Tiles in few registers read few blocks at once, so more of each is on its way. With AVX2, four
// rows of bf16 take 0.89 to 0.93 of the time for it, eight 0.96. In fp32 they take more.
template <class V, class W>
constexpr int further_bytes =
    V::max_sums < 8 && std::is_same_v<W, Bf16Block<V>> ? prefetch_bytes : 0;

// One step along k: the outer product of a column of `x` and a row of the blocks. What there is
// less of, factors or rows of blocks, waits in registers for the other.
template <class V, class W, int num_rows, int num_blocks>
inline __attribute__((always_inline)) void
add_step(const Operands &o, const uint8_t *chunk, const float *x, int j, int group,
         const uint8_t *block, typename V::Floats (&sums)[num_rows][num_blocks]) {
    const auto row = [&](int n) {
        const typename W::Scales scales(block + n * o.block_bytes, group);
        return W::row(chunk + n * o.block_bytes, j, scales);
    };
    const auto factor = [&](int m) { return V::set(x[size_t(m) * o.x_stride + j]); };
    if constexpr (num_rows > num_blocks) {
        typename V::Floats rows[num_blocks];
#pragma GCC unroll 8
        for (int n = 0; n < num_blocks; ++n) {
            rows[n] = row(n);
        }
#pragma GCC unroll 12
        for (int m = 0; m < num_rows; ++m) {
            const auto same = factor(m);
#pragma GCC unroll 8
            for (int n = 0; n < num_blocks; ++n) {
                sums[m][n] = add_product<V, W>(same, rows[n], sums[m][n]);
            }
        }
    } else {
#pragma GCC unroll 8
        for (int n = 0; n < num_blocks; ++n) {
            const auto same = row(n);
#pragma GCC unroll 12
            for (int m = 0; m < num_rows; ++m) {
                sums[m][n] = add_product<V, W>(factor(m), same, sums[m][n]);
            }
        }
    }
}

template <class V, class W, int num_rows, int num_blocks> void gemm_tile(const Operands &o) {
    typename V::Floats sums[num_rows][num_blocks];
    start_sums<V>(o, sums);
    const uint8_t *block = o.blocks;
    const float *x = o.x;
    constexpr int group_chunks = W::group / W::chunk;
    constexpr int steps = is_paired<V, W> ? 1 : W::chunk;
    const int num_units = o.cols / W::unit;
    for (int u = 0; u < num_units; ++u, block += unit_bytes<W>) {
        for (int c = 0; c < W::unit / W::chunk; ++c, x += steps) {
            const uint8_t *chunk = block + W::header_bytes + c * W::chunk_bytes;
#pragma GCC unroll 8
            for (int n = 0; n < num_blocks; ++n) {
                for (int b = 0; b < W::chunk_bytes; b += 64) {
                    __builtin_prefetch(chunk + n * o.block_bytes + o.ahead + further_bytes<V, W> +
                                       b);
                }
            }
#pragma GCC unroll 16
            for (int j = 0; j < steps; ++j) {
                add_step<V, W, num_rows, num_blocks>(o, chunk, x, j, c / group_chunks, block, sums);
            }
        }
    }
    if (o.cols % W::unit != 0) { // an odd column, in the formats with units of two
        const typename W::Scales scales(block, 0);
        for (int n = 0; n < num_blocks; ++n) {
            auto w = W::row(block + n * o.block_bytes, 0, scales);
            if constexpr (is_paired<V, W>) {
                w = V::first_of_pairs(w); // the other may be anything, infinite too
            }
            for (int m = 0; m < num_rows; ++m) {
                const auto factor = V::set(x[size_t(m) * o.x_stride]);
                sums[m][n] = add_product<V, W>(factor, w, sums[m][n]);
            }
        }
    }
    store_sums<V>(o, sums);
}

// How many blocks the registers hold beside the scales of each; six are streams enough for memory.
template <class V, class W, int num_rows> constexpr int tile_blocks() {
    const int by_sums = V::max_sums / num_rows;
    const int by_scales = (V::max_sums + 4) / (num_rows + W::num_scales);
    const int fitting = by_sums < by_scales ? by_sums : by_scales;
    return fitting < 6 ? fitting : 6;
}

// Blocks in tiles of `width`, the rest in narrower ones, over rows [first_row, last_row). Blocks go
// outside: those of one tile stay in the cache for all rows.
template <class V, class W, int num_rows, int width>
void gemm_columns(const Operands &o, int first_row, int last_row, int n, int num_blocks) {
    for (; n + width <= num_blocks; n += width) {
        for (int m = first_row; m < last_row; m += num_rows) {
            gemm_tile<V, W, num_rows, width>(o.at_block(n).at_row(m));
        }
    }
    if constexpr (width > 1) {
        // A page of keys is two blocks, factors of adapters are one to three. Quantized weights
        // need no such tiles, and they cost a build.
        constexpr int narrower = W::unit > 2 ? 1 : width > 4 ? 4 : width - 1;
        gemm_columns<V, W, num_rows, narrower>(o, first_row, last_row, n, num_blocks);
    }
}

// Rows in tiles of `num_rows`, as many blocks to a tile as the registers hold. Returns the
// first row not done.
template <class V, class W, int num_rows>
int gemm_rows(const Operands &o, int first_row, int rows, int num_blocks) {
    if constexpr (num_rows > V::max_sums) {
        return first_row;
    } else {
        const int last_row = first_row + (rows - first_row) / num_rows * num_rows;
        gemm_columns<V, W, num_rows, tile_blocks<V, W, num_rows>()>(o, first_row, last_row, 0,
                                                                    num_blocks);
        return last_row;
    }
}

// Rows in tiles of gemm_f32.h, where there are blocks for one. Returns the first row not done.
template <class V> int gemm_f32_rows(const Operands &o, int rows, int num_blocks) {
    if (num_blocks < f32_blocks) {
        return 0;
    }
    const int last_row = rows / f32_rows * f32_rows;
    int n = 0;
    for (; n + f32_blocks <= num_blocks; n += f32_blocks) {
        for (int m = 0; m < last_row; m += f32_rows) {
            f32_tile<V>(o.at_block(n).at_row(m));
        }
    }
    gemm_columns<V, F32Block<V>, f32_rows, 2>(o, 0, last_row, n, num_blocks);
    return last_row;
}

template <class V, class W> void gemm_blocks(const Operands &o, int rows, int num_blocks) {
    int row = 0;
    if constexpr (std::is_same_v<W, F32Block<V>> && V::max_sums >= f32_rows * f32_blocks) {
        row = gemm_f32_rows<V>(o, rows, num_blocks);
    }
    if constexpr (W::max_rows >= 12) {
        row = gemm_rows<V, W, 12>(o, row, rows, num_blocks);
    }
    if constexpr (W::max_rows > 1) {
        row = gemm_rows<V, W, 8>(o, row, rows, num_blocks);
        if constexpr (V::max_sums < 8) { // four sums would wait for each other
            row = gemm_rows<V, W, 6>(o, row, rows, num_blocks);
        }
        row = gemm_rows<V, W, 4>(o, row, rows, num_blocks);
        row = gemm_rows<V, W, 3>(o, row, rows, num_blocks);
        row = gemm_rows<V, W, 2>(o, row, rows, num_blocks);
    }
    gemm_rows<V, W, 1>(o, row, rows, num_blocks);
}

// Decode one block to the f32 layout. An odd last column takes a zero column with it.
template <class V, class W> void decode_block(const uint8_t *block, int cols, float *out) {
    constexpr int columns = W::group < W::chunk ? W::group : W::chunk; // of a chunk, under a scale
    for (int u = 0; u * W::unit < cols; ++u, block += unit_bytes<W>) {
        const uint8_t *chunk = block + W::header_bytes;
        for (int c = 0; c < W::unit; c += W::chunk, chunk += W::chunk_bytes) {
            for (int b = 0; b < W::chunk_bytes; b += 64) {
                __builtin_prefetch(chunk + prefetch_bytes + b);
            }
#pragma GCC unroll 2
            for (int first = 0; first < W::chunk; first += columns) {
                const typename W::Scales scales(block, (c + first) / W::group);
#pragma GCC unroll 32
                for (int j = first; j < first + columns; ++j, out += lanes) {
                    V::store(out, W::row(chunk, j, scales));
                }
            }
        }
    }
}

// Columns [k, k + decoded_columns) of few blocks, for all rows.
template <class V, class W>
void gemm_decoded(const Operands &o, int k, int rows, int num_blocks, float *decoded) {
    Operands part = o;
    part.cols = o.cols - k < decoded_columns ? o.cols - k : decoded_columns;
    part.blocks = reinterpret_cast<const uint8_t *>(decoded);
    part.block_bytes = block_bytes(Format::f32, part.cols);
    part.x += k;
    part.accumulate = o.accumulate || k > 0;
    part.bias = k + part.cols < o.cols ? nullptr : o.bias;
    for (int n = 0; n < num_blocks; ++n) {
        decode_block<V, W>(o.blocks + n * o.block_bytes + k / W::unit * unit_bytes<W>, part.cols,
                           decoded + size_t(n) * part.cols * lanes);
    }
    gemm_blocks<V, F32Block<V>>(part, rows, num_blocks);
}

template <class V, class W>
void gemm_encoded(const Operands &o, int rows, int num_blocks, float *decoded) {
    if constexpr (W::max_rows > 0) {
        if (rows <= W::max_rows || !decoded) {
            gemm_blocks<V, W>(o, rows, num_blocks);
            return;
        }
    }
    for (int n = 0; n < num_blocks; n += decoded_blocks) {
        const int count = num_blocks - n < decoded_blocks ? num_blocks - n : decoded_blocks;
        for (int k = 0; k < o.cols; k += decoded_columns) {
            gemm_decoded<V, W>(o.at_block(n), k, rows, count, decoded);
        }
    }
}

// Both factors bf16. `x` and its stride are in pairs of numbers; see round_row.
template <class V> void gemm_bf16(const Operands &o, int rows, int num_blocks) {
    gemm_blocks<V, Bf16PairBlock<V>>(o, rows, num_blocks);
}

// Round a row to bf16, where there is no gemm_bf16: `out` has floats.
template <class V> void round_to_floats(const float *x, int cols, float *out) {
    for (int k = 0; k < cols; ++k) {
        out[k] = from_bf16(to_bf16(x[k]));
    }
}

// Else: to pairs of bf16.
template <class V> void round_row(const float *x, int cols, float *out) {
    if constexpr (V::has_bf16) {
        int k = 0;
        for (; k + 2 * lanes <= cols; k += 2 * lanes, out += lanes) {
            V::store_bf16(out, V::load(x + k), V::load(x + k + lanes));
        }
        if (k < cols) {
            float rest[2 * lanes] = {};
            std::memcpy(rest, x + k, (cols - k) * sizeof(float));
            V::store_bf16(rest, V::load(rest), V::load(rest + lanes));
            std::memcpy(out, rest, (cols - k + 1) / 2 * sizeof(float));
        }
    } else {
        round_to_floats<V>(x, cols, out);
    }
}

// `decoded` is room for `decoded_blocks` of fp32 and one more column; null is none.
template <class V>
void gemm(Format format, const Operands &o, int rows, int num_blocks, float *decoded) {
    switch (format) {
    case Format::f32:
        return gemm_blocks<V, F32Block<V>>(o, rows, num_blocks);
    case Format::bf16:
        return gemm_encoded<V, Bf16Block<V>>(o, rows, num_blocks, decoded);
    case Format::q8_0:
        return gemm_encoded<V, Q8Block<V>>(o, rows, num_blocks, decoded);
    case Format::int8:    // rounds activations too: gemm_int16.h
    case Format::fixed16: // likewise: gemm_fixed16.h
    case Format::bf12:    // is bf16 for all but few rows: few_rows.h
        return;
    default:
        return with_block<V>(format, [&](auto block) {
            gemm_encoded<V, decltype(block)>(o, rows, num_blocks, decoded);
        });
    }
}

} // namespace headrace
