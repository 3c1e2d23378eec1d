"""The specification of a decoder, as data.

`lower` writes a `DecoderSpec`, executors run it; nothing else depends on a model family. A family
that these fields cannot express is refused rather than approximated.
"""

from dataclasses import dataclass
from enum import StrEnum


class Norm(StrEnum):
    """The scaling of a norm: by `w`, by `1 + w` (Gemma), or with mean subtraction (LayerNorm)."""

    RMS = "rms"
    RMS_ONE_PLUS = "rms_one_plus"
    LAYER = "layer"
    LAYER_ONE_PLUS = "layer_one_plus"  # Nemotron: both

    @property
    def adds_one(self) -> bool:
        return self in (Norm.RMS_ONE_PLUS, Norm.LAYER_ONE_PLUS)

    @property
    def subtracts_mean(self) -> bool:
        return self in (Norm.LAYER, Norm.LAYER_ONE_PLUS)


class NormPlacement(StrEnum):
    """The places of a layer's norms relative to attention and MLP."""

    PRE = "pre"  # Llama: x + f(norm(x))
    PRE_POST = "pre_post"  # Gemma 2 and 3: x + norm(f(norm(x)))
    POST = "post"  # OLMo 2: x + norm(f(x))
    PARALLEL = "parallel"  # Cohere: x + attention(norm(x)) + mlp(norm(x))
    PARALLEL_TWO_NORMS = "parallel_two_norms"  # GPT-NeoX: the MLP has a norm of its own
    POST_SUM = "post_sum"  # BERT: norm(x + f(x))


class QKNorm(StrEnum):
    """Whether queries and keys are normalized, before RoPE or after it."""

    NONE = "none"
    PER_HEAD = "per_head"  # Qwen 3, Gemma 3: over head_dim
    FULL = "full"  # OLMo 2: over all heads at once
    PER_HEAD_AFTER_ROPE = "per_head_after_rope"  # Hunyuan
    UNWEIGHTED_AFTER_ROPE = "unweighted_after_rope"  # Llama 4: in layers with RoPE


class Activation(StrEnum):
    """The gate of the MLP: `act(gate) * up`, or `act(up)` without a gate."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"  # the square of what is above 0
    XIELU = "xielu"  # Apertus, without a gate: each layer has numbers of its own


@dataclass(frozen=True, kw_only=True)
class RopeTable:
    """Rotations of one kind of layer; attention factors are already multiplied in.

    `inv_freq` holds rotary_dim / 2 values: position p rotates pair i by p * inv_freq[i].
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0  # of both cos and sin (YaRN's attention factor)
    interleaved: bool = False  # pairs are (2i, 2i + 1) rather than (i, i + rotary_dim / 2)
    # Of M-RoPE: which of a token's three positions turns each pair: 0 is time, 1 height, 2 width.
    # They differ in images only. Empty is one position for all.
    axes: tuple[int, ...] = ()


class RouterScore(StrEnum):
    """The scores of experts, from the router's logits, in fp32."""

    SOFTMAX = "softmax"  # over all experts; with `normalized` also that over the chosen ones
    SIGMOID = "sigmoid"  # DeepSeek-V3, GLM-4.5
    SPARSEMIXER = "sparsemixer"  # Phi-3.5-MoE: each choice has a softmax of its own


