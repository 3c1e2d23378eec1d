"""Maps tensors of files to weights, with their required shapes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from headrace.engine_proc.worker.checkpoints.weights import Weight, Weights
from headrace.engine_proc.worker.models.decoder_spec import (
    DecoderSpec,
    MixtureSpec,
    NormPlacement,
    QKNorm,
)
from headrace.errors import ModelError

Shape = tuple[int, ...]


class WeightSource(NamedTuple):
    """The source of a weight: rows of a tensor of the file, from `first_row` on."""

    tensor: str
    first_row: int = 0


Naming = Callable[[DecoderSpec, Mapping[str, Weight]], dict[str, WeightSource]]


def weight_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Return every weight the decoder has, under our names (see `weights.py`)."""
    shapes: dict[str, Shape] = {"embed": (spec.vocab_size, spec.hidden_size)}
    if not spec.tied_head:
        shapes["head"] = (spec.vocab_size, spec.hidden_size)
    shapes["norm"] = (spec.hidden_size,)
    for i, layer in enumerate(spec.layers):
        of_layer = attention_shapes(spec)
        if layer.mixture is None:
            of_layer |= mlp_shapes(spec.hidden_size, spec.intermediate_size, spec.mlp_bias)
        else:
            of_layer |= mixture_shapes(spec.hidden_size, layer.mixture)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def attention_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Return the weights of a layer's norms and attention."""
    hidden = spec.hidden_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, Shape] = {}
    if spec.placement != NormPlacement.POST:
        shapes["attn_norm"] = (hidden,)
    if spec.placement in (NormPlacement.PRE, NormPlacement.PRE_POST):
        shapes["mlp_norm"] = (hidden,)
    if spec.placement in (NormPlacement.POST, NormPlacement.PRE_POST):
        shapes |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    if spec.qk_norm == QKNorm.PER_HEAD:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    elif spec.qk_norm == QKNorm.FULL:
        shapes |= {"q_norm": (q,), "k_norm": (kv,)}
    if spec.attention_sinks:
        shapes["sinks"] = (spec.num_heads,)
    for name, shape, bias in (
        ("q", (q, hidden), spec.qkv_bias),
        ("k", (kv, hidden), spec.qkv_bias),
        ("v", (kv, hidden), spec.qkv_bias),
        ("o", (hidden, q), spec.output_bias),
    ):
        shapes |= linear_shapes(name, shape, bias)
    return shapes


def mlp_shapes(hidden: int, inner: int, bias: bool, prefix: str = "") -> dict[str, Shape]:
    """Return the weights of a gated MLP."""
    return {
        **linear_shapes(f"{prefix}gate", (inner, hidden), bias),
        **linear_shapes(f"{prefix}up", (inner, hidden), bias),
        **linear_shapes(f"{prefix}down", (hidden, inner), bias),
    }


def mixture_shapes(hidden: int, mixture: MixtureSpec) -> dict[str, Shape]:
    """Return the weights of a router, its experts and the shared MLP."""
    shapes = linear_shapes("router", (mixture.num_experts, hidden), mixture.router_bias)
    if mixture.selection_bias:
        shapes["router.selection_bias"] = (mixture.num_experts,)
    for expert in mixture.own_experts:
        shapes |= mlp_shapes(
            hidden, mixture.intermediate_size, mixture.expert_bias, f"experts.{expert}."
        )
    if mixture.shared_intermediate_size:
        shapes |= mlp_shapes(hidden, mixture.shared_intermediate_size, False, "shared.")
    if mixture.shared_gate:
        shapes["shared.router"] = (1, hidden)
    return shapes


def linear_shapes(name: str, shape: Shape, bias: bool) -> dict[str, Shape]:
    """Return a linear layer's weight and bias."""
    return {name: shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def adopt(spec: DecoderSpec, tensors: Mapping[str, Weight], naming: Naming) -> Weights:
    """Give the tensors of a file our names.

    Raises:
        ModelError: a tensor is missing, has another shape than the spec says, or is left over.
    """
    shapes = weight_shapes(spec)
    sources = naming(spec, tensors)
    num_rows: dict[str, int] = {}  # of each tensor: a fused one holds several weights
    for name, shape in shapes.items():
        tensor = sources[name].tensor
        num_rows[tensor] = num_rows.get(tensor, 0) + shape[0]
    weights = {}
    for name, shape in shapes.items():
        stored, first = sources[name]
        if stored not in tensors:
            raise ModelError(f"tensor {stored!r} is missing")
        wanted = (num_rows[stored], *shape[1:])
        if tensors[stored].shape != wanted:
            raise ModelError(
                f"tensor {stored!r} has shape {list(tensors[stored].shape)}, "
                f"but a {spec.architecture} model of this config has {list(wanted)}"
            )
        weights[name] = tensors[stored].rows(first, first + shape[0])
    for name in tensors.keys() - num_rows.keys():
        if not is_redundant(name, tensors, sources):
            raise ModelError(
                f"tensor {name!r} is not part of a {spec.architecture} model of this config"
            )
    return weights


def is_redundant(
    name: str, tensors: Mapping[str, Weight], sources: Mapping[str, WeightSource]
) -> bool:
    """Whether a left-over tensor is redundant: frequencies, a copy of the embedding, zeros.

    Old checkpoints hold `rotary_emb.inv_freq`, some tied ones `lm_head.weight`; GGUF files have
    divisors of frequencies, which `lower_gguf` has read; AutoGPTQ wrote biases that no model has.
    """
    if name.endswith(".bias"):
        return not tensors[name].to_float32().any()
    if name.endswith("lm_head.weight"):
        embed = tensors[sources["embed"].tensor].stored()
        return np.array_equal(tensors[name].stored().data, embed.data)
    return name.endswith("rotary_emb.inv_freq") or name in GGUF_ROPE


# Of a model that takes images: what is not its decoder's, and where that is.
TOWERS = (
    *("visual.", "vision_tower.", "multi_modal_projector."),
    *("model.visual.", "model.vision_tower.", "model.multi_modal_projector."),
    *("model.vision_model.", "model.connector."),
)
DECODERS = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}


