#include "cpu/products.h"
#include "cpu/few_rows.h"

namespace headrace {

namespace {

// Of activations, so that they stay in L2. For each part, weights are read and unpacked again.
constexpr int rows_per_part = 96, rounded_rows_per_part = 256;

// Blocks, which stay in L2 while all rows pass over them.
constexpr int most_blocks = 24;

constexpr int tile_unit = 6;  // a full tile of one row
constexpr int head_unit = 12; // whole tiles, and whole blocks of logits
static_assert(head_unit * lanes % block_tokens == 0);
static_assert(tile_unit * lanes % quantized_group == 0); // see round_columns

// Call body(row, rows, block, blocks, thread) for parts that cover rows x blocks, `unit` or a
// multiple of it and `most_rows` at a time.
template <class Body>
void each_part(ThreadPool &pool, int rows, int most_rows, int num_blocks, int unit,
               const Body &body) {
    // Six parts per thread let a fast thread take over from a slow one.
    const int wanted = num_blocks / (6 * pool.num_threads());
    const int step = std::clamp((wanted + unit - 1) / unit * unit, unit, most_blocks);
    const int column_parts = (num_blocks + step - 1) / step;
    // Rows go outside, as they do where tasks are rows: see ThreadPool. The tiles take 32 of them.
    const int row_parts = (rows + most_rows - 1) / most_rows;
    const int row_step =
        row_parts == 1 ? rows : (rows + 32 * row_parts - 1) / (32 * row_parts) * 32;
    pool.run(row_parts * column_parts, [&](int task, int thread) {
        const int row = task / column_parts * row_step;
        const int block = task % column_parts * step;
        body(row, std::min(row_step, rows - row), block, std::min(step, num_blocks - block),
             thread);
    });
}

bool rounds_to_bf16(const StepState &state, const Matrix &weight) {
    const bool is_bf16 = weight.format == Format::bf16 || weight.format == Format::bf12;
    return is_bf16 && state.config.rounds_activations;
}

bool rounds_to_integers(const StepState &state, const Matrix &weight) {
    const bool has_codes = packing_of(weight.format).unit != 0;
    return weight.format == Format::int8 || (has_codes && state.config.activation_bits != 0);
}

int most_rows(const StepState &state, const Matrix &weight) {
    const bool is_rounded = rounds_to_bf16(state, weight) || rounds_to_integers(state, weight);
    return is_rounded ? rounded_rows_per_part : rows_per_part;
}

// Of `numbers`, which are [first, first + n) of the row; `first` is a multiple of 32.
void round_columns(const StepState &state, const float *numbers, const Activations &x,
                   Factors weights, int row, int first, int n) {
    const Kernels &kernels = *state.model.kernels;
    const auto any = [&](const auto &rounds) {
        return std::any_of(weights.begin(), weights.end(),
                           [&](const Matrix *weight) { return rounds(state, *weight); });
    };
    if (any(rounds_to_integers)) {
        Int16Group *groups = x.quantized + size_t(row) * groups_of((*weights.begin())->cols);
        kernels.quantize_row(numbers, n, state.config.activation_bits,
                             groups + first / quantized_group);
    }
    if (any(rounds_to_bf16)) {
        float *rounded = x.rounded + size_t(row) * x.stride;
        kernels.round_row(numbers, n, rounded + (kernels.gemm_bf16 ? first / 2 : first));
    }
}

// Of weights that lie as the kernels read them.
void multiply_plain(const Kernels &kernels, Format format, bool is_rounded, const Operands &o,
                    int rows, int num_blocks, float *scratch) {
    if (is_rounded && kernels.gemm_bf16) {
        kernels.gemm_bf16(o, rows, num_blocks);
    } else {
        kernels.gemm(format, o, rows, num_blocks, scratch);
    }
}

// Where the kernel does not take so many rows, some blocks at a time become bf16. While they are
// multiplied, the packed ones behind them are fetched.
void multiply_bf12(const Kernels &kernels, bool is_rounded, const Operands &o, int rows,
                   int num_blocks, float *scratch) {
    if (is_rounded && rows <= kernels.max_rounded_bf12) {
        kernels.gemm_bf12_rounded(o, rows, num_blocks, scratch);
        return;
    }
    if (!is_rounded && rows <= max_few_rows) {
        kernels.gemm_bf12(o, rows, num_blocks);
        return;
    }
    const size_t bytes = block_bytes(Format::bf16, o.cols);
    auto *const unpacked = reinterpret_cast<uint8_t *>(scratch);
    for (int n = 0; n < num_blocks; n += unpacked_blocks) {
        const int count = std::min(unpacked_blocks, num_blocks - n);
        Operands some = o.at_block(n);
        kernels.unpack_bf12(some.blocks, o.cols, count, unpacked);
        if (n + count < num_blocks) {
            some.ahead = some.blocks + count * o.block_bytes - unpacked;
        }
        some.blocks = unpacked;
        some.block_bytes = bytes;
        multiply_plain(kernels, Format::bf16, is_rounded, some, rows, count,
                       scratch + unpacked_blocks * bytes / sizeof(float));
    }
}

void multiply_floats(const Kernels &kernels, Format format, bool is_rounded, const Operands &o,
                     int rows, int num_blocks, float *scratch) {
    if (format == Format::bf12) {
        multiply_bf12(kernels, is_rounded, o, rows, num_blocks, scratch);
    } else {
        multiply_plain(kernels, format, is_rounded, o, rows, num_blocks, scratch);
    }
}

// Rows [row, row + rows) and blocks [block, block + blocks) of it, to `out`.
void multiply_part(StepState &state, const Linear &p, int row, int rows, int block, int blocks,
                   float *out, int out_stride, int thread) {
    const Matrix &weight = p.weight;
    const uint8_t *first = weight.block(block);
    const size_t bytes = block_bytes(weight.format, weight.cols);
    if (rounds_to_integers(state, weight)) {
        const int num_groups = groups_of(weight.cols);
        const Int16Group *x = p.x.quantized + size_t(row) * num_groups;
        const Int16Operands operands{first, bytes, num_groups, x, num_groups, out, out_stride};
        if (state.config.activation_bits == 8) {
            state.model.kernels->gemm_int8(operands, rows, blocks);
        } else {
            state.model.kernels->gemm_int16(weight.format, operands, rows, blocks);
        }
    } else {
        const bool is_rounded = rounds_to_bf16(state, weight);
        const float *x = (is_rounded ? p.x.rounded : p.x.rows) + size_t(row) * p.x.stride;
        const Operands operands{first,      bytes, weight.cols,   x, p.x.stride, out,
                                out_stride, false, prefetch_bytes};
        float *scratch = state.model.workspace.scratch[thread].as<float>();
        multiply_floats(*state.model.kernels, weight.format, is_rounded, operands, rows, blocks,
                        scratch);
    }
    if (p.bias && !p.bias->empty()) {
        const int width = std::min(blocks * lanes, weight.rows - block * lanes);
        for (int i = 0; i < rows; ++i, out += out_stride) {
            state.model.kernels->add(p.bias->data() + block * lanes, 1.0f, width, out);
        }
    }
}

// n a multiple of 16
void finish_logits(const StepState &state, float *logits, int n) {
    const Config &config = state.config;
    if (config.logit_multiplier != 1.0f) {
        for (int i = 0; i < n; ++i) {
            logits[i] *= config.logit_multiplier;
        }
    }
    if (config.logit_softcap != 0.0f) {
        state.model.kernels->softcap(config.logit_softcap, logits, n);
    }
}

} // namespace

void round_activations(const StepState &state, const Activations &x, Factors weights, int row) {
    round_columns(state, x.row(row), x, weights, row, 0, (*weights.begin())->cols);
}

void multiply(StepState &state, int rows, std::initializer_list<Product> products) {
    int total = 0;
    for (const Product &p : products) {
        total += blocks_of(p.weight.rows);
    }
    each_part(state.model.pool, rows, most_rows(state, products.begin()->weight), total, tile_unit,
              [&](int row, int count, int block, int blocks, int thread) {
                  for (const Product &p : products) {
                      const int own = blocks_of(p.weight.rows);
                      const int begin = std::max(block, 0), end = std::min(block + blocks, own);
                      if (begin < end) {
                          multiply_part(state, p, row, count, begin, end - begin, p.at(row, begin),
                                        p.stride, thread);
                      }
                      block -= own;
                  }
              });
}

size_t room_for_gates(int num_tokens) {
    const int rows = std::min(num_tokens, std::max(rows_per_part, rounded_rows_per_part));
    return size_t(2) * rows * stride_of(most_blocks * lanes);
}

void multiply_gated(StepState &state, const Linear &gate, const Linear &up,
                    const Activations &gated, const Matrix &next) {
    const bool is_rounded = rounds_to_bf16(state, next) || rounds_to_integers(state, next);
    each_part(state.model.pool, state.num_tokens, most_rows(state, gate.weight),
              blocks_of(gate.weight.rows), tile_unit,
              [&](int row, int rows, int block, int blocks, int thread) {
                  const int stride = stride_of(blocks * lanes), first = block * lanes;
                  float *gates = state.model.workspace.gates[thread].as<float>();
                  float *ups = gates + rows * stride;
                  multiply_part(state, gate, row, rows, block, blocks, gates, stride, thread);
                  multiply_part(state, up, row, rows, block, blocks, ups, stride, thread);
                  const int n = std::min(blocks * lanes, next.cols - first);
                  for (int i = row; i < row + rows; ++i, gates += stride, ups += stride) {
                      state.model.kernels->gate(state.config.activation, gates, ups,
                                                blocks * lanes);
                      if (is_rounded) {
                          round_columns(state, gates, gated, {&next}, i, first, n);
                      } else {
                          std::copy_n(gates, n, gated.row(i) + first);
                      }
                  }
              });
}

void multiply_head(StepState &state, const Product &head, float *maxima) {
    const int num_rows = state.step.num_logit_rows, num_tokens = head.weight.rows;
    each_part(state.model.pool, num_rows, most_rows(state, head.weight), blocks_of(num_tokens),
              head_unit, [&](int row, int rows, int block, int blocks, int thread) {
                  multiply_part(state, head, row, rows, block, blocks, head.at(row, block),
                                head.stride, thread);
                  const int first = block * lanes, n = blocks * lanes;
                  for (int i = row; i < row + rows; ++i) {
                      float *logits = head.at(i, block);
                      finish_logits(state, logits, n);
                      if (maxima) {
                          state.model.kernels->block_maxima(
                              logits, std::min(n, num_tokens - first),
                              maxima + size_t(i) * num_blocks_of(num_tokens) +
                                  first / block_tokens);
                      }
                  }
              });
}

} // namespace headrace
