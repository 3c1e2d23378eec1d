#include "cpu/mixture.h"
#include "cpu/products.h"
#include "cpu/router.h"

#include <algorithm>
#include <cmath>

namespace headrace {

namespace {

// What a mixture computes in, cut for one layer out of what all share.
struct MixtureRoom {
    MixtureRoom(Model &model, const MixtureConfig &config, int num_tokens);

    int router_stride, hidden_stride;
    float *router;               // [tokens, stride]: logits, and scratch behind them
    int32_t *experts;            // [tokens, experts per token]
    float *weights;              // likewise
    int32_t *places;             // likewise: a pair's row, by expert; -1: it is not here
    Activations gathered, gated; // of pairs, by expert
    float *outputs;              // [pairs, hidden_stride], likewise
    Activations shared_gated;    // of tokens
    float *shared;               // [tokens, hidden_stride]
};

MixtureRoom::MixtureRoom(Model &model, const MixtureConfig &config, int num_tokens) {
    MixtureWorkspace &space = model.workspace.mixture;
    const size_t n = num_tokens, pairs = n * config.experts_per_token;
    const int hidden = model.config.hidden_size;
    const auto activations = [](Buffer &rows, Buffer &rounded, Buffer &quantized, size_t count,
                                int width) {
        const int stride = stride_of(width);
        return Activations{rows.floats(count * stride), stride, rounded.floats(count * stride),
                           quantized.room<Int16Group>(count * groups_of(width))};
    };
    hidden_stride = stride_of(hidden);
    router_stride = stride_of(config.num_experts + config.shared_gate) + 2 * config.num_experts;
    router = space.router.floats(n * router_stride);
    experts = space.experts.room<int32_t>(pairs);
    weights = space.weights.floats(pairs);
    places = space.places.room<int32_t>(pairs);
    gathered = activations(space.gathered, space.rounded, space.quantized, pairs, hidden);
    gated = activations(space.gated, space.rounded_gated, space.quantized_gated, pairs,
                        config.intermediate_size);
    outputs = space.outputs.floats(pairs * hidden_stride);
    const size_t rows = config.shared_intermediate_size > 0 ? n : 0;
    shared_gated = activations(space.shared_gated, space.rounded_shared, space.quantized_shared,
                               rows, config.shared_intermediate_size);
    shared = space.shared.floats(rows * hidden_stride);
}

// An expert and the pairs that chose it.
struct ExpertRows {
    int expert;          // among the local ones
    int first_row, rows; // of the pairs, by expert
    int first_token;     // its tokens follow each other from here on; -1: they are gathered
};

// One layer of one step.
class Mixture {
public:
    Mixture(StepState &state, const Layer &layer)
        : s_(state), layer_(layer), config_(layer.config.mixture),
          room_(state.model, config_, state.num_tokens) {}

    void run() {
        if (config_.own_norms) {
            s_.each_row([&](int token) { enter(token, slot_router_norm); });
        }
        route();
        if (config_.own_norms) {
            s_.each_row([&](int token) {
                enter(token, slot_expert_norm);
                round_activations(s_, s_.normed, {&matrix(slot_gate), &matrix(slot_up)}, token);
            });
        }
        sort();
        find_runs();
        gather();
        multiply_gates();
        multiply_downs();
        s_.each_row([&](int token) { combine(token); });
    }

private:
    // Without gates, what an activation is applied to is the products with `up`.
    bool has_gate() const { return s_.config.gated_mlp != 0; }
    const Matrix &matrix(MatrixSlot slot) const { return layer_.matrices[slot]; }
    const std::vector<float> &bias(VectorSlot slot) const { return layer_.vectors[slot]; }
    // With norms of its own, the shared MLP is computed elsewhere.
    bool has_shared_mlp() const { return layer_.has_shared_mlp() && !config_.own_norms; }
    const std::vector<AdapterRun> &shared_runs() const {
        return has_shared_mlp() ? s_.token_runs : none_;
    }
    void enter(int token, VectorSlot norm) const;
    float *logits_of(int token) const { return room_.router + size_t(token) * room_.router_stride; }

