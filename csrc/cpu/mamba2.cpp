#include "cpu/mamba2.h"
#include "cpu/causal_conv.h"
#include "cpu/products.h"

#include <algorithm>
#include <cmath>

namespace headrace {

namespace {

constexpr float linear_from = 20.0f; // where softplus(x) is x in fp32

int numbers_of(const Mamba2Config &config) {
    return config.num_heads * config.head_dim;
}

// The numbers of B, and of C.
int group_numbers(const Mamba2Config &config) {
    return config.num_groups * config.state_size;
}

// The numbers of a head's state.
size_t matrix_numbers(const Mamba2Config &config) {
    return size_t(config.state_size) * config.head_dim;
}

// Groups that have a norm each, those of all workers.
int num_norms(const Mamba2Config &config) {
    return config.norm_size > 0 ? config.all_numbers / config.norm_size : 0;
}

// What a layer computes in, cut out of what all share.
struct Mamba2Room {
    Mamba2Room(Model &model, const Mamba2Config &config, int num_tokens);

    float *z, *out;               // [tokens, stride of all numbers]
    float *steps, *decays;        // [tokens, stride of heads]
    float *squares;               // [tokens, norms]
    float *projected, *convolved; // x, B and C, each [tokens, its stride]
    float *drafts;                // [threads, numbers of a head's state], behind drafts
};

Mamba2Room::Mamba2Room(Model &model, const Mamba2Config &config, int num_tokens) {
    Mamba2Workspace &space = model.workspace.mamba2;
    const size_t n = num_tokens, inner = n * stride_of(numbers_of(config));
    const size_t heads = n * stride_of(config.num_heads);
    const size_t numbers = inner + 2 * n * stride_of(group_numbers(config));
    z = space.z.floats(inner);
    out = space.out.floats(inner);
    steps = space.steps.floats(2 * heads);
    decays = steps + heads;
    squares = space.squares.floats(n * num_norms(config));
    projected = space.projected.floats(numbers);
    convolved = space.convolved.floats(numbers);
    drafts = space.drafts.floats(model.pool.num_threads() * matrix_numbers(config));
}

// A projection of the layer's input, convolved.
struct ConvolvedPart {
    MatrixSlot matrix;
    VectorSlot bias;
    CausalConv conv;
    float *x;         // [tokens, stride], the projection
    float *convolved; // likewise

    const float *row(int token) const { return convolved + size_t(token) * conv.stride; }
};

// One layer of one step.
class Mamba2Step {
public:
    Mamba2Step(StepState &state, const Layer &layer);

    void project();
    void convolve();
    void scan();
    void gate();
    void finish();

private:
    static float softplus(float x) { return x > linear_from ? x : std::log1p(std::exp(x)); }
    ConvolvedPart part(MatrixSlot, VectorSlot bias, VectorSlot conv, VectorSlot conv_bias,
                       int channels, float multiplier);
    void prepare_steps(int token);
    void scan_head(const Chunk &, int head, float *drafts);
    void sum_squares();
    void norm_row(int token, float *row);
    float *row_of(float *rows, int token) const { return rows + size_t(token) * inner_stride; }

    // Call body(group, first, end) for what this worker has of each group that has a norm.
    template <class Body> void each_norm(const Body &body) const {
        const int first = config.first_number, end = first + inner, size = config.norm_size;
        for (int group = first / size; group * size < end; ++group) {
            body(group, std::max(first, group * size) - first,
                 std::min(end, (group + 1) * size) - first);
        }
    }

