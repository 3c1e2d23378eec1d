"""Maps tensors of files to weights."""

import re
from collections.abc import Callable, Mapping

import numpy as np

from headrace.engine_proc.worker.checkpoints.expert_stacks import unstacked
from headrace.engine_proc.worker.checkpoints.head_matrices import KEYS, VALUES, with_heads
from headrace.engine_proc.worker.checkpoints.weights import Weight, Weights
from headrace.engine_proc.worker.models.delta_net_names import (
    gguf_delta_net,
    hf_delta_net,
)
from headrace.engine_proc.worker.models.folder_names import FOLDER_NAMES, LLAMA
from headrace.engine_proc.worker.models.mamba_names import (
    GGUF_MAMBA2,
    HF_MAMBA2,
    mamba2_module,
    mamba2_parts,
)
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    Mixer,
    MixtureSpec,
    NormPlacement,
    QKNorm,
    ShortConvSpec,
)
from headrace.engine_proc.worker.models.weight_shapes import XIELU, weight_shapes
from headrace.engine_proc.worker.models.weight_source import WeightSource
from headrace.errors import ModelError

Naming = Callable[[DecoderSpec, Mapping[str, Weight]], dict[str, WeightSource]]


def adopt(spec: DecoderSpec, tensors: Mapping[str, Weight], naming: Naming) -> Weights:
    """Give the tensors of a file our names.

    Raises:
        ModelError: a tensor is missing, has another shape than the spec says, or is left over.
    """
    shapes = weight_shapes(spec)
    tensors = unstacked(tensors)
    if (latent := spec.latent) is not None:
        sizes = (spec.num_heads, latent.nope_dim, latent.value_dim)
        tensors = with_heads(tensors, *sizes)
    sources = naming(spec, tensors)
    num_rows: dict[str, int] = {}  # of each tensor: a fused one holds several weights
    for name, shape in shapes.items():
        tensor = sources[name].tensor
        num_rows[tensor] = num_rows.get(tensor, 0) + shape[0]
    weights: dict[str, Weight] = {}
    for name, shape in shapes.items():
        stored = sources[name].tensor
        if stored not in tensors:
            raise ModelError(f"tensor {stored!r} is missing")
        wanted = (num_rows[stored], *shape[1:])
        if tensors[stored].shape != wanted:
            raise ModelError(
                f"tensor {stored!r} has shape {list(tensors[stored].shape)}, "
                f"but a {spec.architecture} model of this config has {list(wanted)}"
            )
        weights[name] = sources[name].weight_of(tensors[stored], shape[0])
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
    Layers that predict further tokens are not executed, nor are indexers of sparse attention.
    """
    layer = LAYER_NAME.match(name)
    if name.startswith(("model.mtp_", "mtp.")) or (
        layer and layer[0] + layer_end(layer[1]) in tensors
    ):
        return True
    if INDEXER in name:
        return True
    if name.endswith(".bias"):
        return not tensors[name].to_float32().any()
    if name.endswith("lm_head.weight"):
        embed = tensors[sources["embed"].tensor].stored()
        return np.array_equal(tensors[name].stored().data, embed.data)
    return name.endswith("rotary_emb.inv_freq") or name in GGUF_ROPE


INDEXER = ".self_attn.indexer."
LAYER_NAME = re.compile(r"(model\.layers|blk)\.\d+\.")


def layer_end(prefix: str) -> str:
    """Return the name, within its layer, of a matrix that only layers of further tokens have."""
    return "nextn.eh_proj.weight" if prefix == "blk" else "eh_proj.weight"


# Of a model that takes images: what is not its decoder's, and where that is.
TOWERS = (
    "visual.",
    "vision_tower.",
    "multi_modal_projector.",
    "model.visual.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.vision_model.",
    "model.connector.",
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


def with_biases(linear: Mapping[str, str]) -> dict[str, str]:
    """Name the weight and the bias of each linear layer."""
    weights = {ours: f"{theirs}.weight" for ours, theirs in linear.items()}
    return weights | {f"{ours}.bias": f"{theirs}.bias" for ours, theirs in linear.items()}


HF_LAYER = {
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "sinks": "self_attn.sinks",
}
HF_LFM2 = {
    "q_norm": "self_attn.q_layernorm.weight",
    "k_norm": "self_attn.k_layernorm.weight",
    "attn_norm": "operator_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "o": "self_attn.out_proj.weight",
    "gate": "feed_forward.w1.weight",
    "up": "feed_forward.w3.weight",
    "down": "feed_forward.w2.weight",
}
HF_LATENT = {
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
}
HF_LATENT_HEADS = {
    "k_b": f"self_attn.kv_b_proj.weight{KEYS}",
    "v_b": f"self_attn.kv_b_proj.weight{VALUES}",
}
HF_HUNYUAN_NORMS = {
    "q_norm": "self_attn.query_layernorm.weight",
    "k_norm": "self_attn.key_layernorm.weight",
}
HF_GLM4_NORMS = {
    "attn_post_norm": "post_self_attn_layernorm.weight",
    "mlp_post_norm": "post_mlp_layernorm.weight",
}
HF_LAST_NORMS = ("embedding_norm", "final_layernorm", "norm_f")  # LFM2; Bamba; Nemotron-H
HF_LINEAR = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
HF_NEMOTRON_H = with_biases(  # each layer is one of these
    {name: f"mixer.{name}_proj" for name in ("q", "k", "v", "o", "up", "down")}
    | {"attn_norm": "norm", "mlp_norm": "norm"}
)


def hugging_face(spec: DecoderSpec, tensors: Mapping[str, Weight]) -> dict[str, WeightSource]:
    """Name the tensors of a `*ForCausalLM`, or of its base model, which has no `model.` prefix."""
    own = FOLDER_NAMES.get(spec.architecture, LLAMA)
    prefix = "" if f"{own.embed}.weight" in tensors else own.prefix
    if "backbone.embeddings.weight" in tensors:  # Nemotron-H, as published
        prefix = "backbone."
    embed = "embeddings" if f"{prefix}embeddings.weight" in tensors else own.embed
    names = hf_layer(spec, f"{prefix}layers.0.", tensors)
    last_norms = (norm for norm in HF_LAST_NORMS if f"{prefix}{norm}.weight" in tensors)
    last_norm = next(last_norms, own.norm)
    sources = {
        "embed": WeightSource(f"{prefix}{embed}.weight"),
        "head": WeightSource(f"{own.head}.weight"),
        "head.bias": WeightSource(f"{own.head}.bias"),
        "norm": WeightSource(f"{prefix}{last_norm}.weight"),
        "norm.bias": WeightSource(f"{prefix}{last_norm}.bias"),
    }
    for i in range(len(spec.layers)):
        layer = f"{prefix}layers.{i}."
        sources |= {
            f"layers.{i}.{ours}": WeightSource(layer + theirs) for ours, theirs in names.items()
        }
        sources |= hf_mixer(spec.layers[i].mixer, f"layers.{i}.", layer, tensors)
        if spec.attention_gate:
            sources |= gated_queries(spec, f"layers.{i}.", f"{layer}self_attn.q_proj")
        if f"{layer}feed_forward.down_proj.weight" in tensors:  # Llama 4, Bamba
            linear = with_biases({name: f"feed_forward.{name}_proj" for name in HF_NUMBERED})
            sources |= {f"layers.{i}.{o}": WeightSource(layer + t) for o, t in linear.items()}
        if f"{layer}shared_mlp.input_linear.weight" in tensors:  # Granite 4 without experts
            sources |= fused_gate_up(spec, f"layers.{i}.", f"{layer}shared_mlp.input_linear")
            sources[f"layers.{i}.down"] = WeightSource(f"{layer}shared_mlp.output_linear.weight")
        if f"{layer}self_attn.qkv_proj.weight" in tensors:  # Phi-3
            sources |= fused_qkv(spec, f"layers.{i}.", f"{layer}self_attn.qkv_proj")
        if own.qkv_by_head:
            sources |= qkv_by_head(spec, f"layers.{i}.", f"{layer}{own.qkv_by_head}")
        if f"{layer}mlp.gate_up_proj.weight" in tensors:  # Phi-3, GLM-4
            sources |= fused_gate_up(spec, f"layers.{i}.", f"{layer}mlp.gate_up_proj")
        if (mixture := spec.layers[i].mixture) is not None:
            sources |= hf_mixture(mixture, f"layers.{i}.", layer, tensors)
    return sources


def hf_mixer(
    mixer: Mixer | None, ours: str, theirs: str, tensors: Mapping[str, Weight]
) -> dict[str, WeightSource]:
    """Name the weights of a layer's mixer, where that is not attention."""
    match mixer:
        case ShortConvSpec():
            return short_conv(mixer, ours, f"{theirs}conv.")
        case GatedDeltaNetSpec():
            return hf_delta_net(mixer, f"{ours}delta.", f"{theirs}linear_attn.", tensors)
        case Mamba2Spec():
            return mamba2_parts(mixer, ours, mamba2_module(theirs, tensors), HF_MAMBA2)
        case LatentAttentionSpec():
            names = with_biases(HF_LATENT) | HF_LATENT_HEADS
            return {ours + o: WeightSource(theirs + t) for o, t in names.items()}
    return {}


