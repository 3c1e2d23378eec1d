#include "cpu/attention_phases.h"

#include <algorithm>
#include <cmath>

namespace headrace {

namespace {

void norm_heads(const Model &model, const std::vector<float> &weight, float *heads, int width) {
    const int n = int(weight.size()); // one head, or all of them
    for (int i = 0; i < width; i += n) {
        model.kernels->norm(heads + i, weight.data(), n, model.config.norm_eps,
                            model.config.layer_norm != 0, heads + i);
    }
}

// A norm over all heads needs the squares of those that other workers have.
bool sums_squares(const StepState &state) {
    return state.config.qk_norm == QKNorm::full && !state.model.peers.alone();
}

void sum_squares(StepState &state, const LayerConfig &layer) {
    const Config &config = state.config;
    const Peers &peers = state.model.peers;
    const auto squares_of = state.model.kernels->squares;
    state.each_row([&](int token) {
        const float *q = state.q + size_t(token) * state.q_stride;
        const float *k = state.k + size_t(token) * state.kv_stride;
        float *squares = state.squares + 2 * size_t(token);
        squares[0] = squares_of(q, config.num_heads * layer.head_dim, 0.0f);
        squares[1] =
            peers.owns_keys ? squares_of(k, layer.num_kv_heads * layer.head_dim, 0.0f) : 0.0f;
    });
    peers.sum(state.squares, 2 * size_t(state.num_tokens));
}

void norm_token(const StepState &state, const Layer &layer, int token, float *q, float *k) {
    const Config &config = state.config;
    const int dim = layer.config.head_dim;
    const int num_kv_heads = layer.has_pages() ? layer.config.num_kv_heads : 0;
    const auto &q_norm = layer.vectors[slot_q_norm], &k_norm = layer.vectors[slot_k_norm];
    if (!sums_squares(state)) {
        norm_heads(state.model, q_norm, q, config.num_heads * dim);
        norm_heads(state.model, k_norm, k, num_kv_heads * dim);
        return;
    }
    const auto norm_all = [&](float *x, const std::vector<float> &weight, int heads, float squares,
                              int all_heads) {
        const float mean = squares / float(all_heads * dim);
        const float scale = 1.0f / std::sqrt(mean + config.norm_eps);
        for (int i = 0; i < heads * dim; ++i) {
            x[i] *= scale * weight[i];
        }
    };
    const Peers &peers = state.model.peers;
    const float *squares = state.squares + 2 * size_t(token);
    norm_all(q, q_norm, config.num_heads, squares[0], peers.num_heads);
    norm_all(k, k_norm, num_kv_heads, squares[1], peers.num_kv_heads);
}

// Queries of one token as attention takes them: scaled, rounded where it multiplies bf16, and the
// rows of a tile adjacent.
void place_queries(const StepState &state, const Layer &layer, int token, const float *q) {
    const float scale =
        state.config.attention_scale * temperature(layer.config, state.step.positions[token]);
    const Kernels &kernels = *state.model.kernels;
    const int dim = layer.heads.head_dim, group_width = layer.heads.group * dim;
    for (int g = 0; g < layer.heads.num_groups; ++g, q += group_width) {
        float *out = state.queries + (size_t(g) * state.num_tokens + token) * group_width;
        kernels.scale(q, scale, group_width, out);
        for (int i = 0; i < group_width && state.rounds_attention; i += dim) {
            kernels.round_row(out + i, dim, out + i);
        }
    }
}

// Whether the keys of two tokens are written together. In fp32 they lie side by side in each line
// of a block. Written token by token, the heads' lines take each other's place in the cache.
bool share_lines(const StepState &state, int token, int next) {
    const Step &step = state.step;
    return state.model.kv.format() == Format::f32 &&
           step.sequences[next] == step.sequences[token] &&
           step.positions[next] == step.positions[token] + next - token &&
           step.positions[next] / lanes == step.positions[token] / lanes;
}

// Of tokens that share lines, if there are several.
void place_keys_and_values(const StepState &state, const Layer &layer, int first, int num_tokens) {
    const Config &config = state.config;
    const Step &step = state.step;
    const int position = step.positions[first];
    const int32_t *pages = step.page_table + size_t(step.sequences[first]) * step.max_pages;
    const int page = pages[position / config.page_tokens], row = position % config.page_tokens;
    const int dim = layer.config.head_dim, stride = state.kv_stride;
    const float *k = state.k + size_t(first) * stride, *v = state.v + size_t(first) * stride;
    for (int h = 0; h < layer.config.num_kv_heads; ++h, k += dim, v += dim) {
        HeadPlace place = state.model.kv.place(layer.kv_index, h, page, row);
        if (num_tokens > 1) {
            auto *line = reinterpret_cast<float *>(place.key);
            for (int d = 0; d < dim; ++d, line += lanes) {
                for (int i = 0; i < num_tokens; ++i) {
                    line[i] = k[size_t(i) * stride + d];
                }
            }
            place.key = nullptr;
        }
        for (int i = 0; i < num_tokens; ++i, place.value += lanes * sizeof(float)) {
            state.model.kernels->store_head(place, k, v + size_t(i) * stride);
        }
    }
}

void clip(float limit, float *x, int n) {
    for (int i = 0; i < n; ++i) {
        x[i] = std::clamp(x[i], -limit, limit); // NaN stays
    }
}

// Of keys and values, all but to place them.
void prepare_token(const StepState &state, int index, int token) {
    const Config &config = state.config;
    const Layer &layer = state.model.layers[index];
    const int dim = layer.config.head_dim;
    const int num_kv_heads = layer.has_pages() ? layer.config.num_kv_heads : 0;
    float *q = state.q + size_t(token) * state.q_stride;
    float *k = state.k + size_t(token) * state.kv_stride;
    float *v = state.v + size_t(token) * state.kv_stride;
    if (layer.matrices[slot_v].rows == 0) { // values are keys as they are projected
        std::copy_n(k, num_kv_heads * dim, v);
    }
    if (config.value_norm) {
        norm_heads(state.model, layer.vectors[slot_v_norm], v, num_kv_heads * dim);
    }
    if (config.qk_norm == QKNorm::per_head || config.qk_norm == QKNorm::full) {
        norm_token(state, layer, token, q, k);
    }
    if (config.qkv_clip > 0.0f) {
        clip(config.qkv_clip, q, config.num_heads * dim);
        clip(config.qkv_clip, k, num_kv_heads * dim);
        clip(config.qkv_clip, v, num_kv_heads * dim);
    }
    if (layer.config.rope >= 0) {
        const auto rotate = [&](float *heads, int num_heads) {
            for (int h = 0; h < num_heads; ++h) {
                state.rotate(layer.config.rope, token, heads + h * dim);
            }
        };
        rotate(q, config.num_heads);
        rotate(k, num_kv_heads);
    }
    const bool is_after_rope = config.qk_norm == QKNorm::per_head_after_rope ||
                               config.qk_norm == QKNorm::unweighted_after_rope;
    if (is_after_rope && !layer.vectors[slot_q_norm].empty()) {
        norm_token(state, layer, token, q, k);
    }
    place_queries(state, layer, token, q);
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

size_t partial_floats(const HeadGroups &heads, int rows) {
    return size_t(rows) * (padded(heads.value_dim) + 2);
}

Partial partial_at(float *memory, const HeadGroups &heads, int rows) {
    return {memory, memory + rows, memory + 2 * rows, padded(heads.value_dim)};
}

// A tile for a group of heads, which share a KV head: what a task works on.
class TileHead {
public:
    // `is_last`: of the task.
    TileHead(const StepState &state, int layer, const Tile &tile, int group, bool is_last = true)
        : state_(state), tile_(tile), heads_(state.model.layers[layer].heads), group_(group),
          kv_layer_(state.model.layers[layer].kv_index),
          sinks_(state.model.layers[layer].vectors[slot_sinks]) {
        const Config &config = state.config;
        const KvPages &kv = state.model.kv;
        const int kv_head = state.model.latent ? 0 : group;
        const size_t row = size_t(group) * state.num_tokens + tile.first_token;
        operands_ = {state.queries + row * heads_.group * heads_.head_dim,
                     state.rounds_attention,
                     tile.num_tokens,
                     heads_.group,
                     heads_.head_dim,
                     heads_.value_dim,
                     tile.first_position,
                     tile.last_key_in(state.model.layers[layer].config.window),
                     state.step.last_seen ? state.step.last_seen + tile.first_token : nullptr,
                     state.model.layers[layer].config.window,
                     config.attention_softcap,
                     kv.format(),
                     kv.keys(kv_layer_, kv_head),
                     kv.values(kv_layer_, kv_head),
                     is_last || state.model.latent ? nullptr : kv.keys(kv_layer_, kv_head + 1),
                     kv.page_bytes(),
                     config.page_tokens,
                     state.step.page_table + size_t(tile.sequence) * state.step.max_pages};
    }

    void attend_segment(int segment, float *scores, const Partial &partial) const {
        const Kernels &kernels = *state_.model.kernels;
        prefetch_segment(segment + 1);
        const auto attend =
            state_.model.latent ? kernels.attend_latent_segment : kernels.attend_segment;
        attend(operands_, segment, scores, partial);
    }

    void attend_all(float *scratch) const {
        const int rows = operands_.rows();
        float *memory = scratch + size_t(rows) * segment_tokens;
        const Partial total = partial_at(memory, heads_, rows);
        memory += partial_floats(heads_, rows);
        const Partial next = partial_at(memory, heads_, rows);
        const int first = tile_.first_segment(operands_.window);
        attend_segment(first, scratch, total);
        for (int segment = first + 1; segment < tile_.end_segment(operands_.window); ++segment) {
            attend_segment(segment, scratch, next);
            merge(total, next, rows);
        }
        write(total);
    }

    void write(const Partial &partial) const {
        for (int row = 0; row < operands_.rows(); ++row) {
            const int token = tile_.first_token + row / heads_.group;
            const int head = group_ * heads_.group + row % heads_.group;
            float *out = state_.attended_head(heads_, token, head);
            const float *values = partial.values + size_t(row) * partial.stride;
            float sum = partial.sum[row];
            if (!sinks_.empty()) { // one more numerator, whose value is zero
                sum += std::exp(sinks_[head] - partial.maximum[row]);
            }
            for (int i = 0; i < heads_.value_dim; ++i) {
                out[i] = values[i] / sum;
            }
        }
    }

private:
    // Have the processor look up where the keys and values of a segment are. Shared memory has
    // small pages of the system's, and such a lookup takes as long as a read from memory.
    void prefetch_segment(int segment) const {
        constexpr size_t system_page = 4096;
        const int first = segment * segment_tokens;
        const int last = std::min(first + segment_tokens, operands_.last_key + 1);
        const size_t head_bytes = state_.model.kv.head_bytes(kv_layer_);
        for (int key = first; key < last; key += operands_.page_tokens) {
            const uint8_t *head = operands_.keys + operands_.page_offset(key);
            for (size_t offset = 0; offset < head_bytes; offset += system_page) {
                __builtin_prefetch(head + offset);
            }
        }
    }

    const StepState &state_;
    const Tile &tile_;
    const HeadGroups &heads_;
    int group_, kv_layer_;
    const std::vector<float> &sinks_; // empty: none
    AttentionTile operands_;
};

// Few tokens, long contexts: segments are tasks of their own, merged afterwards.
void attend_split(StepState &state, int layer) {
    struct Task {
        const Tile *tile;
        int group, segment;
        Partial partial;
    };
    const HeadGroups &heads = state.model.layers[layer].heads;
    std::vector<Task> tasks;
    for (const Tile &tile : state.tiles) {
        const Window window = state.model.layers[layer].config.window;
        const int first = tile.first_segment(window), end = tile.end_segment(window);
        for (int group = 0; group < heads.num_groups; ++group) {
            for (int segment = first; segment < end; ++segment) {
                tasks.push_back({&tile, group, segment, {}});
            }
        }
    }
    const size_t size = partial_floats(heads, state.tile_rows);
    float *memory = state.model.workspace.partials.floats(tasks.size() * size);
    for (Task &task : tasks) {
        task.partial = partial_at(memory, heads, task.tile->num_tokens * heads.group);
        memory += size;
    }
    state.model.pool.run(int(tasks.size()), [&](int i, int thread) {
        const TileHead head(state, layer, *tasks[i].tile, tasks[i].group);
        head.attend_segment(tasks[i].segment, state.model.workspace.scratch[thread].as<float>(),
                            tasks[i].partial);
    });
    for (size_t i = 0, next; i < tasks.size(); i = next) {
        const Task &first = tasks[i];
        const auto is_same = [&](const Task &task) {
            return task.tile == first.tile && task.group == first.group;
        };
        for (next = i + 1; next < tasks.size() && is_same(tasks[next]); ++next) {
            merge(first.partial, tasks[next].partial, first.tile->num_tokens * heads.group);
        }
        TileHead(state, layer, *first.tile, first.group).write(first.partial);
    }
}

} // namespace

float temperature(const LayerConfig &layer, int position) {
    if (layer.temperature_scale == 0.0f) {
        return 1.0f;
    }
    const int step = (position + layer.temperature_offset) / layer.temperature_tokens;
    return std::log1p(float(step)) * layer.temperature_scale + 1.0f;
}

void store_keys_and_values(StepState &state, int layer) {
    if (sums_squares(state)) {
        sum_squares(state, state.model.layers[layer].config);
    }
    const Layer &own = state.model.layers[layer];
    state.each_rows(state.num_tokens, [&](int begin, int end) {
        for (int token = begin; token < end; ++token) {
            prepare_token(state, layer, token);
        }
        for (int token = begin, next; own.has_pages() && token < end; token = next) {
            for (next = token + 1; next < end && share_lines(state, token, next); ++next) {
            }
            place_keys_and_values(state, own, token, next - token);
        }
    });
}

void attend(StepState &state, int layer) {
    const int num_groups = state.model.layers[layer].heads.num_groups;
    const int num_tasks = int(state.tiles.size()) * num_groups;
    if (num_tasks < 8 * state.model.pool.num_threads()) {
        attend_split(state, layer);
        return;
    }
    // All groups of a tile, as they lie in its pages, where these are tasks enough.
    const bool is_enough = int(state.tiles.size()) >= 8 * state.model.pool.num_threads();
    const int at_once = is_enough ? num_groups : 1;
    state.model.pool.run(num_tasks / at_once, [&](int task, int thread) {
        for (int i = 0; i < at_once; ++i) {
            const int index = task * at_once + i;
            const Tile &tile = state.tiles[index / num_groups];
            TileHead(state, layer, tile, index % num_groups, i + 1 == at_once)
                .attend_all(state.model.workspace.scratch[thread].as<float>());
        }
    });
}

} // namespace headrace
