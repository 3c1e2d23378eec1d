#include "cpu/gemma.h"
#include "cpu/products.h"

#include <algorithm>
#include <cmath>

namespace headrace {

namespace {

constexpr float root_half = 0.70710678f;
constexpr float least_square = 1e-5f; // of the mean of a projected residual's squares
constexpr int most_inputs = 8;        // residuals; MAX_RESIDUALS of cpu_layers.py

Activations activations(ActivationBuffers &space, size_t count, int width) {
    const int stride = stride_of(width);
    return {space.rows.floats(count * stride), stride, space.rounded.floats(count * stride),
            space.quantized.room<Int16Group>(count * groups_of(width))};
}

void norm(const StepState &s, const float *x, const std::vector<float> &weight, float *out) {
    s.model.kernels->norm(x, weight.data(), int(weight.size()), s.config.norm_eps, false, out);
}

float mean_square(const StepState &s, const float *x) {
    return s.model.kernels->squares(x, s.config.hidden_size, 0.0f) / float(s.config.hidden_size);
}

float dot(const float *x, const float *y, int n) {
    float sums[lanes] = {};
    int i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (int lane = 0; lane < lanes; ++lane) {
            sums[lane] += x[i + lane] * y[i + lane];
        }
    }
    float total = 0.0f;
    for (const float sum : sums) {
        total += sum;
    }
    for (; i < n; ++i) {
        total += x[i] * y[i];
    }
    return total;
}

// A token's embeddings for all layers, which one of the workers has. Those of tokens that the table
// lacks, and of rows of images, are the first token's.
void embed_for_layers(const StepState &s, int token) {
    const Matrix &table = s.model.per_layer_embed;
    float *row = s.gemma.inputs + size_t(token) * s.gemma.inputs_stride;
    const bool is_image = s.step.embed_rows && s.step.embed_rows[token] >= 0;
    const int id = is_image ? 0 : s.step.token_ids[token];
    const int index = (id < s.config.per_layer_vocab ? id : 0) - s.model.peers.first_token();
    if (index < 0 || index >= table.rows) {
        std::fill_n(row, table.cols, 0.0f);
        return;
    }
    unpack_row(table, index, row);
    s.model.kernels->scale(row, std::sqrt(float(s.config.per_layer_size)), table.cols, row);
}

// inputs = (inputs + norm(context)) / sqrt(2), layer by layer.
void add_context(const StepState &s, int token) {
    const Kernels &kernels = *s.model.kernels;
    const int size = s.config.per_layer_size;
    const float scale = 1.0f / std::sqrt(float(s.config.hidden_size));
    float *context = s.gemma.context + size_t(token) * s.gemma.inputs_stride;
    float *inputs = s.gemma.inputs + size_t(token) * s.gemma.inputs_stride;
    for (int i = 0; i < s.config.num_layers; ++i, context += size, inputs += size) {
        kernels.scale(context, scale, size, context);
        norm(s, context, s.model.per_layer_norm, context);
        kernels.add(context, 1.0f, size, inputs);
        kernels.scale(inputs, root_half, size, inputs);
    }
}

// Give a projected residual the magnitude of another.
void match(const StepState &s, const float *other, float *x) {
    const float own = std::sqrt(std::max(mean_square(s, x), least_square));
    s.model.kernels->scale(x, std::sqrt(mean_square(s, other)) / own, s.config.hidden_size, x);
}

// The weights that all factors of a token follow from; `scratch` is as wide as x.
void find_modes(const StepState &s, const Layer &layer, const float *x, float *scratch,
                float *modes) {
    const int n = s.config.hidden_size;
    norm(s, x, layer.vectors[slot_altup_norm], scratch);
    s.model.kernels->scale(scratch, 1.0f / float(n), n, scratch);
    const float *router = layer.vectors[slot_altup_router].data();
    for (int i = 0; i < s.config.num_residuals; ++i, router += n) {
        modes[i] = std::tanh(dot(scratch, router, n));
    }
}

// What a layer sees of the first residual, beside its embeddings.
void correct_residuals(const StepState &s, const Layer &layer, int token) {
    const Kernels &kernels = *s.model.kernels;
    const int n = s.config.hidden_size, count = s.config.num_residuals;
    float *changed = s.residual + size_t(token) * s.hidden_stride;
    float *seen = s.normed.row(token), modes[most_inputs];
    find_modes(s, layer, changed, seen, modes);
    kernels.add(s.gemma.predicted_row(token, 0), -1.0f, n, changed); // now the change alone
    const float *correct = layer.vectors[slot_altup_correct].data();
    for (int i = 0; i < count; ++i) {
        float *residual = s.gemma.residual_row(token, i);
        std::copy_n(s.gemma.predicted_row(token, i), n, residual);
        kernels.add(changed, 1.0f + dot(modes, correct + i * count, count), n, residual);
    }
    const float *first = s.gemma.residual_row(token, 0);
    if (s.config.scales_output) {
        kernels.multiply(first, layer.vectors[slot_altup_scale].data(), n, seen);
    } else {
        std::copy_n(first, n, seen);
    }
}

// Add what the embeddings for a layer have become: to the residual, or to all but the first.
void add_embedded(const StepState &s, const Layer &layer, int token) {
    const Kernels &kernels = *s.model.kernels;
    const int n = s.config.hidden_size;
    float *x = s.sublayer + size_t(token) * s.hidden_stride;
    norm(s, x, layer.vectors[slot_per_layer_norm], x);
    if (s.config.num_residuals == 0) {
        kernels.add(x, 1.0f, n, s.residual + size_t(token) * s.hidden_stride);
    }
    for (int i = 1; i < s.config.num_residuals; ++i) {
        kernels.add(x, 1.0f, n, s.gemma.residual_row(token, i));
    }
}

// sublayer = out(act(gate(normed)) * the embeddings for the layer)
void embed_layer(StepState &s, const Layer &layer, int index) {
    const Matrix &gate = layer.matrices[slot_per_layer_gate];
    const Matrix &out = layer.matrices[slot_per_layer_out];
    const Activations &gated = s.gemma.gated;
    StepClock &clock = s.model.pool.clock;
    clock.enter(StepPart::products);
    multiply(s, s.num_tokens, {{{gate, s.normed, nullptr}, gated.rows, gated.stride}});
    clock.enter(StepPart::rows);
    s.each_row([&](int token) {
        const int size = s.config.per_layer_size;
        const float *inputs =
            s.gemma.inputs + size_t(token) * s.gemma.inputs_stride + size_t(index) * size;
        s.model.kernels->gate(s.config.activation, gated.row(token), inputs, size);
        round_activations(s, gated, {&out}, token);
    });
    clock.enter(StepPart::products);
    multiply(s, s.num_tokens, {{{out, gated, nullptr}, s.sublayer, s.hidden_stride}});
    clock.enter(StepPart::rows);
}

} // namespace