@dataclass(frozen=True, kw_only=True)
class MixtureSpec:
    """A mixture of experts in place of a layer's MLP.

    The router scores all experts. The best ones are chosen, the lower index first among equals.
    The result is the sum of their outputs by weight, in the order of choice, and of the shared MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of each expert
    score: RouterScore = RouterScore.SOFTMAX
    normalized: bool = True  # weights of the chosen experts are divided by their sum
    weight_sum_min: float = 0.0  # the least sum of weights, where they are normalized
    weight_sum_eps: float = 1e-20  # added to that sum
    weight_scale: float = 1.0  # multiplies weights, after they are normalized
    weighs_inputs: bool = False  # Llama 4: weights multiply what experts see, not what they give
    selection_bias: bool = False  # a learned term per expert that only the choice sees
    num_groups: int = 1  # of experts, of which the best `groups_per_token` are chosen from
    groups_per_token: int = 1
    group_score_experts: int = 2  # best scores of a group that are summed: its score
    sparsemixer_eps: float = 0.01  # scores twice this share below a choice are not in its softmax
    router_bias: bool = False
    expert_bias: bool = False  # of gate, up and down
    clamp: float | None = None  # gpt-oss: gate <= clamp, |up| <= clamp, and (up + 1) * swish(gate)
    swish_beta: float = 1.0  # gate * sigmoid(beta * gate), with `clamp`
    shared_intermediate_size: int = 0  # of the MLP that every token passes; 0 is none
    shared_bias: bool = False  # of the shared MLP's gate, up and down
    shared_gate: bool = False  # the shared MLP's output is multiplied by sigmoid(gate . x)
    # Gemma 4: router, experts and the shared MLP read the residual, each through a norm of its own.
    # What experts and the shared MLP give is normalized, too, before it is added.
    own_norms: bool = False
    expert_scales: bool = False  # weights, once normalized, are multiplied by one for each expert
    local_experts: range | None = None  # of a tensor-parallel worker; None is all

    @property
    def own_experts(self) -> range:
        """The experts whose weights are here."""
        return range(self.num_experts) if self.local_experts is None else self.local_experts


@dataclass(frozen=True, kw_only=True)
class QueryTemperature:
    """Llama 4's: at position p, queries times 1 + scale * log(1 + (p + offset) // tokens).

    Ministral 3's offset is 0.
    """

    scale: float
    tokens: int
    offset: int = 1


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec:
    """LFM2's gated short convolution, a mixer without keys and values.

    `out(c * conv(b * x))`, where b, c and x are projections of the layer's input. The convolution
    is causal and depthwise. Its state is b * x of the last `kernel_size` - 1 tokens.
    """

    channels: int
    kernel_size: int  # tokens, the newest included: `conv_L_cache`
    bias: bool = False  # of the convolution and all projections

    @property
    def state_numbers(self) -> int:
        """The fp32 numbers of a sequence's state in this layer: [kernel_size - 1, channels]."""
        return (self.kernel_size - 1) * self.channels


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetSpec:
    """Qwen3-Next's gated delta net, a mixer without keys and values.

    `out(silu(z) * norm(read))`. Queries, keys and values are projected, convolved as by a short
    convolution, and pass SiLU; queries and keys have the length 1. Each value head has a matrix S:

        S <- decay * S + beta * key x (value - decay * S . key); read = S . query / sqrt(key_dim)

    with beta = sigmoid(b) and decay = exp(rate * softplus(a + bias)), all rates negative. The state
    is S, beside what the convolution sees of the last `kernel_size` - 1 tokens.

    Kimi's has a decay for each row of S, and sigmoid(z) as its gate. a and z are projections of
    `gate_rank` numbers each, which are projections of the layer's input.
    """

    num_key_heads: int  # of queries, too
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel_size: int  # tokens, the newest included
    # Value head h reads key head h % num_key_heads (llama.cpp), not one of its own neighborhood.
    is_tiled: bool = False
    gate_rank: int = 0  # 0 is Qwen3-Next's

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_decays(self) -> int:
        return self.num_value_heads * (self.key_dim if self.gate_rank else 1)

    @property
    def state_numbers(self) -> int:
        """The fp32 numbers of a sequence's state in this layer."""
        columns = self.kernel_size - 1
        return columns * (2 * self.key_width + self.value_width) + self.key_dim * self.value_width


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec:
    """Mamba-2, a mixer whose state is a matrix [state_size, head_dim] per head.

    z, x, B, C and dt are projections of the layer's input. x, B and C pass a causal depthwise
    convolution and a silu. A head's matrix is `S = exp(dt * decay) * S + dt * x . B`, where dt is
    `softplus(dt + dt_bias)`. Its output is `S . C + skip * x`. That is gated by `silu(z)`,
    normalized, and projected.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int  # of heads that share B and C
    kernel_size: int  # tokens of the convolution, the newest included
    conv_bias: bool = True
    input_bias: bool = False
    output_bias: bool = False
    norm_size: int = 0  # adjacent numbers that are normalized together; 0 is no norm
    norm_before_gate: bool = False
    # Of z, x, B, C and dt, before the convolution and `dt_bias`.
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    local_heads: range | None = None  # of a tensor-parallel worker; None is all

    @property
    def heads(self) -> range:
        """The heads whose weights are here."""
        return range(self.num_heads) if self.local_heads is None else self.local_heads

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_groups

    @property
    def groups(self) -> range:
        """The groups that those heads are of."""
        heads, size = self.heads, self.heads_per_group
        return range(heads.start // size, -(-heads.stop // size))

    @property
    def inner_size(self) -> int:
        """The numbers of x, and of z."""
        return len(self.heads) * self.head_dim

    @property
    def group_numbers(self) -> int:
        """The numbers of B, and of C."""
        return len(self.groups) * self.state_size

    @property
    def state_numbers(self) -> int:
        """The fp32 numbers of a sequence's state: what is convolved of tokens, and matrices."""
        window = (self.kernel_size - 1) * (self.inner_size + 2 * self.group_numbers)
        return window + self.inner_size * self.state_size


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """Mamba, a mixer whose state is a vector of `state_size` numbers per channel.

    x and z are projections of the layer's input. x passes a causal depthwise convolution and a
    silu. dt, B and C are projections of that, normalized with `norms`, and dt is projected to the
    channels. A channel's vector is `v = exp(dt * decay) * v + dt * x * B`, where dt is
    `softplus(dt + dt_bias)`. Its output is `v . C + skip * x`, gated by `silu(z)` and projected.
    """

    channels: int
    state_size: int
    rank: int  # numbers that dt is projected from
    kernel_size: int  # tokens of the convolution, the newest included
    conv_bias: bool = True
    bias: bool = False  # of the projections to x and z, and of the last one
    norms: bool = False

    @property
    def state_numbers(self) -> int:
        """The fp32 numbers of a sequence's state: what is convolved of tokens, and vectors."""
        return (self.kernel_size - 1 + self.state_size) * self.channels


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention: keys and values of all heads are products of one latent.

    A token's latent is `rank` numbers, normalized, and a rotated key that all heads share. Pages
    hold nothing else: each head's query is multiplied by its keys' matrix, and what it attends to
    by its values' matrix. The decoder has one KV head, of `latent_dim` numbers.
    """

    query_rank: int | None  # `q_lora_rank`; None is that queries are not compressed
    rank: int  # `kv_lora_rank`
    nope_dim: int  # of a head's query: `qk_nope_head_dim` numbers do not rotate, ...
    rope_dim: int  # ... and `qk_rope_head_dim` do
    value_dim: int  # `v_head_dim`
    norm_eps: float = 1e-6  # of the norms of latents
    bias: bool = False  # of the projections to latents
    state_numbers: int = 0  # there is no state

    @property
    def latent_dim(self) -> int:
        """The numbers that pages hold for a token."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """The numbers of a head's query."""
        return self.nope_dim + self.rope_dim


