#include "cpu/products.h"
#include "cpu/few_rows.h"

namespace headrace {

namespace {

// Of activations, so that they stay in L2. For each part, weights are read and unpacked again.
constexpr int rows_per_part = 96, rounded_rows_per_part = 256;

// Blocks, which stay in L2 while all rows pass over them.
constexpr int most_blocks = 24;

// Rows that cost nothing beside reading the weights.
constexpr int most_rows_cut_finely = 2;

// Products of fewer rows wait for memory, and those of fewer blocks take little time.
constexpr int fewest_packed_rows = 65, fewest_packed_blocks = 32;

constexpr int tile_unit = 6;           // a full tile of one row
constexpr int fixed16_unit_blocks = 4; // likewise, of fixed16
constexpr int head_unit = 12;          // whole tiles, and whole blocks of logits
static_assert(head_unit * lanes % block_tokens == 0);
static_assert(tile_unit * lanes % quantized_group == 0); // see round_columns
constexpr int super_unit = super_block / lanes;          // likewise, where they share a scale

// The rows of a part, where there are more than `most_rows`. The tiles take 32 of them.
int rows_of_part(int rows, int most_rows) {
    const int parts = (rows + most_rows - 1) / most_rows;
    return parts == 1 ? rows : (rows + 32 * parts - 1) / (32 * parts) * 32;
}

int parts_of(int n, int step) {
    return (n + step - 1) / step;
}

// Blocks of an extent that are cut alike: `step` of them are a part.
struct Piece {
    int extent, block, blocks, step;
    int end_task; // the tasks of this piece and those before it
};

// Threads come to the blocks in the middle last. Where there are few rows, these are cut into the
// smallest parts, so that threads end at nearly the same time.
std::vector<Piece> cut(const std::vector<Extent> &extents, int num_threads, int most_rows,
                       int unit) {
    int num_blocks = 0, num_parts = 0, rows = 0;
    for (const Extent &extent : extents) {
        num_blocks += extent.blocks;
        num_parts += extent.blocks * parts_of(extent.rows, rows_of_part(extent.rows, most_rows));
        rows = std::max(rows, extent.rows);
    }
    // Six parts per thread let a fast thread take over from a slow one.
    const int wanted = num_parts / (6 * num_threads);
    const int step = std::clamp((wanted + unit - 1) / unit * unit, unit, most_blocks / unit * unit);
    // A part of each thread is cut finely.
    const int fine = num_threads * step;
    const int middle =
        rows > most_rows_cut_finely ? num_blocks : std::max(0, (num_blocks - fine) / 2);
    std::vector<Piece> pieces;
    int first = 0, num_tasks = 0; // blocks and tasks of the extents before
    for (int i = 0; i < int(extents.size()); ++i) {
        const int blocks = extents[i].blocks;
        const auto within = [&](int block) {
            return std::clamp((block - first + unit - 1) / unit * unit, 0, blocks);
        };
        const int ends[] = {within(middle), within(num_blocks - middle), blocks};
        int block = 0;
        for (int n = 0; n < 3; ++n) {
            const int count = ends[n] - block, own = n == 1 ? unit : step;
            if (count > 0) {
                num_tasks += parts_of(extents[i].rows, rows_of_part(extents[i].rows, most_rows)) *
                             parts_of(count, own);
                pieces.push_back({i, block, count, own, num_tasks});
                block = ends[n];
            }
        }
        first += blocks;
    }
    return pieces;
}

// Call body(extent, part) for parts that cover all extents, `unit` blocks or a multiple of it and
// `most_rows` at a time. Within an extent rows go outside, as they do where tasks are rows: see
// ThreadPool.
template <class Body>
void each_part(ThreadPool &pool, const std::vector<Extent> &extents, int most_rows, int unit,
               const Body &body) {
    const std::vector<Piece> pieces = cut(extents, pool.num_threads(), most_rows, unit);
    const int num_tasks = pieces.empty() ? 0 : pieces.back().end_task;
    pool.run(num_tasks, [&](int task, int thread) {
        const auto piece =
            std::upper_bound(pieces.begin(), pieces.end(), task,
                             [](int task, const Piece &piece) { return task < piece.end_task; });
        const int rows = extents[piece->extent].rows, row_step = rows_of_part(rows, most_rows);
        const int column_parts = parts_of(piece->blocks, piece->step);
        const int within = task - (piece == pieces.begin() ? 0 : piece[-1].end_task);
        const int row = within / column_parts * row_step;
        const int block = within % column_parts * piece->step;
        const int blocks = std::min(piece->step, piece->blocks - block);
        const int next_block = pool.descends(thread) ? block - piece->step : block + blocks;
        body(piece->extent, ProductPart{row, std::min(row_step, rows - row), piece->block + block,
                                        blocks, thread, piece->block + next_block});
    });
}

bool rounds_to_bf16(const StepState &state, const Matrix &weight) {
    const bool is_bf16 = weight.format == Format::bf16 || weight.format == Format::bf12;
    return is_bf16 && state.config.rounds_activations;
}

bool rounds_to_integers(const StepState &state, const Matrix &weight) {
    return weight.format == Format::int8 ||
           (state.config.activation_bits != 0 && packing_of(weight.format).unit != 0);
}

bool is_fixed16(const Matrix *weight) {
    return weight->format == Format::fixed16;
}

// Whether it multiplies `rounded` rows.
bool reads_rounded(const StepState &state, const Matrix &weight) {
    return is_fixed16(&weight) || rounds_to_bf16(state, weight);
}

int most_rows(const StepState &state, const Matrix &weight) {
    const bool is_rounded = reads_rounded(state, weight) || rounds_to_integers(state, weight);
    return is_rounded ? rounded_rows_per_part : rows_per_part;
}

// What suits all weights that read integers; no columns: none does.
Rounding integers_of(const StepState &state, Factors weights) {
    Rounding common{0, INT32_MAX};
    for (const Matrix *weight : weights) {
        if (rounds_to_integers(state, *weight)) {
            common = common.with(rounding_of(weight->format, state.config.activation_bits));
        }
    }
    return common;
}

// Of `numbers`, which are [first, first + n) of the row; `first` is a multiple of columns that
// share a scale.
void round_columns(const StepState &state, const float *numbers, const Activations &x,
                   Factors weights, int row, int first, int n) {
    const Kernels &kernels = *state.model.kernels;
    float *rounded = x.rounded + size_t(row) * x.stride;
    const auto num_fixed16 = std::count_if(weights.begin(), weights.end(), is_fixed16);
    if (num_fixed16 > 0) { // so none is bf16
        kernels.round_to_fixed16(numbers, n, rounded + first / fixed16_unit * fixed16_unit_words);
    }
    if (size_t(num_fixed16) == weights.size()) {
        return;
    }
    if (const Rounding to = integers_of(state, weights); to.columns > 0) {
        Int16Group *groups = x.quantized + size_t(row) * groups_of((*weights.begin())->cols);
        kernels.quantize_row(numbers, n, to, groups + first / quantized_group);
    }
    if (std::any_of(weights.begin(), weights.end(), [&](const Matrix *weight) {
            return rounds_to_bf16(state, *weight) || adapters_read_bf16(state, *weight);
        })) {
        kernels.round_row(numbers, n, rounded + (kernels.gemm_bf16 ? first / 2 : first));
    }
}

bool reads_bands_of_integers(const StepState &state, const Matrix &weight, int rows) {
    const Kernels &kernels = *state.model.kernels;
    return kernels.reads_bands && rounds_to_integers(state, weight) &&
           kernels.reads_bands(weight.format, state.config.activation_bits, rows);
}

// The rows of products that multiply the same `x`, once more in bands, where that pays.
void pack_rows(StepState &state, int rows, const std::vector<Linear *> &products) {
    const Kernels &kernels = *state.model.kernels;
    const Activations &x = products.front()->x;
    const int cols = products.front()->weight.cols;
    int num_blocks = 0;
    for (const Linear *product : products) {
        const bool reads_bands = kernels.pack_rows && rounds_to_bf16(state, product->weight);
        num_blocks += reads_bands ? blocks_of(product->weight.rows) : 0;
    }
    if (rows < fewest_packed_rows || num_blocks < fewest_packed_blocks || cols % bf12_cols != 0) {
        return;
    }
    const int num_bands = parts_of(rows, band_rows);
    auto *tiles = state.model.workspace.tiles.room<uint8_t>(num_bands * band_bytes(cols));
    state.model.pool.run(num_bands, [&](int band, int) {
        const int first = band * band_rows;
        kernels.pack_rows(x.rounded + size_t(first) * x.stride, x.stride,
                          std::min(band_rows, rows - first), cols, tiles + band * band_bytes(cols));
    });
    for (Linear *product : products) {
        product->tiles = tiles;
    }
}

// The same of integers, slab by slab. Each task would else pack the rows that it multiplies.
void pack_groups(StepState &state, int rows, const std::vector<Linear *> &products) {
    const Kernels &kernels = *state.model.kernels;
    const Activations &x = products.front()->x;
    const int num_groups = groups_of(products.front()->weight.cols);
    int num_blocks = 0;
    for (const Linear *product : products) {
        const bool reads_bands = reads_bands_of_integers(state, product->weight, rows);
        num_blocks += reads_bands ? blocks_of(product->weight.rows) : 0;
    }
    if (num_blocks < fewest_packed_blocks) {
        return;
    }
    const int num_bands = parts_of(rows, band_rows), num_slabs = slabs_of(num_groups);
    const size_t slab_bytes = num_bands * slab_band_bytes;
    auto *bands = state.model.workspace.bands.room<uint8_t>(num_slabs * slab_bytes);
    state.model.pool.run(num_bands * num_slabs, [&](int task, int) {
        const int row = task / num_slabs * band_rows, slab = task % num_slabs;
        const int g = slab * slab_groups;
        kernels.pack_groups(x.quantized + size_t(row) * num_groups + g, num_groups,
                            std::min(band_rows, rows - row), std::min(slab_groups, num_groups - g),
                            bands + slab * slab_bytes + row / band_rows * slab_band_bytes);
    });
    for (Linear *product : products) {
        product->bands = bands;
        product->slab_bytes = slab_bytes;
    }
}

// Blocks of a part whose columns are rounded for `next`, where they are computed.
int unit_before(const StepState &state, Factors next) {
    const bool has_units = std::any_of(next.begin(), next.end(), is_fixed16);
    return has_units || integers_of(state, next).columns > quantized_group ? super_unit : tile_unit;
}

// Of weights that lie as the kernels read them.
void multiply_plain(const Kernels &kernels, Format format, bool is_rounded, const Operands &o,
                    int rows, int num_blocks, float *scratch) {
    if (is_rounded && kernels.gemm_bf16) {
        kernels.gemm_bf16(o, rows, num_blocks, scratch);
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
    if (format == Format::fixed16) {
        kernels.gemm_fixed16(o, rows, num_blocks);
    } else if (format == Format::bf12) {
        multiply_bf12(kernels, is_rounded, o, rows, num_blocks, scratch);
    } else {
        multiply_plain(kernels, format, is_rounded, o, rows, num_blocks, scratch);
    }
}

// gates = act(gates) * ups, n a multiple of 16
void apply_activation(const StepState &state, const GatedProduct &p, int row, float *gates,
                      float *ups, int n) {
    const Kernels &kernels = *state.model.kernels;
    if (state.config.gate_multiplier != 1.0f) {
        kernels.scale(gates, state.config.gate_multiplier, n, gates);
    }
    if (p.x_weights) { // the products are multiplied in its place: they have no bias
        kernels.scale(gates, p.x_weights[row], n, gates);
        kernels.scale(ups, p.x_weights[row], n, ups);
    }
    if (p.clamped) {
        kernels.clamped_gate(p.clamped->clamp, p.clamped->swish_beta, gates, ups, n);
    } else if (p.xielu) {
        kernels.xielu(*p.xielu, gates, n);
    } else if (p.has_gate) {
        kernels.gate(state.config.activation, gates, ups, n);
    } else {
        kernels.activate(state.config.activation, gates, n);
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

void copy_activations(const StepState &state, const Activations &x, int row, Factors weights,
                      const Activations &out, int out_row) {
    const int cols = (*weights.begin())->cols, num_groups = groups_of(cols);
    bool is_quantized = false, is_rounded = false, is_exact = false;
    for (const Matrix *weight : weights) {
        const bool quantizes = rounds_to_integers(state, *weight);
        const bool rounds = reads_rounded(state, *weight);
        is_quantized = is_quantized || quantizes;
        is_rounded = is_rounded || rounds || adapters_read_bf16(state, *weight);
        is_exact = is_exact || !(quantizes || rounds) || adapters_read_floats(state, *weight);
    }
    if (is_quantized) {
        std::copy_n(x.quantized + size_t(row) * num_groups, num_groups,
                    out.quantized + size_t(out_row) * num_groups);
    }
    if (is_rounded) {
        std::copy_n(x.rounded + size_t(row) * x.stride, padded(cols),
                    out.rounded + size_t(out_row) * out.stride);
    }
    if (is_exact) {
        std::copy_n(x.row(row), cols, out.row(out_row));
    }
}

const uint8_t *next_weights(const Matrix &weight, const ProductPart &part) {
    const auto bytes = ptrdiff_t(block_bytes(weight.format, weight.cols));
    return weight.block(part.block) + (part.next_block - part.block) * bytes;
}

void multiply_part(StepState &state, const Linear &p, const ProductPart &part, const uint8_t *next,
                   float *out, int out_stride) {
    const Matrix &weight = p.weight;
    const uint8_t *first = weight.block(part.block);
    const size_t bytes = block_bytes(weight.format, weight.cols);
    float *scratch = state.model.workspace.scratch[part.thread].as<float>();
    const int column = part.block * lanes;
    const bool has_bias = p.bias && !p.bias->empty();
    // Of whole blocks, tiles of fp32 and fixed16 add it. An adapter's gain is not of the bias.
    const bool adds_bias = weight.format == Format::f32 || is_fixed16(&weight);
    const bool is_added = has_bias && adds_bias && !p.shrunk.rows &&
                          int(p.bias->size()) >= column + part.blocks * lanes;
    if (rounds_to_integers(state, weight)) {
        const int num_groups = groups_of(weight.cols);
        const Int16Group *x = p.x.quantized + size_t(part.row) * num_groups;
        const uint8_t *bands = p.bands ? p.bands + part.row / band_rows * slab_band_bytes : nullptr;
        const Int16Operands operands{first,      bytes, num_groups, x,     num_groups,  out,
                                     out_stride, next,  false,      bands, p.slab_bytes};
        if (state.config.activation_bits == 8) {
            state.model.kernels->gemm_int8(operands, part.rows, part.blocks, scratch);
        } else {
            state.model.kernels->gemm_int16(weight.format, operands, part.rows, part.blocks,
                                            scratch);
        }
    } else {
        const bool is_rounded = reads_rounded(state, weight);
        const float *x = (is_rounded ? p.x.rounded : p.x.rows) + size_t(part.row) * p.x.stride;
        const uint8_t *tiles =
            p.tiles ? p.tiles + part.row / band_rows * band_bytes(weight.cols) : nullptr;
        const float *bias = is_added ? p.bias->data() + column : nullptr;
        const Operands operands{first,      bytes, weight.cols,    x,     p.x.stride, out,
                                out_stride, false, prefetch_bytes, tiles, bias};
        multiply_floats(*state.model.kernels, weight.format, is_rounded, operands, part.rows,
                        part.blocks, scratch);
    }
    expand(state, p, part, out, out_stride);
    if (has_bias && !is_added) {
        // The last row of a router, the gate of a shared MLP, has no bias.
        const int num = std::min(weight.rows, int(p.bias->size()));
        const int width = std::min(part.blocks * lanes, num - column);
        for (int i = 0; i < part.rows; ++i, out += out_stride) {
            state.model.kernels->add(p.bias->data() + column, 1.0f, width, out);
        }
    }
}

void multiply(StepState &state, int rows, std::initializer_list<Product> given) {
    std::vector<Product> products(given);
    std::vector<Linear *> linear;
    for (Product &p : products) {
        linear.push_back(&p);
    }
    shrink(state, {{state.token_runs, rows, linear}});
    pack_rows(state, rows, linear);
    pack_groups(state, rows, linear);
    int total = 0;
    for (const Product &p : products) {
        total += blocks_of(p.weight.rows);
    }
    // A small matrix, such as a router, is cut for all threads.
    const Matrix &first = products.begin()->weight;
    const int full = is_fixed16(&first) ? fixed16_unit_blocks : tile_unit;
    const int unit = std::clamp(total / state.model.pool.num_threads(), 1, full);
    each_part(state.model.pool, {{rows, total}}, most_rows(state, first), unit,
              [&](int, const ProductPart &part) {
                  int block = part.block;
                  for (const Product &p : products) {
                      const int own = blocks_of(p.weight.rows);
                      const int begin = std::max(block, 0);
                      const int end = std::min(block + part.blocks, own);
                      if (begin < end) {
                          const int next = block + part.next_block - part.block;
                          const ProductPart own_part{part.row,    part.rows,   begin,
                                                     end - begin, part.thread, next};
                          multiply_part(state, p, own_part, next_weights(p.weight, own_part),
                                        p.at(part.row, begin), p.stride);
                      }
                      block -= own;
                  }
              });
}

void multiply_each(StepState &state, const std::vector<Extent> &extents, const Matrix &weight,
                   const MultiplyPart &multiply, Factors next) {
    each_part(state.model.pool, extents, most_rows(state, weight), unit_before(state, next),
              multiply);
}

size_t room_for_panels() {
    return room_of_panels(rounded_rows_per_part) / sizeof(float);
}

size_t room_for_gates(int num_rows) {
    const int rows = std::min(num_rows, std::max(rows_per_part, rounded_rows_per_part));
    return size_t(2) * rows * stride_of(most_blocks * lanes);
}

void multiply_gated_part(StepState &state, const GatedProduct &p, const ProductPart &part) {
    const Matrix &next = p.next;
    const bool is_rounded = reads_rounded(state, next) || rounds_to_integers(state, next);
    const bool is_read_rounded = is_rounded || adapters_read_bf16(state, next);
    const bool is_read_exact = !is_rounded || adapters_read_floats(state, next);
    const int width = part.blocks * lanes, stride = stride_of(width),
              first_column = part.block * lanes;
    float *room = state.model.workspace.gates[part.thread].as<float>();
    float *ups = room + part.rows * stride;
    // What is read as it is, is computed where it is read.
    float *gates = is_read_exact ? p.gated.row(p.first_row + part.row) + first_column : room;
    const int gate_stride = is_read_exact ? p.gated.stride : stride;
    const ProductPart weights{p.first_x + part.row, part.rows,   p.first_block + part.block,
                              part.blocks,          part.thread, p.first_block + part.next_block};
    const Linear &first = p.has_gate ? p.gate : p.up;
    const uint8_t *next_first = next_weights(first.weight, weights);
    if (p.has_gate) {
        multiply_part(state, p.gate, weights, p.up.weight.block(weights.block), gates, gate_stride);
        multiply_part(state, p.up, weights, next_first, ups, stride);
    } else {
        multiply_part(state, p.up, weights, next_first, gates, gate_stride);
    }
    const int n = std::min(width, next.cols - first_column);
    for (int i = 0; i < part.rows; ++i, gates += gate_stride, ups += stride) {
        const int row = p.first_row + part.row + i;
        apply_activation(state, p, row, gates, ups, width);
        if (is_read_rounded) {
            round_columns(state, gates, p.gated, {&next}, row, first_column, n);
        }
    }
}

void multiply_gated(StepState &state, const GatedProduct &given) {
    GatedProduct product = given;
    const Matrix &up = product.up.weight;
    std::vector<Linear *> linear;
    if (product.has_gate) {
        linear.push_back(&product.gate);
    }
    linear.push_back(&product.up);
    shrink(state, {{state.token_runs, state.num_tokens, linear}});
    pack_rows(state, state.num_tokens, linear);
    pack_groups(state, state.num_tokens, linear);
    multiply_each(state, {{state.num_tokens, blocks_of(up.rows)}}, up,
                  [&](int, const ProductPart &part) { multiply_gated_part(state, product, part); },
                  {&product.next});
}

void multiply_head(StepState &state, const Product &given, float *maxima) {
    Product head = given;
    const int num_rows = state.step.num_logit_rows, num_tokens = head.weight.rows;
    shrink(state, {{state.logit_runs, num_rows, {&head}}});
    pack_groups(state, num_rows, {&head});
    each_part(state.model.pool, {{num_rows, blocks_of(num_tokens)}}, most_rows(state, head.weight),
              head_unit, [&](int, const ProductPart &part) {
                  multiply_part(state, head, part, next_weights(head.weight, part),
                                head.at(part.row, part.block), head.stride);
                  const int first = part.block * lanes, n = part.blocks * lanes;
                  for (int i = part.row; i < part.row + part.rows; ++i) {
                      float *logits = head.at(i, part.block);
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