def hf_layer(spec: DecoderSpec, first: str, tensors: Mapping[str, Weight]) -> dict[str, str]:
    """Return the names of weights within a layer, by what the first layer has."""
    names = HF_LAYER | with_biases(HF_LINEAR)
    own = FOLDER_NAMES.get(spec.architecture, LLAMA)
    names |= with_biases(own.in_layer) | dict(own.tensors)
    if f"{first}post_self_attn_layernorm.weight" in tensors:  # GLM-4
        names |= HF_GLM4_NORMS
    elif spec.placement == NormPlacement.PRE_POST:  # Gemma's "post_attention" is after attention
        names["mlp_norm"] = "pre_feedforward_layernorm.weight"
    if spec.qk_norm == QKNorm.PER_HEAD_AFTER_ROPE:
        names |= HF_HUNYUAN_NORMS
    if f"{first}operator_norm.weight" in tensors:
        names |= HF_LFM2
    if f"{first}norm.weight" in tensors:
        names |= HF_NEMOTRON_H
    if f"{first}pre_ff_layernorm.weight" in tensors:  # Bamba
        names["mlp_norm"] = "pre_ff_layernorm.weight"
    return names


HF_MIXTURE = {  # of each weight, the names that families have for it
    "router": (
        "mlp.gate.weight",
        "mlp.router.weight",
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.router.layer.weight",
        "block_sparse_moe.router.weight",
        "mlp.gate.wg.weight",
        "feed_forward.router.weight",
        "feed_forward.gate.weight",  # LFM2
        "mixer.gate.weight",  # Nemotron-H
    ),
    "router.bias": ("mlp.router.bias",),
    "router.selection_bias": (
        "mlp.gate.e_score_correction_bias",
        "mlp.moe_statics.e_score_correction_bias",
        "mlp.gate.moe_statics.e_score_correction_bias",
        "mlp.e_score_correction_bias",  # MiniMax-M2
        "block_sparse_moe.e_score_correction_bias",
        "feed_forward.expert_bias",  # LFM2
        "mixer.gate.e_score_correction_bias",
    ),
    "shared.router": ("mlp.shared_expert_gate.weight",),
}
HF_SHARED = (
    "mlp.shared_experts",
    "mlp.shared_expert",
    "mlp.shared_mlp",  # Hunyuan
    "feed_forward.shared_expert",  # Llama 4
    "mixer.shared_experts",  # Nemotron-H
)
HF_NUMBERED = {"gate": "w1", "up": "w3", "down": "w2"}  # Mixtral
HF_STACKS = (  # of gate and up, and of down
    ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),  # Granite
    ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),  # Llama 4
)