GemmaRoom find_gemma_room(Model &model, int num_tokens) {
    const Config &config = model.config;
    GemmaWorkspace &space = model.workspace.gemma;
    const size_t n = num_tokens, count = config.num_residuals;
    const int hidden = config.hidden_size;
    GemmaRoom room;
    room.inputs_stride = stride_of(config.num_layers * config.per_layer_size);
    if (config.per_layer_size > 0) {
        room.inputs = space.inputs.floats(n * room.inputs_stride);
        room.context = space.context.floats(n * room.inputs_stride);
        room.gated = activations(space.gated, n, config.per_layer_size);
    }
    if (count > 0) {
        room.hidden = hidden;
        room.num_residuals = int(count);
        room.residuals = space.residuals.floats(n * stride_of(int(count) * hidden));
        room.predicted = space.predicted.floats(n * stride_of(int(count) * hidden));
        room.laurel = space.laurel.floats(n * stride_of(hidden));
        room.low = activations(space.low, n, config.laurel_rank);
        room.joined = activations(space.joined, n * (count - 1), hidden);
        room.back = space.back.floats(n * (count - 1) * stride_of(hidden));
    }
    bool cuts_gates = false;
    int inner = 0;
    for (const Layer &layer : model.layers) {
        cuts_gates = cuts_gates || layer.config.cuts_gates;
        inner = std::max(inner, layer.config.intermediate_size);
    }
    room.gates = cuts_gates ? space.gates.floats(n * stride_of(inner)) : nullptr;
    return room;
}

