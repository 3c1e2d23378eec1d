// A decoder on the CPU: its shape, packed weights, KV pages and threads.
#pragma once
#include "cpu/kernels.h"
#include "cpu/kv_pages.h"
#include "cpu/low_rank.h"
#include "cpu/matrix.h"
#include "cpu/peers.h"
#include "cpu/state_slots.h"
#include "cpu/thread_pool.h"

#include <array>
#include <memory>
#include <mutex>
#include <vector>

namespace headrace {

enum class Placement : int32_t { pre, pre_post, post, parallel, parallel_two_norms, post_sum };
enum class QKNorm : int32_t { none, per_head, full, per_head_after_rope, unweighted_after_rope };
enum class Mixer : int32_t {
    attention,
    short_conv,
    gated_delta_net,
    mamba2,
    latent_attention,
    mamba,
    none
};
enum class RouterScore : int32_t { softmax, sigmoid, sparsemixer };

// What EAGLE-3's layer adds to: the hidden state before a token, or its norm.
enum class Eagle : int32_t { none, hidden, normed };

// The fields of DecoderSpec that the step needs, and the executor's own; of several workers, those
// of its share. Mirrored by ctypes in cpu_executor.py; a field of one is a field of the other, in
// the same order.
struct Config {
    int32_t vocab_size, hidden_size;
    int32_t num_heads;
    int32_t num_layers, num_ropes;
    int32_t num_mtp_layers; // the last of the layers, which predict a token beyond the next; 0 or 1
    int32_t layer_norm;     // 1: subtract the mean. `1 + w` is already added to the weights.
    Placement placement;
    QKNorm qk_norm;
    Gate activation;
    int32_t gated_mlp;
    int32_t num_pages, page_tokens;
    int32_t num_states;   // slots
    int32_t shares_pages; // of all layers: no key is read in a later step, nor in a later layer
    Format kv_format;
    int32_t num_threads;
    Isa isa;
    int32_t rounds_activations; // to bf16, where weights are bf16
    int32_t activation_bits;    // 8 or 16 beside quantized weights; 0: floats
    float norm_eps;
    float qkv_clip;                                          // 0: none
    float attention_scale, attention_softcap, logit_softcap; // a softcap of 0: none
    float embedding_multiplier, residual_multiplier, logit_multiplier;
    float gate_multiplier, mlp_multiplier;
    int32_t value_norm;
    int32_t per_layer_size, per_layer_vocab; // of embeddings for each layer; 0: there are none
    int32_t num_residuals, laurel_rank;      // 0: one, without a learned augmentation
    int32_t scales_output;
    int32_t deepstack;    // further parts of a row of an image, for the first layers
    Eagle eagle;          // whether it drafts for another model; see eagle.h
    int32_t num_embedded; // tokens with an embedding, where they are more than the head's; 0: not
};

// The fields of MixtureSpec. This worker has the local experts, of all that tokens choose from.
struct MixtureConfig {
    int32_t num_experts; // 0: the layer's MLP is dense
    int32_t first_expert, num_local_experts;
    int32_t experts_per_token, intermediate_size;
    RouterScore score;
    int32_t normalized, num_groups, groups_per_token, group_score_experts;
    int32_t shared_intermediate_size, shared_gate;
    float weight_sum_min, weight_sum_eps, weight_scale, sparsemixer_eps, swish_beta;
    float clamp;           // 0: the decoder's activation
    int32_t weighs_inputs; // experts' inputs are weighted, not their outputs
    int32_t own_norms;     // router, experts and shared MLP have norms of their own
};

// The fields of ShortConvSpec; of this worker's channels.
struct ShortConvConfig {
    int32_t channels, kernel_size;
};

// The fields of GatedDeltaNetSpec; of this worker's heads.
struct DeltaNetConfig {
    int32_t num_key_heads, num_value_heads, key_dim, value_dim, kernel_size;
    int32_t is_tiled;  // value head h reads key head h % num_key_heads
    int32_t gate_rank; // 0: z and a are projections; more: of that many numbers of each

