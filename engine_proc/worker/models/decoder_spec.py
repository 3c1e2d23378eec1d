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
class LayerSpec:
    """The part of a spec that may differ from layer to layer."""

    mixer: ShortConvSpec | None = None  # None is attention

    rope: int | None = 0  # index into `DecoderSpec.ropes`; None is NoPE
    window: int | None = None  # tokens attended to, the newest included; None is all
    is_chunked: bool = False  # Llama 4: only tokens of the same chunk of `window` are attended to
    temperature: QueryTemperature | None = None
    mixture: MixtureSpec | None = None  # None is the dense MLP of `DecoderSpec.intermediate_size`


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder-only transformer. Weight names are those of `weights.py`."""

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
    norm: Norm = Norm.RMS
    norm_bias: bool = False  # of all norms but those of queries and keys
    norm_eps: float = 1e-5
    placement: NormPlacement = NormPlacement.PRE
    qk_norm: QKNorm = QKNorm.NONE
    qkv_clip: float | None = None  # OLMo: the largest query, key and value before RoPE, either sign
    activation: Activation = Activation.SILU
    gated_mlp: bool = True  # False: down(act(up(x))), in layers without a mixture
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = True
    head_bias: bool = False
    attention_scale: float = 1.0  # multiplies q . k
    attention_softcap: float | None = None  # c * tanh(score / c), before the mask
    attention_sinks: bool = False  # a learned score per head, of a key that has no value
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0

    @property
    def num_kv_layers(self) -> int:
        """The layers with keys and values."""
        return sum(layer.mixer is None for layer in self.layers)

    @property
    def state_numbers(self) -> int:
        """The fp32 numbers of a sequence's state over all layers; 0 is a decoder without states."""
        return sum(layer.mixer.state_numbers for layer in self.layers if layer.mixer is not None)
