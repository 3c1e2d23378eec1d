// One step of the decoder: every layer over all tokens of the batch, prefill and decode alike.
//
// A step is a sequence of parallel phases. Products with weights are cut by output blocks (and by
// rows when there are many), attention by tile, KV head and, for few tokens, key segment.
#include "cpu/model.h"
#include "cpu/row_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace headrace {

namespace {

constexpr int rows_per_product = 96; // of activations, so that they stay in L2
constexpr int rows_per_task = 8;     // of the row operations; fewer are not worth a phase

struct Tile { // consecutive tokens of one sequence
    int first_token, num_tokens, sequence, first_position;

    int first_segment(int window) const {
        return first_position < window ? 0 : (first_position - window + 1) / segment_tokens;
    }
    int end_segment() const { return (first_position + num_tokens - 1) / segment_tokens + 1; }
};

struct Product { // out = x . weight + bias
    const Matrix *weight;
    const float *x;
    int x_stride;
    float *out;
    int out_stride;
    const std::vector<float> *bias;
};

class Runner {
public:
    Runner(Model &model, const Step &step);
    void run();

private:
    template <class Body> void each_row(const Body &body);
    template <class Body> void each_part(int rows, int num_blocks, const Body &body);
    void multiply(std::initializer_list<Product> products, int rows);
    void multiply_part(const Product &p, int row, int rows, int block, int blocks, int thread);
    void norm(const std::vector<float> &weight, const float *x, int n, float *out);

    void grow_workspace();
    void cut_tiles();
    void embed();
    void attention(int index);
    void rotate_and_store(int index, int token);
    void attend(int index);
    void attend_split(int index);
    void attend_whole(int index, const Tile &tile, int kv_head, int thread);
    AttentionTile attention_tile(int index, const Tile &tile, int kv_head) const;
    Partial partial_at(float *memory, int rows) const;
    void write_attended(const Tile &tile, int kv_head, const Partial &partial);
    void mlp(int index);
    void add_sublayer(const std::vector<float> &post_norm);
    void normalize(const std::vector<float> &weight);
    void logits();