    int key_width() const { return num_key_heads * key_dim; }
    int value_width() const { return num_value_heads * value_dim; }
    // Decays of a token: one of each value head, or of each of its rows.
    int num_decays() const { return num_value_heads * (gate_rank > 0 ? key_dim : 1); }
    int key_head(int value_head) const {
        return is_tiled ? value_head % num_key_heads
                        : value_head / (num_value_heads / num_key_heads);
    }
    // Columns of the convolution, and a matrix of each value head.
    size_t state_numbers() const {
        const size_t columns = kernel_size - 1;
        return columns * (2 * key_width() + value_width()) + size_t(key_dim) * value_width();
    }
};

// The fields of Mamba2Spec. Heads and groups are this worker's; a group may be another's, too.
struct Mamba2Config {
    int32_t num_heads, head_dim, state_size, num_groups, heads_per_group;
    int32_t first_head; // among those of the first group
    int32_t kernel_size;
    int32_t norm_size;                 // numbers that are normalized together; 0: no norm
    int32_t first_number, all_numbers; // this worker's first, and those of all
    int32_t norm_before_gate;
    float z_multiplier, x_multiplier, b_multiplier, c_multiplier, dt_multiplier;
};

// The fields of MambaSpec; of this worker's channels.
struct MambaConfig {
    int32_t channels, state_size, rank, kernel_size;

    size_t scan_numbers() const { return size_t(state_size) * channels; }
    // Columns of the convolution, and a vector of each channel.
    size_t state_numbers() const { return size_t(kernel_size - 1) * channels + scan_numbers(); }
};

// The fields of LatentAttentionSpec. All layers with it have the same sizes.
struct LatentConfig {
    int32_t query_rank; // 0: queries are not compressed
    int32_t rank, nope_dim, rope_dim, value_dim;
    float norm_eps;
};

struct LayerConfig {
    int32_t rope; // -1: none
    Window window;
    float temperature_scale;    // of queries; 0: none
    int32_t temperature_tokens; // positions from step to step
    int32_t temperature_offset; // added to the position
    MixtureConfig mixture;
    Mixer mixer;
    ShortConvConfig short_conv;
    DeltaNetConfig delta;
    Mamba2Config mamba2;
    MambaConfig mamba;
    int32_t attention_beside; // the layer has attention beside its mixer, and adds both
    int32_t has_mlp;
    float mixer_multiplier, attention_multiplier; // of what is added
    LatentConfig latent{};
    // Of attention, and of a dense MLP.
    int32_t num_kv_heads, head_dim, intermediate_size;
    int32_t kv_layer; // the one whose keys and values this one reads; -1: its own
    int32_t cuts_gates;
    float gate_cut; // standard deviations above the mean
};

// How a layer's query heads share its KV heads. Latents are one KV head, which groups share, too.
struct HeadGroups {
    int num_groups, group;   // of query heads that are in a tile together; query heads of each
    int head_dim, value_dim; // of a query as attention reads it; of what attention adds
};

struct RopeConfig {
    const float *inv_freq; // [num_pairs]
    const int32_t *axes;   // [num_pairs], which of a token's three positions turns each
    int32_t num_pairs;
    int32_t interleaved;
    float scale;
};

struct Rope {
    std::vector<float> inv_freq;
    std::vector<int32_t> axes;
    bool interleaved;
    float scale;
};

// Indices into Layer::matrices and Layer::vectors; the same numbers in cpu_executor.py. In a
// mixture gate, up and down hold all local experts, one after the other, each from a whole block
// on; so do their biases. A gate of the shared MLP is the last row of the router.
enum MatrixSlot {
    slot_q,
    slot_k,
    slot_v,
    slot_o,
    slot_gate,
    slot_up,
    slot_down,
    slot_router,
    slot_shared_gate,
    slot_shared_up,
    slot_shared_down,
    slot_in_b,
    slot_in_c,
    slot_in_x,
    slot_out,
    slot_attn_gate,
    slot_delta_q,
    slot_delta_k,
    slot_delta_v,
    slot_delta_z,
    slot_delta_b,
    slot_delta_a,
    slot_delta_out,
    slot_delta_z_in,
    slot_delta_a_in,
    slot_in_z,
    slot_in_dt,
    slot_q_a,
    slot_q_b,
    slot_kv_a,
    slot_k_b, // of each head [rank, nope_dim], one after the other
    slot_v_b, // of each head [value_dim, rank]
    slot_per_layer_gate,
    slot_per_layer_out,
    slot_laurel_left,
    slot_laurel_right,
    slot_dt,
    num_matrix_slots
};
enum VectorSlot {
    slot_attn_norm,
    slot_attn_post_norm,
    slot_mlp_norm,
    slot_mlp_post_norm,
    slot_q_norm,
    slot_k_norm,
    slot_sinks,
    slot_q_bias,
    slot_k_bias,
    slot_v_bias,
    slot_o_bias,
    slot_gate_bias,
    slot_up_bias,
    slot_down_bias,
    slot_router_bias,
    slot_selection_bias,
    slot_shared_gate_bias,
    slot_shared_up_bias,
    slot_shared_down_bias,
    slot_attn_norm_bias,
    slot_attn_post_norm_bias,
    slot_mlp_norm_bias,
    slot_mlp_post_norm_bias,
    slot_conv, // [kernel_size, channels], the weight of the oldest token first
    slot_conv_bias,
    slot_in_b_bias,
    slot_in_c_bias,
    slot_in_x_bias,
    slot_out_bias,
    slot_attn_gate_bias,
    slot_delta_q_conv, // as slot_conv
    slot_delta_k_conv,
    slot_delta_v_conv,
    slot_delta_a_bias,
    slot_delta_rate,
    slot_delta_norm,
    slot_in_z_bias,
    slot_in_dt_bias,
    slot_conv_x, // as slot_conv
    slot_conv_b,
    slot_conv_c,
    slot_conv_x_bias,
    slot_conv_b_bias,
    slot_conv_c_bias,
    slot_dt_bias,  // [heads], as are these; of Mamba [channels]
    slot_decay,    // below 0, per unit of a step; of Mamba [state_size, channels]
    slot_skip,     // what is added of a head's input
    slot_ssm_norm, // [heads * head_dim]
    slot_q_a_norm,
    slot_kv_a_norm,
    slot_q_a_bias,
    slot_kv_a_bias,
    slot_v_norm, // ones
    slot_per_layer_norm,
    slot_scale, // [1], of the residual behind the layer
    slot_laurel_norm,
    slot_altup_norm,
    slot_altup_scale,
    slot_altup_router,  // [residuals, hidden]
    slot_altup_predict, // [residuals, residuals, residuals], the last one of modes
    slot_altup_correct, // [residuals, residuals], likewise
    slot_router_norm,
    slot_router_scales, // [experts], of their weights
    slot_expert_norm,
    slot_expert_post_norm,
    slot_shared_post_norm,
    slot_dt_norm, // of Mamba: [rank], and [state_size]
    slot_b_norm,
    slot_c_norm,
    slot_xielu, // alpha_p and alpha_n before their softplus, beta, eps; empty: another activation
    num_vector_slots
};

struct Layer {
    bool is_mixture() const { return config.mixture.num_experts > 0; }
    bool has_attention_gate() const { return matrices[slot_attn_gate].rows > 0; }
    bool has_mixer() const { return config.mixer != Mixer::none; }
    bool attends() const { return config.mixer == Mixer::attention || config.attention_beside; }
    bool has_pages() const {
        return config.mixer == Mixer::latent_attention || (attends() && config.kv_layer < 0);
    }
    bool has_shared_mlp() const { return config.mixture.shared_intermediate_size > 0; }
    // The fp32 numbers of a sequence's state.
    size_t state_numbers() const;

