#include "cpu/mamba.h"
#include "cpu/causal_conv.h"
#include "cpu/products.h"

#include <algorithm>

namespace headrace {

namespace {

constexpr int channels_per_task = 128;

// What a layer computes in, cut out of what all share.
struct MambaRoom {
    MambaRoom(Model &model, const MambaConfig &config, int num_tokens);

    float *x, *z, *convolved, *steps, *out; // [tokens, stride of channels]
    float *dt, *b, *c;                      // [tokens, stride of each]
    size_t low_numbers;                     // of these three, which lie one behind the other
    float *drafts;                          // [threads, numbers of the state], behind drafts
};

MambaRoom::MambaRoom(Model &model, const MambaConfig &config, int num_tokens) {
    MambaWorkspace &space = model.workspace.mamba;
    const size_t n = num_tokens, inner = n * stride_of(config.channels);
    const size_t rank = n * stride_of(config.rank), size = n * stride_of(config.state_size);
    x = space.x.floats(inner);
    z = space.z.floats(inner);
    convolved = space.convolved.floats(inner);
    steps = space.steps.floats(inner);
    out = space.out.floats(inner);
    low_numbers = rank + 2 * size;
    dt = space.low.floats(low_numbers);
    b = dt + rank;
    c = b + size;
    drafts = space.drafts.floats(model.pool.num_threads() * config.scan_numbers());
}

// One layer of one step.
class MambaStep {
public:
    MambaStep(StepState &state, const Layer &layer);

    void project();
    void convolve();
    void select();
    void scan();
    void gate();
    void finish();

private:
    void scan_channels(const Chunk &, int first, float *drafts);
    void norm(VectorSlot weight, float *row);
    float *row_of(float *rows, int token) const { return rows + size_t(token) * stride; }
    float *state_row(float *rows, int token) const { return rows + size_t(token) * state_stride; }