void begin_residuals(StepState &s) {
    const int count = s.config.num_residuals;
    const Matrix &context = s.model.per_layer_proj, &into = s.model.altup_in;
    if (s.config.per_layer_size == 0) {
        return;
    }
    s.each_row([&](int token) {
        embed_for_layers(s, token);
        std::copy_n(s.residual + size_t(token) * s.hidden_stride, s.config.hidden_size,
                    s.normed.row(token));
        round_activations(s, s.normed, {&context, &into}, token);
    });
    s.model.peers.sum(s.gemma.inputs, size_t(s.num_tokens) * s.gemma.inputs_stride);
    s.model.pool.clock.enter(StepPart::products);
    const Product of_context{{context, s.normed, nullptr}, s.gemma.context, s.gemma.inputs_stride};
    if (count > 0) {
        multiply(s, s.num_tokens,
                 {of_context,
                  {{into, s.normed, nullptr}, s.gemma.residual_row(0, 1), s.gemma.stride()}});
    } else {
        multiply(s, s.num_tokens, {of_context});
    }
    s.model.pool.clock.enter(StepPart::rows);
    s.each_row([&](int token) {
        add_context(s, token);
        const float *x = s.residual + size_t(token) * s.hidden_stride;
        for (int i = 0; i < count; ++i) {
            float *residual = s.gemma.residual_row(token, i);
            if (i == 0) {
                std::copy_n(x, s.config.hidden_size, residual);
            } else {
                match(s, x, residual);
            }
        }
    });
}

void predict_residuals(const StepState &s, int index, int token) {
    const int count = s.config.num_residuals, n = s.config.hidden_size;
    if (count == 0) {
        return;
    }
    const Layer &layer = s.model.layers[index];
    float modes[most_inputs];
    find_modes(s, layer, s.gemma.residual_row(token, 0), s.normed.row(token), modes);
    const float *predict = layer.vectors[slot_altup_predict].data();
    for (int i = 0; i < count; ++i) {
        float *predicted = s.gemma.predicted_row(token, i);
        std::copy_n(s.gemma.residual_row(token, i), n, predicted);
        for (int j = 0; j < count; ++j, predict += count) {
            s.model.kernels->add(s.gemma.residual_row(token, j), dot(modes, predict, count), n,
                                 predicted);
        }
    }
    std::copy_n(s.gemma.predicted_row(token, 0), n, s.residual + size_t(token) * s.hidden_stride);
}

void compute_laurel(StepState &s, const Layer &layer) {
    const Matrix &left = layer.matrices[slot_laurel_left];
    const Matrix &right = layer.matrices[slot_laurel_right];
    const Activations &low = s.gemma.low;
    const int n = s.config.hidden_size, stride = stride_of(n);
    StepClock &clock = s.model.pool.clock;
    clock.enter(StepPart::products);
    multiply(s, s.num_tokens, {{{left, s.normed, nullptr}, low.rows, low.stride}});
    s.each_row([&](int token) { round_activations(s, low, {&right}, token); });
    multiply(s, s.num_tokens, {{{right, low, nullptr}, s.gemma.laurel, stride}});
    clock.enter(StepPart::rows);
    s.each_row([&](int token) {
        float *laurel = s.gemma.laurel + size_t(token) * stride;
        norm(s, laurel, layer.vectors[slot_laurel_norm], laurel);
        s.model.kernels->add(s.normed.row(token), 1.0f, n, laurel);
    });
}

void add_laurel(const StepState &s, int token) {
    const int n = s.config.hidden_size;
    float *x = s.residual + size_t(token) * s.hidden_stride;
    s.model.kernels->add(s.gemma.laurel + size_t(token) * stride_of(n), 1.0f, n, x);
    s.model.kernels->scale(x, root_half, n, x);
}

bool has_more(const Model &model, const Layer &layer) {
    return model.config.per_layer_size > 0 || !layer.vectors[slot_scale].empty();
}

void leave_layer(StepState &s, const Layer &layer, int index) {
    const bool is_embedded = s.config.per_layer_size > 0;
    if (is_embedded) {
        s.each_row([&](int token) {
            if (s.config.num_residuals > 0) {
                correct_residuals(s, layer, token);
            } else {
                std::copy_n(s.residual + size_t(token) * s.hidden_stride, s.config.hidden_size,
                            s.normed.row(token));
            }
            round_activations(s, s.normed, {&layer.matrices[slot_per_layer_gate]}, token);
        });
        embed_layer(s, layer, index);
    }
    const std::vector<float> &scale = layer.vectors[slot_scale];
    s.each_row([&](int token) {
        if (is_embedded) {
            add_embedded(s, layer, token);
        }
        float *x = s.residual + size_t(token) * s.hidden_stride;
        if (!scale.empty()) {
            s.model.kernels->scale(x, scale[0], s.config.hidden_size, x);
        }
    });
}