    LayerConfig config;
    HeadGroups heads{};
    int kv_index = 0;        // among the layers with keys and values: of those that it reads
    size_t state_offset = 0; // of its numbers in a slot
    Matrix matrices[num_matrix_slots];
    std::vector<float> vectors[num_vector_slots]; // empty when the model has none
};

// Those of layers that are mixtures; see MixtureState.
struct MixtureWorkspace {
    Buffer router, experts, weights, places, gathered, rounded, quantized, gated, rounded_gated,
        quantized_gated, outputs, shared_gated, rounded_shared, quantized_shared, shared;
};

// Those of layers that are gated delta nets; see DeltaRoom.
struct DeltaWorkspace {
    Buffer in_q, in_k, in_v, q, k, v, betas, decays, gated, rounded, quantized;
    Buffer low_z, rounded_z, quantized_z, low_a, rounded_a, quantized_a;
    Buffer drafts;
};

// Those of layers that are Mamba-2; see Mamba2Step. Of x, B and C: as projected, and convolved.
struct Mamba2Workspace {
    Buffer z, out, steps, squares, projected, convolved, drafts;
};

// Those of layers that are Mamba; see MambaRoom.
struct MambaWorkspace {
    Buffer x, z, convolved, steps, out, low, drafts;
};

struct ActivationBuffers {
    Buffer rows, rounded, quantized;
};

// Those of Gemma 3n and 4; see GemmaRoom.
struct GemmaWorkspace {
    Buffer inputs, context, residuals, predicted, laurel, back, gates;
    ActivationBuffers gated, low, joined;
};

// Buffers of one step, kept for the next and grown when a step is larger.
struct Workspace {
    Buffer residual, normed, q, k, v, queries, attended, sublayer, gated, cos, sin, partials,
        quantized, rounded, quantized_gated, rounded_gated, squares, other_sublayer, logits,
        gathered, conv_b, conv_c, conv_x, attn_gate, query_latents, of_heads, rounded_of_heads,
        quantized_of_heads, shrunk, joined, rounded_joined, quantized_joined, tiles, bands;
    std::vector<Buffer> scratch, gates; // one per thread
    MixtureWorkspace mixture;
    DeltaWorkspace delta;
    Mamba2Workspace mamba2;
    MambaWorkspace mamba;
    GemmaWorkspace gemma;
};

constexpr int num_tapped = 3; // layers that EAGLE-3 reads the inputs of

struct Model {
    // Pages, and states behind them, lie in `memory`, or in memory of our own where that is null.
    // Throws std::bad_alloc.
    Model(const Config &config, const LayerConfig *layers, const RopeConfig *ropes,
          void *memory = nullptr);