    StepState &s;
    const Layer &layer;
    const Mamba2Config &config;
    const int inner, inner_stride, heads_stride;
    Mamba2Room room;   // its last two: where the rows of the next convolution are
    size_t next_state; // where its columns are in a slot
    ConvolvedPart x, b, c;
    size_t matrix_offset; // of [heads, state_size, head_dim] in a slot
    Activations mixed;    // of inner_stride: silu(z) * out
};

Mamba2Step::Mamba2Step(StepState &state, const Layer &l)
    : s(state), layer(l), config(l.config.mamba2), inner(numbers_of(config)),
      inner_stride(stride_of(inner)), heads_stride(stride_of(config.num_heads)),
      room(state.model, config, state.num_tokens), next_state(l.state_offset) {
    const int bc = group_numbers(config);
    x = part(slot_in_x, slot_in_x_bias, slot_conv_x, slot_conv_x_bias, inner, config.x_multiplier);
    b = part(slot_in_b, slot_in_b_bias, slot_conv_b, slot_conv_b_bias, bc, config.b_multiplier);
    c = part(slot_in_c, slot_in_c_bias, slot_conv_c, slot_conv_c_bias, bc, config.c_multiplier);
    matrix_offset = next_state;
    mixed = {room.z, inner_stride, s.normed.rounded, s.normed.quantized};
}

// The next one, behind those before it in the workspace and in a slot.
ConvolvedPart Mamba2Step::part(MatrixSlot matrix, VectorSlot bias, VectorSlot conv,
                               VectorSlot conv_bias, int channels, float multiplier) {
    const std::vector<float> &added = layer.vectors[conv_bias];
    const int stride = stride_of(channels);
    const CausalConv made{layer.vectors[conv].data(),
                          room.projected,
                          stride,
                          channels,
                          config.kernel_size,
                          next_state,
                          added.empty() ? nullptr : added.data(),
                          multiplier};
    const ConvolvedPart result{matrix, bias, made, room.projected, room.convolved};
    next_state += made.state_numbers();
    room.projected += size_t(s.num_tokens) * stride;
    room.convolved += size_t(s.num_tokens) * stride;
    return result;
}

void Mamba2Step::project() {
    const auto product = [&](MatrixSlot matrix, VectorSlot bias, float *to, int stride) {
        return Product{{layer.matrices[matrix], s.normed, &layer.vectors[bias]}, to, stride};
    };
    multiply(s, s.num_tokens,
             {product(slot_in_z, slot_in_z_bias, room.z, inner_stride),
              product(x.matrix, x.bias, x.x, x.conv.stride),
              product(b.matrix, b.bias, b.x, b.conv.stride),
              product(c.matrix, c.bias, c.x, c.conv.stride),
              product(slot_in_dt, slot_in_dt_bias, room.steps, heads_stride)});
}

// How far each head's state moves with a token, and what remains of it.
void Mamba2Step::prepare_steps(int token) {
    float *step = room.steps + size_t(token) * heads_stride;
    float *decay = room.decays + size_t(token) * heads_stride;
    const std::vector<float> &bias = layer.vectors[slot_dt_bias];
    const std::vector<float> &rate = layer.vectors[slot_decay];
    for (int head = 0; head < config.num_heads; ++head) {
        step[head] = softplus(config.dt_multiplier * step[head] + bias[head]);
        decay[head] = std::exp(step[head] * rate[head]);
    }
}

void Mamba2Step::convolve() {
    s.each_row([&](int token) {
        for (const ConvolvedPart *part : {&x, &b, &c}) {
            part->conv.convolve(s, token, part->convolved + size_t(token) * part->conv.stride);
            if (CausalConv::ends_state(s.step, token)) {
                part->conv.write_state(s, token);
            }
        }
        prepare_steps(token);
    });
}

// A head's tokens of a chunk, one after the other. The first reads the slot that the chunk begins
// with. All write the one that it ends with, but drafts, whose state is not kept.
void Mamba2Step::scan_head(const Chunk &chunk, int head, float *drafts) {
    const int group = (config.first_head + head) / config.heads_per_group;
    const size_t at = matrix_offset + head * matrix_numbers(config);
    const int slot_in = s.step.state_in[chunk.sequence];
    SsmUpdate update{};
    update.before = slot_in < 0 ? nullptr : s.model.states.slot(slot_in) + at;
    update.after = s.model.states.slot(s.step.state_out[chunk.sequence]) + at;
    update.skip = layer.vectors[slot_skip][head];
    update.head_dim = config.head_dim;
    update.state_size = config.state_size;
    for (int i = 0; i < chunk.num_tokens; ++i) {
        const int token = chunk.first_token + i;
        update.after = i == chunk.num_covered ? drafts : update.after;
        update.x = x.row(token) + head * config.head_dim;
        update.b = b.row(token) + group * config.state_size;
        update.c = c.row(token) + group * config.state_size;
        update.step = room.steps[size_t(token) * heads_stride + head];
        update.decay = room.decays[size_t(token) * heads_stride + head];
        update.out = row_of(room.out, token) + head * config.head_dim;
        s.model.kernels->update_ssm(update);
        update.before = update.after;
    }
}

void Mamba2Step::scan() {
    const std::vector<Chunk> chunks = chunks_of(s.step);
    const size_t numbers = matrix_numbers(config);
    s.model.pool.run(int(chunks.size()) * config.num_heads, [&](int task, int thread) {
        scan_head(chunks[task / config.num_heads], task % config.num_heads,
                  room.drafts + thread * numbers);
    });
}

// A norm needs the squares of the heads that other workers have.
void Mamba2Step::sum_squares() {
    std::fill_n(room.squares, size_t(s.num_tokens) * num_norms(config), 0.0f);
    s.each_row([&](int token) {
        const float *row = row_of(config.norm_before_gate ? room.out : room.z, token);
        each_norm([&](int group, int first, int end) {
            room.squares[size_t(token) * num_norms(config) + group] =
                s.model.kernels->squares(row + first, end - first, 0.0f);
        });
    });
    s.model.peers.sum(room.squares, size_t(s.num_tokens) * num_norms(config));
}

void Mamba2Step::norm_row(int token, float *row) {
    const float *weight = layer.vectors[slot_ssm_norm].data();
    const float eps = s.config.norm_eps;
    each_norm([&](int group, int first, int end) {
        if (s.model.peers.alone()) {
            s.model.kernels->norm(row + first, weight + first, end - first, eps, false,
                                  row + first);
            return;
        }
        const float mean =
            room.squares[size_t(token) * num_norms(config) + group] / float(config.norm_size);
        const float scale = 1.0f / std::sqrt(mean + eps);
        for (int i = first; i < end; ++i) {
            row[i] *= scale * weight[i];
        }
    });
}

// z = norm(out * silu(z)), or norm(out) * silu(z).
void Mamba2Step::gate() {
    const bool has_norm = config.norm_size > 0, norm_first = config.norm_before_gate != 0;
    const bool sums = has_norm && !s.model.peers.alone();
    const auto multiply_gate = [&](int token) {
        float *gates = row_of(room.z, token);
        s.model.kernels->scale(gates, config.z_multiplier, inner, gates);
        s.model.kernels->gate(Gate::silu, gates, row_of(room.out, token), padded(inner));
    };
    if (sums && !norm_first) {
        s.each_row(multiply_gate);
    }
    if (sums) {
        sum_squares();
    }
    s.each_row([&](int token) {
        if (has_norm && norm_first) {
            norm_row(token, row_of(room.out, token));
        }
        if (!sums || norm_first) {
            multiply_gate(token);
        }
        if (has_norm && !norm_first) {
            norm_row(token, row_of(room.z, token));
        }
        round_activations(s, mixed, {&layer.matrices[slot_out]}, token);
    });
}

void Mamba2Step::finish() {
    const Linear product{layer.matrices[slot_out], mixed, &layer.vectors[slot_out_bias]};
    multiply(s, s.num_tokens, {{product, s.sublayer, s.hidden_stride}});
}

} // namespace

void find_mamba2_room(Model &model, int num_tokens) {
    for (const Layer &layer : model.layers) {
        if (layer.config.mixer == Mixer::mamba2) {
            Mamba2Room(model, layer.config.mamba2, num_tokens);
        }
    }
}

void run_mamba2(StepState &s, const Layer &layer) {
    StepClock &clock = s.model.pool.clock;
    Mamba2Step step(s, layer);
    clock.enter(StepPart::products);
    step.project();
    clock.enter(StepPart::rows);
    step.convolve();
    step.scan();
    step.gate();
    clock.enter(StepPart::products);
    step.finish();
}

} // namespace headrace