    StepState &s;
    const Layer &layer;
    const MambaConfig &config;
    const int stride, state_stride;
    const MambaRoom room;
    const CausalConv conv;
    const Activations convolved, dt, mixed;
};

MambaStep::MambaStep(StepState &state, const Layer &l)
    : s(state), layer(l), config(l.config.mamba), stride(stride_of(config.channels)),
      state_stride(stride_of(config.state_size)), room(state.model, config, state.num_tokens),
      conv{l.vectors[slot_conv_x].data(),
           room.x,
           stride,
           config.channels,
           config.kernel_size,
           l.state_offset,
           l.vectors[slot_conv_x_bias].empty() ? nullptr : l.vectors[slot_conv_x_bias].data()},
      convolved{room.convolved, stride, s.normed.rounded, s.normed.quantized},
      dt{room.dt, stride_of(config.rank), s.normed.rounded, s.normed.quantized},
      mixed{room.z, stride, s.normed.rounded, s.normed.quantized} {}

void MambaStep::project() {
    const Matrix *of = layer.matrices;
    multiply(s, s.num_tokens,
             {{{of[slot_in_z], s.normed, &layer.vectors[slot_in_z_bias]}, room.z, stride},
              {{of[slot_in_x], s.normed, &layer.vectors[slot_in_x_bias]}, room.x, stride}});
}

void MambaStep::convolve() {
    const Matrix *of = layer.matrices;
    s.each_row([&](int token) {
        conv.convolve(s, token, convolved.row(token));
        if (CausalConv::ends_state(s.step, token)) {
            conv.write_state(s, token);
        }
        round_activations(s, convolved, {of + slot_in_dt, of + slot_in_b, of + slot_in_c}, token);
    });
}

// Steps, B and C of a token follow from all channels, those of other workers, too.
void MambaStep::select() {
    const Matrix *of = layer.matrices;
    StepClock &clock = s.model.pool.clock;
    multiply(s, s.num_tokens,
             {{{of[slot_in_dt], convolved, nullptr}, room.dt, dt.stride},
              {{of[slot_in_b], convolved, nullptr}, room.b, state_stride},
              {{of[slot_in_c], convolved, nullptr}, room.c, state_stride}});
    clock.enter(StepPart::rows);
    s.model.peers.sum(room.dt, room.low_numbers);
    s.each_row([&](int token) {
        norm(slot_dt_norm, dt.row(token));
        norm(slot_b_norm, state_row(room.b, token));
        norm(slot_c_norm, state_row(room.c, token));
        round_activations(s, dt, {of + slot_dt}, token);
    });
    clock.enter(StepPart::products);
    multiply(s, s.num_tokens, {{{of[slot_dt], dt, nullptr}, room.steps, stride}});
}

void MambaStep::norm(VectorSlot slot, float *row) {
    const std::vector<float> &weight = layer.vectors[slot];
    if (!weight.empty()) {
        s.model.kernels->norm(row, weight.data(), int(weight.size()), s.config.norm_eps, false,
                              row);
    }
}

// Some channels' tokens of a chunk, one after the other. The first reads the slot that the chunk
// begins with. All write the one that it ends with, but drafts, whose state is not kept.
void MambaStep::scan_channels(const Chunk &chunk, int first, float *drafts) {
    const size_t at = layer.state_offset + conv.state_numbers();
    const int slot_in = s.step.state_in[chunk.sequence];
    ScanUpdate update{};
    update.before = slot_in < 0 ? nullptr : s.model.states.slot(slot_in) + at;
    update.after = s.model.states.slot(s.step.state_out[chunk.sequence]) + at;
    update.bias = layer.vectors[slot_dt_bias].data();
    update.skip = layer.vectors[slot_skip].data();
    update.decay = layer.vectors[slot_decay].data();
    update.channels = config.channels;
    update.state_size = config.state_size;
    update.first = first;
    update.end = std::min(first + channels_per_task, config.channels);
    for (int i = 0; i < chunk.num_tokens; ++i) {
        const int token = chunk.first_token + i;
        update.after = i == chunk.num_covered ? drafts : update.after;
        update.x = convolved.row(token);
        update.steps = row_of(room.steps, token);
        update.b = state_row(room.b, token);
        update.c = state_row(room.c, token);
        update.out = row_of(room.out, token);
        s.model.kernels->update_channels(update);
        update.before = update.after;
    }
}

void MambaStep::scan() {
    const std::vector<Chunk> chunks = chunks_of(s.step);
    const int tasks = (config.channels + channels_per_task - 1) / channels_per_task;
    s.model.pool.run(int(chunks.size()) * tasks, [&](int task, int thread) {
        scan_channels(chunks[task / tasks], task % tasks * channels_per_task,
                      room.drafts + thread * config.scan_numbers());
    });
}

// z = out * silu(z)
void MambaStep::gate() {
    s.each_row([&](int token) {
        s.model.kernels->gate(Gate::silu, mixed.row(token), row_of(room.out, token),
                              padded(config.channels));
        round_activations(s, mixed, {&layer.matrices[slot_out]}, token);
    });
}

void MambaStep::finish() {
    const Linear product{layer.matrices[slot_out], mixed, &layer.vectors[slot_out_bias]};
    multiply(s, s.num_tokens, {{product, s.sublayer, s.hidden_stride}});
}

} // namespace

void find_mamba_room(Model &model, int num_tokens) {
    for (const Layer &layer : model.layers) {
        if (layer.config.mixer == Mixer::mamba) {
            MambaRoom(model, layer.config.mamba, num_tokens);
        }
    }
}

void run_mamba(StepState &s, const Layer &layer) {
    StepClock &clock = s.model.pool.clock;
    MambaStep step(s, layer);
    clock.enter(StepPart::products);
    step.project();
    clock.enter(StepPart::rows);
    step.convolve();
    clock.enter(StepPart::products);
    step.select();
    clock.enter(StepPart::rows);
    step.scan();
    step.gate();
    clock.enter(StepPart::products);
    step.finish();
}

} // namespace headrace