    Model &model_;
    const Config &config_;
    const Step &step_;
    Workspace &space_;
    ThreadPool &pool_;
    const int num_tokens_;
    const int hidden_, q_width_, kv_width_, ffn_; // strides: padded widths, plus a line to
    const int group_;                             // spread rows over the sets of the cache
    const int head_width_;
    int rope_pairs_ = 0; // of the widest rope
    int tile_rows_ = 0;
    std::vector<Tile> tiles_;
};

constexpr int stride_of(int width) {
    return padded(width) + lanes;
}

float *room(Buffer &buffer, size_t num_floats) {
    if (buffer.size() < num_floats * sizeof(float)) {
        buffer.allocate(num_floats * sizeof(float));
    }
    return buffer.as<float>();
}

// Fold `next` into `into`, both over the same rows. Always called in segment order.
void merge(const Partial &into, const Partial &next, int rows) {
    for (int row = 0; row < rows; ++row) {
        if (next.sum[row] == 0.0f) {
            continue;
        }
        const float maximum = std::max(into.maximum[row], next.maximum[row]);
        const float old_share = std::exp(into.maximum[row] - maximum);
        const float new_share = std::exp(next.maximum[row] - maximum);
        float *values = into.values + size_t(row) * into.stride;
        const float *next_values = next.values + size_t(row) * next.stride;
        for (int i = 0; i < into.stride; ++i) {
            values[i] = values[i] * old_share + next_values[i] * new_share;
        }
        into.sum[row] = into.sum[row] * old_share + next.sum[row] * new_share;
        into.maximum[row] = maximum;
    }
}

Runner::Runner(Model &model, const Step &step)
    : model_(model), config_(model.config), step_(step), space_(model.workspace), pool_(model.pool),
      num_tokens_(step.num_tokens), hidden_(stride_of(config_.hidden_size)),
      q_width_(stride_of(config_.num_heads * config_.head_dim)),
      kv_width_(stride_of(config_.num_kv_heads * config_.head_dim)),
      ffn_(stride_of(config_.intermediate_size)), group_(config_.num_heads / config_.num_kv_heads),
      head_width_(padded(config_.head_dim)) {
    for (const Rope &rope : model.ropes) {
        rope_pairs_ = std::max(rope_pairs_, int(rope.inv_freq.size()));
    }
    cut_tiles();
    grow_workspace();
}

void Runner::cut_tiles() {
    const int max_tokens = std::max(1, max_tile_rows / group_);
    for (int i = 0; i < num_tokens_; ++i) {
        const int sequence = step_.sequences[i], position = step_.positions[i];
        if (!tiles_.empty()) {
            Tile &last = tiles_.back();
            if (last.sequence == sequence && last.num_tokens < max_tokens &&
                last.first_position + last.num_tokens == position) {
                ++last.num_tokens;
                continue;
            }
        }
        tiles_.push_back({i, 1, sequence, position});
    }
    for (const Tile &tile : tiles_) {
        tile_rows_ = std::max(tile_rows_, tile.num_tokens * group_);
    }
}

void Runner::grow_workspace() {
    const size_t n = num_tokens_;
    room(space_.residual, n * hidden_);
    room(space_.normed, n * hidden_);
    room(space_.sublayer, n * hidden_);
    room(space_.q, n * q_width_);
    room(space_.k, n * kv_width_);
    room(space_.v, n * kv_width_);
    room(space_.queries, n * config_.num_heads * config_.head_dim);
    room(space_.attended, n * q_width_);
    room(space_.gate, n * ffn_);
    room(space_.up, n * ffn_);
    room(space_.cos, n * model_.ropes.size() * rope_pairs_);
    room(space_.sin, n * model_.ropes.size() * rope_pairs_);
    const size_t cols = std::max(
        {config_.hidden_size, config_.intermediate_size, config_.num_heads * config_.head_dim});
    const size_t decoded = decoded_blocks * cols * lanes;
    const size_t attention = size_t(tile_rows_) * (segment_tokens + 2 * (head_width_ + 2));
    for (Buffer &scratch : space_.scratch) {
        room(scratch, std::max(decoded, attention));
    }
}

template <class Body> void Runner::each_row(const Body &body) {
    const int num_tasks = (num_tokens_ + rows_per_task - 1) / rows_per_task;
    pool_.run(num_tasks, [&](int task, int) {
        const int end = std::min(num_tokens_, (task + 1) * rows_per_task);
        for (int row = task * rows_per_task; row < end; ++row) {
            body(row);
        }
    });
}

// Call body(row, rows, block, blocks, thread) for parts that cover rows x blocks.
template <class Body> void Runner::each_part(int rows, int num_blocks, const Body &body) {
    // Six parts per thread let a fast thread take over from a slow one; six blocks are a full
    // tile of one row; 24 keep the weights in L2 while all rows pass over them.
    const int wanted = num_blocks / (6 * pool_.num_threads());
    const int step = std::clamp((wanted + 5) / 6 * 6, 6, 24);
    const int column_parts = (num_blocks + step - 1) / step;
    const int row_parts = (rows + rows_per_product - 1) / rows_per_product;
    pool_.run(row_parts * column_parts, [&](int task, int thread) {
        const int row = task / column_parts * rows_per_product;
        const int block = task % column_parts * step;
        body(row, std::min(rows_per_product, rows - row), block, std::min(step, num_blocks - block),
             thread);
    });
}

void Runner::multiply_part(const Product &p, int row, int rows, int block, int blocks, int thread) {
    const Matrix &weight = *p.weight;
    float *out = p.out + size_t(row) * p.out_stride + block * lanes;
    const Operands operands{weight.block(block), block_bytes(weight.format, weight.cols),
                            weight.cols,         p.x + size_t(row) * p.x_stride,
                            p.x_stride,          out,
                            p.out_stride,        false};
    model_.kernels->gemm(weight.format, operands, rows, blocks, space_.scratch[thread].as<float>());
    if (p.bias && !p.bias->empty()) {
        const int width = std::min(blocks * lanes, weight.rows - block * lanes);
        for (int i = 0; i < rows; ++i, out += p.out_stride) {
            add_row(p.bias->data() + block * lanes, 1.0f, width, out);
        }
    }
}

// The products share one phase: their blocks are counted through.
void Runner::multiply(std::initializer_list<Product> products, int rows) {
    int total = 0;
    for (const Product &p : products) {
        total += blocks_of(p.weight->rows);
    }
    each_part(rows, total, [&](int row, int count, int block, int blocks, int thread) {
        for (const Product &p : products) {
            const int own = blocks_of(p.weight->rows);
            const int begin = std::max(block, 0), end = std::min(block + blocks, own);
            if (begin < end) {
                multiply_part(p, row, count, begin, end - begin, thread);
            }
            block -= own;
        }
    });
}

void Runner::norm(const std::vector<float> &weight, const float *x, int n, float *out) {
    norm_row(x, weight.data(), n, config_.norm_eps, config_.layer_norm != 0, out);
}

void Runner::embed() {
    each_row([&](int token) {
        float *row = space_.residual.as<float>() + size_t(token) * hidden_;
        unpack_row(model_.embed, step_.token_ids[token], row);
        for (int i = 0; i < config_.hidden_size; ++i) {
            row[i] *= config_.embedding_multiplier;
        }
        for (size_t r = 0; r < model_.ropes.size(); ++r) {
            const size_t at = (r * num_tokens_ + token) * rope_pairs_;
            rope_angles(model_.ropes[r], step_.positions[token], space_.cos.as<float>() + at,
                        space_.sin.as<float>() + at);
        }
    });
}

// normed = norm(residual), or a copy where the placement has no norm before the sublayer.
void Runner::normalize(const std::vector<float> &weight) {
    each_row([&](int token) {
        const float *x = space_.residual.as<float>() + size_t(token) * hidden_;
        float *out = space_.normed.as<float>() + size_t(token) * hidden_;
        if (weight.empty()) {
            std::memcpy(out, x, config_.hidden_size * sizeof(float));
        } else {
            norm(weight, x, config_.hidden_size, out);
        }
    });
}

void Runner::add_sublayer(const std::vector<float> &post_norm) {
    each_row([&](int token) {
        float *x = space_.sublayer.as<float>() + size_t(token) * hidden_;
        if (!post_norm.empty()) {
            norm(post_norm, x, config_.hidden_size, x);
        }
        add_row(x, config_.residual_multiplier, config_.hidden_size,
                space_.residual.as<float>() + size_t(token) * hidden_);
    });
}

void Runner::rotate_and_store(int index, int token) {
    const Layer &layer = model_.layers[index];
    const int dim = config_.head_dim, heads = config_.num_heads, kv_heads = config_.num_kv_heads;
    float *q = space_.q.as<float>() + size_t(token) * q_width_;
    float *k = space_.k.as<float>() + size_t(token) * kv_width_;
    const float *v = space_.v.as<float>() + size_t(token) * kv_width_;
    const int norm_width = config_.qk_norm == QKNorm::full ? heads * dim : dim;
    const int kv_norm_width = config_.qk_norm == QKNorm::full ? kv_heads * dim : dim;
    if (config_.qk_norm != QKNorm::none) {
        for (int i = 0; i < heads * dim; i += norm_width) {
            norm(layer.vectors[slot_q_norm], q + i, norm_width, q + i);
        }
        for (int i = 0; i < kv_heads * dim; i += kv_norm_width) {
            norm(layer.vectors[slot_k_norm], k + i, kv_norm_width, k + i);
        }
    }
    if (layer.config.rope >= 0) {
        const Rope &rope = model_.ropes[layer.config.rope];
        const size_t at = (size_t(layer.config.rope) * num_tokens_ + token) * rope_pairs_;
        const float *cos = space_.cos.as<float>() + at, *sin = space_.sin.as<float>() + at;
        for (int h = 0; h < heads; ++h) {
            rotate(q + h * dim, int(rope.inv_freq.size()), rope.interleaved, cos, sin);
        }
        for (int h = 0; h < kv_heads; ++h) {
            rotate(k + h * dim, int(rope.inv_freq.size()), rope.interleaved, cos, sin);
        }
    }
    // Queries by KV head, so that the rows of a tile are adjacent.
    for (int g = 0; g < kv_heads; ++g) {
        float *out = space_.queries.as<float>() + (size_t(g) * num_tokens_ + token) * group_ * dim;
        for (int i = 0; i < group_ * dim; ++i) {
            out[i] = q[g * group_ * dim + i] * config_.attention_scale;
        }
    }
    const int position = step_.positions[token];
    const int32_t *pages = step_.page_table + size_t(step_.sequences[token]) * step_.max_pages;
    model_.kv.write(index, pages[position / config_.page_tokens], position % config_.page_tokens, k,
                    v);
}

AttentionTile Runner::attention_tile(int index, const Tile &tile, int kv_head) const {
    const size_t row = size_t(kv_head) * num_tokens_ + tile.first_token;
    return {space_.queries.as<float>() + row * group_ * config_.head_dim,
            tile.num_tokens,
            group_,
            config_.head_dim,
            tile.first_position,
            model_.layers[index].config.window,
            config_.attention_softcap,
            model_.kv.format(),
            model_.kv.keys(index, kv_head),
            model_.kv.values(index, kv_head),
            model_.kv.page_bytes(),
            config_.page_tokens,
            step_.page_table + size_t(tile.sequence) * step_.max_pages};
}

Partial Runner::partial_at(float *memory, int rows) const {
    return {memory, memory + rows, memory + 2 * rows, head_width_};
}

void Runner::write_attended(const Tile &tile, int kv_head, const Partial &partial) {
    for (int row = 0; row < tile.num_tokens * group_; ++row) {
        const int token = tile.first_token + row / group_;
        const int head = kv_head * group_ + row % group_;
        float *out = space_.attended.as<float>() + size_t(token) * q_width_ +
                     size_t(head) * config_.head_dim;
        const float *values = partial.values + size_t(row) * partial.stride;
        for (int i = 0; i < config_.head_dim; ++i) {
            out[i] = values[i] / partial.sum[row];
        }
    }
}

void Runner::attend_whole(int index, const Tile &tile, int kv_head, int thread) {
    const AttentionTile operands = attention_tile(index, tile, kv_head);
    const int rows = operands.rows();
    float *scores = space_.scratch[thread].as<float>();
    float *memory = scores + size_t(rows) * segment_tokens;
    const Partial total = partial_at(memory, rows);
    const Partial next = partial_at(memory + size_t(rows) * (head_width_ + 2), rows);
    const int first = tile.first_segment(operands.window);
    model_.kernels->attend_segment(operands, first, scores, total);
    for (int segment = first + 1; segment < tile.end_segment(); ++segment) {
        model_.kernels->attend_segment(operands, segment, scores, next);
        merge(total, next, rows);
    }
    write_attended(tile, kv_head, total);
}

// Few tokens, long contexts: segments are tasks of their own, merged afterwards.
void Runner::attend_split(int index) {
    struct Task {
        const Tile *tile;
        int kv_head, segment;
        float *memory;
    };
    std::vector<Task> tasks;
    const int window = model_.layers[index].config.window;
    const size_t partial_floats = size_t(tile_rows_) * (head_width_ + 2);
    for (const Tile &tile : tiles_) {
        for (int kv_head = 0; kv_head < config_.num_kv_heads; ++kv_head) {
            for (int s = tile.first_segment(window); s < tile.end_segment(); ++s) {
                tasks.push_back({&tile, kv_head, s, nullptr});
            }
        }
    }
    float *memory = room(space_.partials, tasks.size() * partial_floats);
    for (Task &task : tasks) {
        task.memory = memory;
        memory += partial_floats;
    }
    pool_.run(int(tasks.size()), [&](int i, int thread) {
        const Task &task = tasks[i];
        const AttentionTile operands = attention_tile(index, *task.tile, task.kv_head);
        model_.kernels->attend_segment(operands, task.segment, space_.scratch[thread].as<float>(),
                                       partial_at(task.memory, operands.rows()));
    });
    for (size_t i = 0, next; i < tasks.size(); i = next) {
        const Tile &tile = *tasks[i].tile;
        const int rows = tile.num_tokens * group_;
        const Partial total = partial_at(tasks[i].memory, rows);
        for (next = i + 1; next < tasks.size() && tasks[next].tile == &tile &&
                           tasks[next].kv_head == tasks[i].kv_head;
             ++next) {
            merge(total, partial_at(tasks[next].memory, rows), rows);
        }
        write_attended(tile, tasks[i].kv_head, total);
    }
}

void Runner::attend(int index) {
    const int num_tasks = int(tiles_.size()) * config_.num_kv_heads;
    if (num_tasks < 8 * pool_.num_threads()) {
        attend_split(index);
        return;
    }
    pool_.run(num_tasks, [&](int task, int thread) {
        attend_whole(index, tiles_[task / config_.num_kv_heads], task % config_.num_kv_heads,
                     thread);
    });
}

// sublayer = attention(normed)
void Runner::attention(int index) {
    const Layer &layer = model_.layers[index];
    const auto *matrices = layer.matrices;
    const auto *vectors = layer.vectors;
    const float *x = space_.normed.as<float>();
    multiply(
        {{&matrices[slot_q], x, hidden_, space_.q.as<float>(), q_width_, &vectors[slot_q_bias]},
         {&matrices[slot_k], x, hidden_, space_.k.as<float>(), kv_width_, &vectors[slot_k_bias]},
         {&matrices[slot_v], x, hidden_, space_.v.as<float>(), kv_width_, &vectors[slot_v_bias]}},
        num_tokens_);
    each_row([&](int token) { rotate_and_store(index, token); });
    attend(index);
    multiply({{&matrices[slot_o], space_.attended.as<float>(), q_width_,
               space_.sublayer.as<float>(), hidden_, &vectors[slot_o_bias]}},
             num_tokens_);
}

// sublayer = down(act(gate(normed)) * up(normed))
void Runner::mlp(int index) {
    const auto *matrices = model_.layers[index].matrices;
    const auto *vectors = model_.layers[index].vectors;
    const float *x = space_.normed.as<float>();
    const Product gate{&matrices[slot_gate],    x,    hidden_,
                       space_.gate.as<float>(), ffn_, &vectors[slot_gate_bias]};
    const Product up{&matrices[slot_up],    x,    hidden_,
                     space_.up.as<float>(), ffn_, &vectors[slot_up_bias]};
    each_part(num_tokens_, blocks_of(config_.intermediate_size),
              [&](int row, int rows, int block, int blocks, int thread) {
                  multiply_part(gate, row, rows, block, blocks, thread);
                  multiply_part(up, row, rows, block, blocks, thread);
                  for (int i = row; i < row + rows; ++i) {
                      const size_t at = size_t(i) * ffn_ + block * lanes;
                      model_.kernels->gate(config_.activation, gate.out + at, up.out + at,
                                           blocks * lanes);
                  }
              });
    multiply({{&matrices[slot_down], gate.out, ffn_, space_.sublayer.as<float>(), hidden_,
               &vectors[slot_down_bias]}},
             num_tokens_);
}

void Runner::logits() {
    const int rows = step_.num_logit_rows;
    const int stride = padded(config_.vocab_size);
    float *normed = space_.normed.as<float>();
    for (int i = 0; i < rows; ++i) {
        const float *x = space_.residual.as<float>() + size_t(step_.logit_rows[i]) * hidden_;
        norm(model_.norm, x, config_.hidden_size, normed + size_t(i) * hidden_);
    }
    const Matrix &head = model_.head.rows ? model_.head : model_.embed;
    multiply({{&head, normed, hidden_, step_.logits, stride, nullptr}}, rows);
    if (config_.logit_multiplier == 1.0f && config_.logit_softcap == 0.0f) {
        return;
    }
    pool_.run(rows, [&](int row, int) {
        float *x = step_.logits + size_t(row) * stride;
        for (int i = 0; i < stride; ++i) {
            x[i] *= config_.logit_multiplier;
        }
        if (config_.logit_softcap != 0.0f) {
            model_.kernels->softcap(config_.logit_softcap, x, stride);
        }
    });
}

void Runner::run() {
    embed();
    for (int i = 0; i < config_.num_layers; ++i) {
        const auto *vectors = model_.layers[i].vectors;
        normalize(vectors[slot_attn_norm]);
        attention(i);
        add_sublayer(vectors[slot_attn_post_norm]);
        if (config_.placement != Placement::parallel) { // there, both read the same norm
            normalize(vectors[slot_mlp_norm]);
        }
        mlp(i);
        add_sublayer(vectors[slot_mlp_post_norm]);
    }
    if (step_.num_logit_rows > 0) {
        logits();
    }
}

} // namespace

bool is_valid(const Model &model, const Step &step) {
    const Config &config = model.config;
    for (int i = 0; i < step.num_tokens; ++i) {
        const int token = step.token_ids[i], sequence = step.sequences[i];
        const int64_t column = step.positions[i] / config.page_tokens;
        if (token < 0 || token >= config.vocab_size || sequence < 0 ||
            sequence >= step.num_sequences || step.positions[i] < 0 || column >= step.max_pages) {
            return false;
        }
        const int page = step.page_table[int64_t(sequence) * step.max_pages + column];
        if (page < 0 || page >= config.num_pages) {
            return false;
        }
    }
    for (int i = 0; i < step.num_logit_rows; ++i) {
        if (step.logit_rows[i] < 0 || step.logit_rows[i] >= step.num_tokens) {
            return false;
        }
    }
    return true;
}

void run_step(Model &model, const Step &step) {
    std::lock_guard<std::mutex> lock(model.in_use);
    Runner runner(model, step);
    const ThreadPool::Awake awake(model.pool);
    runner.run();
}

} // namespace headrace