    Config config;
    const Kernels *kernels; // null when the processor lacks the ISA asked for
    std::vector<Rope> ropes;
    std::vector<Layer> layers;
    // Of the layers with pages; null: they have keys and values.
    const LatentConfig *latent = nullptr;
    Matrix embed, head;                     // `head` stays empty when tied
    Matrix per_layer_embed, per_layer_proj; // of Gemma: of all layers, side by side
    Matrix altup_in, altup_out;             // of each further residual, one after the other
    Matrix adapted_embed; // stays empty; adapters that change embeddings, not a tied head, have it
    Matrix mtp_proj;      // of a token's embedding and the hidden state before it
    Matrix positions, token_types; // of encoders: added to a token's embedding, before a norm
    std::vector<float> per_layer_norm;
    std::vector<float> norm, norm_bias, head_bias, embed_norm, embed_norm_bias; // empty: none
    std::vector<float> mtp_embed_norm, mtp_hidden_norm, mtp_norm;
    KvPages kv;
    StateSlots states;
    Peers peers;
    Workspace workspace;
    ThreadPool pool;
    std::mutex in_use; // one step at a time

    // Drafts from what enters these layers; see eagle.h. Null: none.
    Model *drafter = nullptr;
    std::array<int32_t, num_tapped> tapped{};

    // By slot; null: none. Steps name the slots.
    std::vector<std::unique_ptr<Adapter>> adapters;

    // Put an adapter, or none, into a slot between steps. The one before ends.
    void install(int slot, std::unique_ptr<Adapter> adapter);

    // Give the memory of the workspace back between steps; the next one takes it again.
    void rest();

    // Tokens with an embedding, over all workers.
    int num_embedded() const {
        return config.num_embedded ? config.num_embedded : peers.num_tokens();
    }

    Matrix &matrix(int layer, int slot);
    std::vector<float> &vector(int layer, int slot);

private:
    void clear_workspace();
};

// One step; mirrored by ctypes in cpu_executor.py. Meaning as in `Batch`, executor.py.
struct Step {
    const int32_t *token_ids, *positions, *sequences; // [num_tokens]
    const int32_t *page_table;                        // [num_sequences, max_pages]
    const int32_t *logit_rows;                        // [num_logit_rows]
    const int32_t *embed_rows;     // [num_tokens], or null: the embeddings of all are their tokens'
    const int32_t *rope_positions; // [num_tokens, 3], or null: `positions` in each axis
    const int32_t *last_seen;      // [num_tokens], or null: no token sees beyond itself
    const int32_t *token_types;    // [num_tokens], or null: all are 0
    const float *embeds;           // [num_embeds, (1 + deepstack) * hidden]
    float *logits; // [num_logit_rows, stride_of(vocab)], or null and instead of them ...
    float *maxima; // [num_logit_rows, num_blocks_of(vocab)], of each 64 logits of a row
    float *hidden; // ... what the head would see, [num_logit_rows, hidden]
    // [num_sequences], the slots that states are read from and written to; -1: the sequence
    // begins. Null where no layer has a state.
    const int32_t *state_in, *state_out;
    // [num_sequences], the row behind the last one that a written state covers. Rows from there on
    // are drafts. Null: there are none.
    const int32_t *state_ends;
    const int32_t
        *adapters; // [num_sequences], the slot of each one's adapter, -1: none. Null: none
    int32_t num_tokens, num_sequences, max_pages, num_logit_rows, num_embeds;
    int32_t is_draft; // of the layers that predict further tokens; see mtp.h
};

} // namespace headrace