    void route();
    void sort();
    void find_runs();
    void gather();
    std::vector<Extent> extents(int expert_width, int shared_width) const;
    void multiply_gates();
    void multiply_downs();
    void combine(int token) const;

    StepState &s_;
    const Layer &layer_;
    const MixtureConfig &config_;
    const MixtureRoom room_;
    std::vector<ExpertRows> chosen_;
    std::vector<int> tokens_;      // of the pairs, by expert
    std::vector<float> x_weights_; // likewise; empty: outputs are weighted
    std::vector<AdapterRun> runs_; // likewise
    const std::vector<AdapterRun> none_;
};

// normed = norm(residual); what the router reads is also divided by the root of the width.
void Mixture::enter(int token, VectorSlot norm) const {
    const int n = s_.config.hidden_size;
    float *x = s_.normed.row(token);
    s_.model.kernels->norm(s_.residual + size_t(token) * s_.hidden_stride,
                           layer_.vectors[norm].data(), n, s_.config.norm_eps, false, x);
    if (norm == slot_router_norm) {
        s_.model.kernels->scale(x, 1.0f / std::sqrt(float(n)), n, x);
    }
}

void Mixture::route() {
    const Matrix &router = matrix(slot_router);
    multiply(s_, s_.num_tokens,
             {{{router, s_.normed, &bias(slot_router_bias)}, room_.router, room_.router_stride}});
    const std::vector<float> &selection_bias = bias(slot_selection_bias);
    s_.each_row([&](int token) {
        float *logits = logits_of(token);
        const size_t first = size_t(token) * config_.experts_per_token;
        choose_experts(config_, logits, selection_bias.empty() ? nullptr : selection_bias.data(),
                       logits + stride_of(router.rows), room_.experts + first,
                       room_.weights + first);
        const std::vector<float> &scales = bias(slot_router_scales);
        for (int i = 0; i < config_.experts_per_token && !scales.empty(); ++i) {
            room_.weights[first + i] *= scales[room_.experts[first + i]];
        }
    });
}

// By expert; those of one expert stay in the order of their tokens.
void Mixture::sort() {
    const int num_pairs = s_.num_tokens * config_.experts_per_token;
    const auto is_here = [&](int expert) {
        return expert >= 0 && expert < config_.num_local_experts;
    };
    std::vector<int> next(config_.num_local_experts + 1);
    for (int pair = 0; pair < num_pairs; ++pair) {
        const int expert = room_.experts[pair] - config_.first_expert;
        if (is_here(expert)) {
            ++next[expert + 1];
        }
    }
    for (int expert = 0; expert < config_.num_local_experts; ++expert) {
        const int first = next[expert], rows = next[expert + 1];
        next[expert + 1] += first;
        if (rows > 0) {
            chosen_.push_back({expert, first, rows, -1});
        }
    }
    tokens_.resize(next.back());
    x_weights_.resize(config_.weighs_inputs ? next.back() : 0);
    for (int pair = 0; pair < num_pairs; ++pair) {
        const int expert = room_.experts[pair] - config_.first_expert;
        room_.places[pair] = is_here(expert) ? next[expert]++ : -1;
        if (is_here(expert)) {
            tokens_[room_.places[pair]] = pair / config_.experts_per_token;
        }
        if (is_here(expert) && config_.weighs_inputs) {
            x_weights_[room_.places[pair]] = room_.weights[pair];
        }
    }
}

void Mixture::find_runs() {
    for (const ExpertRows &chosen : chosen_) {
        const int *tokens = tokens_.data() + chosen.first_row;
        for (AdapterRun run : adapter_runs(s_.step.adapters, chosen.rows,
                                           [&](int i) { return s_.step.sequences[tokens[i]]; })) {
            run.first += chosen.first_row;
            run.expert = chosen.expert;
            runs_.push_back(run);
        }
    }
}

// Copy the rows of experts whose tokens do not follow each other. With adapters copy all: each pair
// has a product of its own.
void Mixture::gather() {
    const bool has_adapters =
        is_adapted(runs_, matrix(slot_gate)) || is_adapted(runs_, matrix(slot_up));
    std::vector<int> rows;
    for (ExpertRows &chosen : chosen_) {
        const int first = chosen.first_row, last = first + chosen.rows - 1;
        if (!has_adapters && tokens_[last] - tokens_[first] == last - first) {
            chosen.first_token = tokens_[first];
            continue;
        }
        for (int row = first; row <= last; ++row) {
            rows.push_back(row);
        }
    }
    s_.each_row(int(rows.size()), [&](int i) {
        copy_activations(s_, s_.normed, tokens_[rows[i]],
                         {&matrix(has_gate() ? slot_gate : slot_up), &matrix(slot_up)},
                         room_.gathered, rows[i]);
    });
}

// Of the chosen experts, then of the shared MLP.
std::vector<Extent> Mixture::extents(int expert_width, int shared_width) const {
    std::vector<Extent> all;
    for (const ExpertRows &chosen : chosen_) {
        all.push_back({chosen.rows, blocks_of(expert_width)});
    }
    if (has_shared_mlp()) {
        all.push_back({s_.num_tokens, blocks_of(shared_width)});
    }
    return all;
}

void Mixture::multiply_gates() {
    Linear gate{matrix(slot_gate), room_.gathered, &bias(slot_gate_bias)};
    Linear up{matrix(slot_up), room_.gathered, &bias(slot_up_bias)};
    GatedProduct shared{{matrix(slot_shared_gate), s_.normed, &bias(slot_shared_gate_bias)},
                        {matrix(slot_shared_up), s_.normed, &bias(slot_shared_up_bias)},
                        room_.shared_gated,
                        matrix(slot_shared_down)};
    shared.has_gate = has_gate();
    const int width = config_.intermediate_size;
    const float *x_weights = config_.weighs_inputs ? x_weights_.data() : nullptr;
    shrink(s_, {{runs_, int(tokens_.size()), {&gate, &up}},
                {shared_runs(), s_.num_tokens, {&shared.gate, &shared.up}}});
    multiply_each(s_, extents(width, config_.shared_intermediate_size), up.weight,
                  [&](int index, const ProductPart &part) {
                      if (index == int(chosen_.size())) {
                          multiply_gated_part(s_, shared, part);
                          return;
                      }
                      const ExpertRows &chosen = chosen_[index];
                      const bool is_gathered = chosen.first_token < 0;
                      const Activations &x = is_gathered ? room_.gathered : s_.normed;
                      const GatedProduct product{{gate.weight, x, gate.bias, gate.shrunk},
                                                 {up.weight, x, up.bias, up.shrunk},
                                                 room_.gated,
                                                 matrix(slot_down),
                                                 config_.clamp > 0.0f ? &config_ : nullptr,
                                                 chosen.expert * blocks_of(width),
                                                 is_gathered ? chosen.first_row
                                                             : chosen.first_token,
                                                 chosen.first_row,
                                                 x_weights,
                                                 has_gate()};
                      multiply_gated_part(s_, product, part);
                  },
                  {&matrix(slot_down), &shared.next});
}

void Mixture::multiply_downs() {
    const int hidden = s_.config.hidden_size, stride = room_.hidden_stride;
    Linear down{matrix(slot_down), room_.gated, &bias(slot_down_bias)};
    Linear shared{matrix(slot_shared_down), room_.shared_gated, &bias(slot_shared_down_bias)};
    shrink(s_, {{runs_, int(tokens_.size()), {&down}}, {shared_runs(), s_.num_tokens, {&shared}}});
    multiply_each(s_, extents(hidden, hidden), down.weight,
                  [&](int index, const ProductPart &part) {
                      const int column = part.block * lanes;
                      if (index == int(chosen_.size())) {
                          multiply_part(s_, shared, part, next_weights(shared.weight, part),
                                        room_.shared + size_t(part.row) * stride + column, stride);
                          return;
                      }
                      const ExpertRows &chosen = chosen_[index];
                      const ProductPart own{chosen.first_row + part.row,
                                            part.rows,
                                            chosen.expert * blocks_of(hidden) + part.block,
                                            part.blocks,
                                            part.thread,
                                            chosen.expert * blocks_of(hidden) + part.next_block};
                      multiply_part(s_, down, own, next_weights(down.weight, own),
                                    room_.outputs + size_t(own.row) * stride + column, stride);
                  });
}

// Add a token's experts in the order of its choice, then the shared MLP.
void Mixture::combine(int token) const {
    const Kernels &kernels = *s_.model.kernels;
    const int hidden = s_.config.hidden_size;
    float *sum = s_.sublayer + size_t(token) * room_.hidden_stride;
    std::fill_n(sum, hidden, 0.0f);
    const size_t first = size_t(token) * config_.experts_per_token;
    for (size_t pair = first; pair < first + config_.experts_per_token; ++pair) {
        if (room_.places[pair] >= 0) {
            kernels.add(room_.outputs + size_t(room_.places[pair]) * room_.hidden_stride,
                        config_.weighs_inputs ? 1.0f : room_.weights[pair], hidden, sum);
        }
    }
    if (has_shared_mlp()) {
        const float logit = config_.shared_gate ? logits_of(token)[config_.num_experts] : 0.0f;
        const float weight = config_.shared_gate ? 1.0f / (1.0f + std::exp(-logit)) : 1.0f;
        kernels.add(room_.shared + size_t(token) * room_.hidden_stride, weight, hidden, sum);
    }
}

// other_sublayer = shared MLP(normed)
void run_shared_mlp(StepState &s, const Layer &layer) {
    const Matrix &down = layer.matrices[slot_shared_down];
    multiply_gated(s, {{layer.matrices[slot_shared_gate], s.normed, nullptr},
                       {layer.matrices[slot_shared_up], s.normed, nullptr},
                       s.gated,
                       down});
    multiply(s, s.num_tokens, {{{down, s.gated, nullptr}, s.other_sublayer, s.hidden_stride}});
}

// sublayer = norm(sublayer) + norm(other_sublayer), both of all workers. The first worker has it.
void add_normed(StepState &s, const Layer &layer) {
    const int n = s.config.hidden_size;
    for (float *rows : {s.sublayer, s.other_sublayer}) {
        s.model.peers.sum(rows, size_t(s.num_tokens) * s.hidden_stride);
    }
    s.each_row([&](int token) {
        const size_t at = size_t(token) * s.hidden_stride;
        float *experts = s.sublayer + at, *shared = s.other_sublayer + at;
        const auto norm = [&](VectorSlot slot, float *x) {
            s.model.kernels->norm(x, layer.vectors[slot].data(), n, s.config.norm_eps, false, x);
        };
        norm(slot_expert_post_norm, experts);
        norm(slot_shared_post_norm, shared);
        s.model.kernels->add(shared, 1.0f, n, experts);
        if (s.model.peers.rank != 0) {
            std::fill_n(experts, n, 0.0f);
        }
    });
}

} // namespace

void find_mixture_room(Model &model, int num_tokens) {
    for (const Layer &layer : model.layers) {
        if (layer.is_mixture()) {
            MixtureRoom(model, layer.config.mixture, num_tokens);
        }
    }
}

void run_mixture(StepState &state, const Layer &layer) {
    if (!layer.config.mixture.own_norms) {
        Mixture(state, layer).run();
        return;
    }
    run_shared_mlp(state, layer); // first, of what `normed` is
    Mixture(state, layer).run();
    add_normed(state, layer);
}

} // namespace headrace