def of_decoder(tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """Name the tensors of the decoder within a larger model as if there were nothing else."""
    return {decoder_name(name): tensor for name, tensor in tensors.items()}


def decoder_name(name: str) -> str:
    """Return a tensor's name without where its decoder is."""
    for outer, inner in DECODERS.items():
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name


HF_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "sinks": "self_attn.sinks",
}
HF_GLM4_NORMS = {
    "attn_post_norm": "post_self_attn_layernorm.weight",
    "mlp_post_norm": "post_mlp_layernorm.weight",
}
HF_LINEAR = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def hugging_face(spec: DecoderSpec, tensors: Mapping[str, Weight]) -> dict[str, WeightSource]:
    """Name the tensors of a `*ForCausalLM`, or of its base model, which has no `model.` prefix."""
    prefix = "" if "embed_tokens.weight" in tensors else "model."
    names = HF_LAYER | with_biases(HF_LINEAR)
    if f"{prefix}layers.0.post_self_attn_layernorm.weight" in tensors:  # GLM-4
        names |= HF_GLM4_NORMS
    elif spec.placement == NormPlacement.PRE_POST:  # Gemma's "post_attention" is after attention
        names["mlp_norm"] = "pre_feedforward_layernorm.weight"
    sources = {
        "embed": WeightSource(f"{prefix}embed_tokens.weight"),
        "head": WeightSource("lm_head.weight"),
        "norm": WeightSource(f"{prefix}norm.weight"),
    }
    for i in range(len(spec.layers)):
        layer = f"{prefix}layers.{i}."
        sources |= {
            f"layers.{i}.{ours}": WeightSource(layer + theirs) for ours, theirs in names.items()
        }
        if f"{layer}self_attn.qkv_proj.weight" in tensors:  # Phi-3
            sources |= fused_qkv(spec, f"layers.{i}.", f"{layer}self_attn.qkv_proj")
        if f"{layer}mlp.gate_up_proj.weight" in tensors:  # Phi-3, GLM-4
            sources |= fused_gate_up(spec, f"layers.{i}.", f"{layer}mlp.gate_up_proj")
    return sources


def fused_qkv(spec: DecoderSpec, layer: str, theirs: str) -> dict[str, WeightSource]:
    """Name the rows of queries, keys and values in one matrix, and in one bias."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        f"{layer}{ours}{bias}": WeightSource(f"{theirs}{bias or '.weight'}", first)
        for bias in ("", ".bias")
        for ours, first in (("q", 0), ("k", q), ("v", q + kv))
    }


def fused_gate_up(spec: DecoderSpec, layer: str, theirs: str) -> dict[str, WeightSource]:
    """Name the rows of gate and up in one matrix."""
    return {
        f"{layer}gate": WeightSource(f"{theirs}.weight"),
        f"{layer}up": WeightSource(f"{theirs}.weight", spec.intermediate_size),
    }


GGUF_LAYER = {
    "attn_norm": "attn_norm.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "sinks": "attn_sinks.weight",
}
GGUF_LINEAR = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
GGUF_ROPE = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}


def gguf(spec: DecoderSpec, tensors: Mapping[str, Weight]) -> dict[str, WeightSource]:
    """Name the tensors of a GGUF file."""
    names = GGUF_LAYER | with_biases(GGUF_LINEAR)
    sources = {
        "embed": WeightSource("token_embd.weight"),
        "head": WeightSource("output.weight"),
        "norm": WeightSource("output_norm.weight"),
    }
    if spec.placement == NormPlacement.PRE and "blk.0.ffn_norm.weight" not in tensors:  # Seed-OSS
        names["mlp_norm"] = "post_attention_norm.weight"
    for i in range(len(spec.layers)):
        ours, theirs = f"layers.{i}.", f"blk.{i}."
        sources |= {ours + o: WeightSource(theirs + t) for o, t in names.items()}
        if f"{theirs}attn_qkv.weight" in tensors:  # Phi-3, and all that are converted so
            sources |= fused_qkv(spec, ours, f"{theirs}attn_qkv")
        if f"{theirs}ffn_gate.weight" not in tensors:  # Phi-3, GLM-4
            sources |= fused_gate_up(spec, ours, f"{theirs}ffn_up")
    return sources


def with_biases(linear: Mapping[str, str]) -> dict[str, str]:
    """Name the weight and the bias of each linear layer."""
    weights = {ours: f"{theirs}.weight" for ours, theirs in linear.items()}
    return weights | {f"{ours}.bias": f"{theirs}.bias" for ours, theirs in linear.items()}