def hf_mixture(
    mixture: MixtureSpec, ours: str, theirs: str, tensors: Mapping[str, Weight]
) -> dict[str, WeightSource]:
    """Name the tensors of a layer's mixture."""
    sources = {}
    for name, choices in HF_MIXTURE.items():
        stored = (choice for choice in choices if theirs + choice in tensors)
        sources[ours + name] = WeightSource(theirs + next(stored, choices[0]))
    shared = (s for s in HF_SHARED if f"{theirs}{s}.down_proj.weight" in tensors)
    module = next(shared, HF_SHARED[0])
    linear = with_biases({name: f"{module}.{name}_proj" for name in HF_NUMBERED})
    sources |= {f"{ours}shared.{o}": WeightSource(theirs + t) for o, t in linear.items()}
    if f"{theirs}shared_mlp.input_linear.weight" in tensors:  # Granite
        size = mixture.shared_intermediate_size
        sources |= gate_and_up(f"{ours}shared.", f"{theirs}shared_mlp.input_linear.weight", size)
        sources[f"{ours}shared.down"] = WeightSource(f"{theirs}shared_mlp.output_linear.weight")
    for expert in range(mixture.num_experts):
        sources |= hf_expert(mixture, f"{ours}experts.{expert}.", theirs, expert, tensors)
    return sources