Mixer = ShortConvSpec | GatedDeltaNetSpec | Mamba2Spec | MambaSpec | LatentAttentionSpec


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The part of a spec that may differ from layer to layer."""

    mixer: Mixer | None = None  # None is attention
    has_mixer: bool = True  # Nemotron-H: a layer is a mixer, attention included, ...
    has_mlp: bool = True  # ... or an MLP
    attention_beside: bool = False  # Falcon-H1: what attention and `mixer` give is added
    mixer_multiplier: float = 1.0  # with `attention_beside`
    attention_multiplier: float = 1.0  # likewise

    rope: int | None = 0  # index into `DecoderSpec.ropes`; None is NoPE
    window: int | None = None  # tokens attended to, the newest included; None is all
    is_chunked: bool = False  # Llama 4: only tokens of the same chunk of `window` are attended to
    is_causal: bool = False  # Gemma 4: tokens of an image do not see later ones, as elsewhere
    temperature: QueryTemperature | None = None
    head_dim: int | None = None  # None is the decoder's, as it is of the next two
    num_kv_heads: int | None = None
    intermediate_size: int | None = None  # of a dense MLP
    keys_of: int | None = None  # the layer whose keys and values this one reads; None is its own
    has_values: bool = True  # False: values are the products with `k`, as they are
    # Gemma 3n: an MLP's gates are cut so many standard deviations above the mean of a token's.
    gate_cut: float | None = None
    mixture: MixtureSpec | None = None  # None is the dense MLP of `DecoderSpec.intermediate_size`

    @property
    def attends(self) -> bool:
        """Whether the layer has keys and values of its own."""
        return self.has_mixer and (self.mixer is None or self.attention_beside)

    @property
    def owns_keys(self) -> bool:
        """Whether the layer computes keys and values."""
        return self.attends and self.keys_of is None

    @property
    def has_dense_mlp(self) -> bool:
        return self.has_mlp and self.mixture is None

    @property
    def has_pages(self) -> bool:
        """Whether a token's keys and values, or its latent, lie in pages."""
        return self.owns_keys or isinstance(self.mixer, LatentAttentionSpec)


@dataclass(frozen=True, kw_only=True)
class PerLayerSpec:
    """Gemma's embeddings of tokens for each layer.

    A layer's is `(norm(proj . x) + embed) / sqrt(2)`, where x is the token's own embedding and
    `embed` is multiplied by sqrt(size). Behind its MLP the layer adds
    `norm(out . (act(gate . x) * embedding))` to the residual x.
    """

    size: int  # numbers of each layer's
    vocab_size: int  # tokens beyond have the embedding of token 0, and so have rows of images