void join_residuals(StepState &s) {
    const int count = s.config.num_residuals - 1, n = s.config.hidden_size;
    const int num_rows = s.step.num_logit_rows, blocks = blocks_of(n), stride = stride_of(n);
    if (count <= 0 || num_rows == 0) {
        return;
    }
    const Matrix &out = s.model.altup_out;
    const Activations &joined = s.gemma.joined;
    s.each_row(count * num_rows, [&](int row) {
        const int token = s.step.logit_rows[row % num_rows];
        std::copy_n(s.gemma.residual_row(token, 1 + row / num_rows), n, joined.row(row));
        round_activations(s, joined, {&out}, row);
    });
    const std::vector<Extent> extents(count, {num_rows, blocks});
    multiply_each(s, extents, out, [&](int i, const ProductPart &part) {
        const ProductPart own{i * num_rows + part.row,
                              part.rows,
                              i * blocks + part.block,
                              part.blocks,
                              part.thread,
                              i * blocks + part.next_block};
        multiply_part(s, {out, joined, nullptr}, own, next_weights(out, own),
                      s.gemma.back + size_t(own.row) * stride + part.block * lanes, stride);
    });
    s.each_row(num_rows, [&](int row) {
        const int token = s.step.logit_rows[row];
        const float *first = s.gemma.residual_row(token, 0);
        float *mean = s.residual + size_t(token) * s.hidden_stride;
        std::copy_n(first, n, mean);
        for (int i = 0; i < count; ++i) {
            float *back = s.gemma.back + size_t(i * num_rows + row) * stride;
            match(s, first, back);
            s.model.kernels->add(back, 1.0f, n, mean);
        }
        s.model.kernels->scale(mean, 1.0f / float(count + 1), n, mean);
    });
}

void multiply_cut_gates(StepState &s, const Layer &layer) {
    const Matrix &gate = layer.matrices[slot_gate], &up = layer.matrices[slot_up];
    const int n = gate.rows, stride = stride_of(s.inner);
    const auto gates_of = [&](int token) { return s.gemma.gates + size_t(token) * stride; };
    float *const sums = s.squares; // [tokens, 2]: of gates or of their deviations, and how many
    multiply(s, s.num_tokens,
             {{{gate, s.normed, &layer.vectors[slot_gate_bias]}, s.gemma.gates, stride},
              {{up, s.normed, &layer.vectors[slot_up_bias]}, s.gated.rows, s.gated.stride}});
    s.model.pool.clock.enter(StepPart::rows);
    s.each_row([&](int token) {
        double sum = 0.0;
        for (int i = 0; i < n; ++i) {
            sum += gates_of(token)[i];
        }
        sums[2 * token] = float(sum);
        sums[2 * token + 1] = float(n);
    });
    s.model.peers.sum(sums, 2 * size_t(s.num_tokens));
    std::vector<float> means(s.num_tokens);
    s.each_row([&](int token) {
        const float count = sums[2 * token + 1];
        means[token] = sums[2 * token] / count;
        sums[2 * token] = s.model.kernels->squares(gates_of(token), n, means[token]);
        sums[2 * token + 1] = s.model.peers.rank == 0 ? count : 0.0f;
    });
    s.model.peers.sum(sums, 2 * size_t(s.num_tokens));
    s.each_row([&](int token) {
        const float deviation = std::sqrt(sums[2 * token] / sums[2 * token + 1]);
        const float cut = means[token] + deviation * layer.config.gate_cut;
        float *gates = gates_of(token), *ups = s.gated.row(token);
        for (int i = 0; i < n; ++i) {
            gates[i] = std::max(gates[i] - cut, 0.0f);
        }
        s.model.kernels->gate(s.config.activation, gates, ups, padded(n));
        std::copy_n(gates, n, ups);
        round_activations(s, s.gated, {&layer.matrices[slot_down]}, token);
    });
    s.model.pool.clock.enter(StepPart::products);
}

} // namespace headrace