def hf_expert(
    mixture: MixtureSpec, ours: str, theirs: str, expert: int, tensors: Mapping[str, Weight]
) -> dict[str, WeightSource]:
    """Name the tensors of an expert: its own, or parts of those of all experts."""
    for gate_up, down in HF_STACKS:
        if f"{theirs}{gate_up}[{expert}]" in tensors:
            sources = gate_and_up(ours, f"{theirs}{gate_up}[{expert}]", mixture.intermediate_size)
            return sources | {f"{ours}down": WeightSource(f"{theirs}{down}[{expert}]")}
    if f"{theirs}mlp.experts.gate_up_proj[{expert}][0::2]" in tensors:
        return alternating_expert(ours, f"{theirs}mlp.experts.", expert)
    for module in ("block_sparse_moe", "feed_forward"):  # Mixtral, LFM2
        if f"{theirs}{module}.experts.{expert}.w1.weight" in tensors:
            linear = {o: f"{module}.experts.{expert}.{t}" for o, t in HF_NUMBERED.items()}
            break
    else:
        module = "mixer" if f"{theirs}mixer.gate.weight" in tensors else "mlp"  # Nemotron-H
        linear = {name: f"{module}.experts.{expert}.{name}_proj" for name in HF_NUMBERED}
    return {ours + o: WeightSource(theirs + t) for o, t in with_biases(linear).items()}


def alternating_expert(ours: str, theirs: str, expert: int) -> dict[str, WeightSource]:
    """Name the tensors of one of gpt-oss's experts."""
    return {
        f"{ours}{our}{bias}": WeightSource(f"{theirs}{their}{suffix}[{expert}]{rows}")
        for our, their, rows in (
            ("gate", "gate_up_proj", "[0::2]"),
            ("up", "gate_up_proj", "[1::2]"),
            ("down", "down_proj", ""),
        )
        for bias, suffix in (("", ""), (".bias", "_bias"))
    }


def gate_and_up(ours: str, tensor: str, size: int) -> dict[str, WeightSource]:
    """Name the rows of gate, and of up after them."""
    return {f"{ours}gate": WeightSource(tensor), f"{ours}up": WeightSource(tensor, size)}