@dataclass(frozen=True, kw_only=True)
class AltUpSpec:
    """Gemma 3n's alternating updates, and its learned augmented residual.

    There are `num_inputs` residuals. Before a layer, each becomes a sum of all, with weights that
    follow from the first. The layer changes the first one, and the change, times a factor of its
    own, is added to each. Embeddings per layer are added to all but the first.

    Attention adds to its residual `x + norm(right . left . x)`, too, of its input x, and the sum is
    divided by sqrt(2).
    """

    num_inputs: int
    rank: int  # rows of `left`
    scales_output: bool = True  # what embeddings per layer see of the first is scaled by number


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """The difference of an encoder from a decoder: a token sees its whole text.

    A layer's `window` has two sides: so many tokens up to a token, and as many from it on.
    """

    num_positions: int = 0  # that have an embedding, which is added to a token's; 0 is RoPE
    num_token_types: int = 0  # likewise; 0 is none
    embed_norm: bool = False  # of what embeddings add up to
    first_norm: bool = True  # of the first layer's attention, where others have one
    last_norm: bool = True  # behind the last layer


@dataclass(frozen=True, kw_only=True)
class EagleSpec:
    """EAGLE-3's layer, the only one of its decoder, which drafts for another model.

    Queries, keys and values are of `[norm(embedding), norm(hidden)]`. The hidden state is that
    before the token: `fc` of what enters three layers of the other model, or the layer's own.
    """

    tapped: tuple[int, int, int]  # layers of the other model
    num_embedded: int  # tokens of the other model; the head has fewer
    norms_residual: bool = False  # the layer adds to norm(hidden)


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder-only transformer, or an encoder. Weight names are those of `weights.py`."""

    architecture: str  # as the model's own config names it, for messages and metrics
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeTable, ...]
    num_mtp_layers: int = 0  # the last of `layers`, which draft: 0 or 1; see `mtp.py`
    norm: Norm = Norm.RMS
    norm_bias: bool = False  # of all norms but those of queries and keys
    norm_eps: float = 1e-5
    placement: NormPlacement = NormPlacement.PRE
    qk_norm: QKNorm = QKNorm.NONE
    qkv_clip: float | None = None  # OLMo: the largest query, key and value before RoPE, either sign
    activation: Activation = Activation.SILU
    gated_mlp: bool = True  # False: down(act(up(x))), in mixtures too
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = True
    head_bias: bool = False
    attention_scale: float = 1.0  # multiplies q . k
    attention_softcap: float | None = None  # c * tanh(score / c), before the mask
    attention_gate: bool = False  # attended numbers are multiplied by sigmoid(gate . x)
    value_norm: bool = False  # values of a head are normalized, without weights
    attention_sinks: bool = False  # a learned score per head, of a key that has no value
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    gate_multiplier: float = 1.0  # of gate(x), before the activation
    mlp_multiplier: float = 1.0  # of what an MLP adds
    per_layer: PerLayerSpec | None = None
    altup: AltUpSpec | None = None
    layer_scale: bool = False  # the residual is multiplied by a number behind each layer
    # Qwen3-VL: a row of an image has so many further parts, each hidden_size long. Behind each of
    # the first layers, one is added to the residual.
    deepstack: int = 0
    encoder: EncoderSpec | None = None  # None: a token sees those before it
    eagle: EagleSpec | None = None  # None: it is no layer that drafts for another model
    # Of a pipeline's stages, see `stage.py`: all but the first, and all but the last.
    takes_hidden: bool = False  # tokens come in as hidden states, and have no embeddings
    gives_hidden: bool = False  # they leave as hidden states, without a norm and a head

    @property
    def latent(self) -> LatentAttentionSpec | None:
        """The attention of all layers with pages, where it is latent."""
        mixers = (layer.mixer for layer in self.layers)
        return next((mixer for mixer in mixers if isinstance(mixer, LatentAttentionSpec)), None)

    def kv_heads_of(self, layer: LayerSpec) -> tuple[int, int]:
        """Return how many KV heads a layer has, and how many numbers each."""
        return layer.num_kv_heads or self.num_kv_heads, layer.head_dim or self.head_dim

    def mlp_size_of(self, layer: LayerSpec) -> int:
        """Return the intermediate size of a layer's dense MLP."""
        return layer.intermediate_size or self.intermediate_size

    @property
    def row_size(self) -> int:
        """The numbers of a row of an image."""
        return self.hidden_size * (1 + self.deepstack)

    @property
    def state_numbers(self) -> int:
        """The fp32 numbers of a sequence's state over all layers; 0 is a decoder without states."""
        return sum(layer.mixer.state_numbers for layer in self.layers if layer.mixer is not None)