def short_conv(conv: ShortConvSpec, ours: str, theirs: str) -> dict[str, WeightSource]:
    """Name the weights of a short convolution: its inputs are rows of one matrix."""
    first = {"in_b": 0, "in_c": conv.channels, "in_x": 2 * conv.channels}
    sources = {f"{ours}conv": WeightSource(f"{theirs}conv.weight")}
    sources[f"{ours}conv.bias"] = WeightSource(f"{theirs}conv.bias")
    for bias, suffix in (("", ".weight"), (".bias", ".bias")):
        sources[f"{ours}out{bias}"] = WeightSource(f"{theirs}out_proj{suffix}")
        for name, row in first.items():
            sources[f"{ours}{name}{bias}"] = WeightSource(f"{theirs}in_proj{suffix}", row)
    return sources


def gated_queries(spec: DecoderSpec, layer: str, theirs: str) -> dict[str, WeightSource]:
    """Name the rows of queries and of their gate, which alternate head by head."""
    run = spec.head_dim
    return {
        f"{layer}{ours}{bias}": WeightSource(f"{theirs}{bias or '.weight'}", first, run, 2 * run)
        for bias in ("", ".bias")
        for ours, first in (("q", 0), ("attn_gate", run))
    }


def fused_qkv(spec: DecoderSpec, layer: str, theirs: str) -> dict[str, WeightSource]:
    """Name the rows of queries, keys and values in one matrix, and in one bias."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        f"{layer}{ours}{bias}": WeightSource(f"{theirs}{bias or '.weight'}", first)
        for bias in ("", ".bias")
        for ours, first in (("q", 0), ("k", q), ("v", q + kv))
    }


def qkv_by_head(spec: DecoderSpec, layer: str, theirs: str) -> dict[str, WeightSource]:
    """Name the rows of queries, keys and values that lie head after head: GPT-NeoX has them so."""
    dim = spec.head_dim
    return {
        f"{layer}{ours}{bias}": WeightSource(f"{theirs}{bias or '.weight'}", i * dim, dim, 3 * dim)
        for bias in ("", ".bias")
        for i, ours in enumerate(("q", "k", "v"))
    }


def fused_gate_up(spec: DecoderSpec, layer: str, theirs: str) -> dict[str, WeightSource]:
    """Name the rows of gate and up in one matrix."""
    return gate_and_up(layer, f"{theirs}.weight", spec.intermediate_size)


GGUF_LAYER = {
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "sinks": "attn_sinks.weight",
}
GGUF_LINEAR = {
    "attn_norm": "attn_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
GGUF_ROPE = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}


def gguf_mixer(
    mixer: Mixer | None, ours: str, theirs: str, tensors: Mapping[str, Weight]
) -> dict[str, WeightSource]:
    """Do as `hf_mixer`, for a GGUF file."""
    match mixer:
        case ShortConvSpec():
            return short_conv(mixer, ours, f"{theirs}shortconv.")
        case GatedDeltaNetSpec():
            return gguf_delta_net(mixer, f"{ours}delta.", theirs, tensors)
        case Mamba2Spec():
            return mamba2_parts(mixer, ours, theirs, GGUF_MAMBA2)
        case LatentAttentionSpec():
            return gguf_latents(ours, theirs, tensors)
    return {}


def gguf(spec: DecoderSpec, tensors: Mapping[str, Weight]) -> dict[str, WeightSource]:
    """Name the tensors of a GGUF file."""
    names = GGUF_LAYER | with_biases(GGUF_LINEAR) | {name: name for name in XIELU}
    sources = {
        "embed": WeightSource("token_embd.weight"),
        "head": WeightSource("output.weight"),
        "head.bias": WeightSource("output.bias"),
        "norm": WeightSource("output_norm.weight"),
        "norm.bias": WeightSource("output_norm.bias"),
    }
    if (norm := gguf_mlp_norm(spec, tensors)) is not None:
        names["mlp_norm"] = norm
    if "output_norm.weight" not in tensors:  # LFM2
        sources["norm"] = WeightSource("token_embd_norm.weight")
    for i in range(len(spec.layers)):
        ours, theirs = f"layers.{i}.", f"blk.{i}."
        sources |= {ours + o: WeightSource(theirs + t) for o, t in names.items()}
        if f"{theirs}attn_qkv.weight" in tensors:  # Phi-3, and all that are converted so
            sources |= fused_qkv(spec, ours, f"{theirs}attn_qkv")
        sources |= gguf_mixer(spec.layers[i].mixer, ours, theirs, tensors)
        if spec.attention_gate:
            sources |= gated_queries(spec, ours, f"{theirs}attn_q")
        if not spec.layers[i].has_mixer:  # Nemotron-H
            sources[f"{ours}mlp_norm"] = WeightSource(f"{theirs}attn_norm.weight")
        if spec.gated_mlp and f"{theirs}ffn_gate.weight" not in tensors:  # Phi-3, GLM-4
            sources |= fused_gate_up(spec, ours, f"{theirs}ffn_up")
        if (mixture := spec.layers[i].mixture) is not None:
            sources |= gguf_mixture(mixture, ours, theirs, tensors)
    return sources


def gguf_mlp_norm(spec: DecoderSpec, tensors: Mapping[str, Weight]) -> str | None:
    """Return the name of the norm before an MLP, where it is not what most files have."""
    if "blk.0.ffn_norm" in tensors:  # Falcon-H1
        return "ffn_norm"
    if spec.placement == NormPlacement.PRE and "blk.0.ffn_norm.weight" not in tensors:  # Seed-OSS
        return "post_attention_norm.weight"
    return None


GGUF_LATENT = {
    "q_a": "attn_q_a.weight",
    "q_a_norm": "attn_q_a_norm.weight",
    "q_b": "attn_q_b.weight",
    "kv_a": "attn_kv_a_mqa.weight",
    "kv_a_norm": "attn_kv_a_norm.weight",
}


def gguf_latents(ours: str, theirs: str, tensors: Mapping[str, Weight]) -> dict[str, WeightSource]:
    """Name the tensors of a latent attention, of older files whose keys and values are one."""
    heads = {"k_b": "attn_k_b.weight", "v_b": "attn_v_b.weight"}
    if f"{theirs}attn_kv_b.weight{KEYS}" in tensors:
        heads = {"k_b": f"attn_kv_b.weight{KEYS}", "v_b": f"attn_kv_b.weight{VALUES}"}
    names = GGUF_LATENT | heads
    return {ours + o: WeightSource(theirs + t) for o, t in names.items()}


GGUF_MIXTURE = {
    "router": "ffn_gate_inp.weight",
    "router.bias": "ffn_gate_inp.bias",
    "router.selection_bias": "exp_probs_b.bias",
    "shared.gate": "ffn_gate_shexp.weight",
    "shared.up": "ffn_up_shexp.weight",
    "shared.down": "ffn_down_shexp.weight",
    "shared.router": "ffn_gate_inp_shexp.weight",
}
GGUF_EXPERTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}


def gguf_mixture(
    mixture: MixtureSpec, ours: str, theirs: str, tensors: Mapping[str, Weight]
) -> dict[str, WeightSource]:
    """Name the tensors of a layer's mixture, whose experts are stacked."""
    sources = {ours + o: WeightSource(theirs + t) for o, t in GGUF_MIXTURE.items()}
    is_fused = f"{theirs}ffn_gate_up_exps.weight[0]" in tensors
    for expert in range(mixture.num_experts):
        own = f"{ours}experts.{expert}."
        for our, their in with_biases(GGUF_EXPERTS).items():
            sources[own + our] = WeightSource(f"{theirs}{their}[{expert}]")
        if is_fused:
            fused = f"{theirs}ffn_gate_up_exps.weight[{expert}]"
            sources |= gate_and_up(own, fused, mixture.intermediate_size)
    return sources
