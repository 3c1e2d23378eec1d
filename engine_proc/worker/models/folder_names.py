"""What Hugging Face folders call weights, and their modules where that is not as Llama does."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.engine_proc.worker.checkpoints.head_matrices import KEYS, VALUES
from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.models.delta_net_names import hf_delta_net
from headrace.engine_proc.worker.models.gemma_names import hf_gemma, is_newer_gemma
from headrace.engine_proc.worker.models.mamba_names import (
    HF_MAMBA,
    HF_MAMBA2,
    mamba2_module,
    mamba2_parts,
    mamba_parts,
)
from headrace.engine_proc.worker.models.mtp import NAMES, mtp_sources
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MambaSpec,
    Mixer,
    MixtureSpec,
    NormPlacement,
    QKNorm,
    ShortConvSpec,
)
from headrace.engine_proc.worker.models.weight_source import (
    WeightSource,
    fused_gate_up,
    fused_qkv,
    gate_and_up,
    gated_queries,
    short_conv,
    with_biases,
)


@dataclass(frozen=True, kw_only=True)
class FolderNames:
    """The names of modules. Those of a base model have no `prefix`."""

    prefix: str = "model."
    embed: str = "embed_tokens"
    norm: str = "norm"
    head: str = "lm_head"
    in_layer: Mapping[str, str] = field(default_factory=dict)  # by our names
    tensors: Mapping[str, str] = field(default_factory=dict)  # in a layer, that are no modules
    # The module of queries, keys and values, whose rows are those of head after head.
    qkv_by_head: str = ""


LLAMA = FolderNames()
FOLDER_NAMES = {
    "starcoder2": FolderNames(in_layer={"up": "mlp.c_fc", "down": "mlp.c_proj"}),
    "gpt_neox": FolderNames(
        prefix="gpt_neox.",
        embed="embed_in",
        norm="final_layer_norm",
        head="embed_out",
        in_layer={
            "o": "attention.dense",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
        qkv_by_head="attention.query_key_value",
    ),
    "apertus": FolderNames(
        in_layer={"attn_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
        tensors={
            f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")
        },
    ),
    "phi": FolderNames(
        norm="final_layernorm",
        in_layer={"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
    ),
}


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
        sources |= hf_fused(spec, f"layers.{i}.", layer, tensors)
        if (mixture := spec.layers[i].mixture) is not None:
            sources |= hf_mixture(mixture, f"layers.{i}.", layer, tensors)
    sources |= mtp_sources(spec, f"{prefix}layers.", NAMES, tensors)
    return sources | (hf_gemma(spec, prefix) if is_newer_gemma(spec) else {})


def hf_fused(
    spec: DecoderSpec, ours: str, theirs: str, tensors: Mapping[str, Weight]
) -> dict[str, WeightSource]:
    """Name the weights of attention and of an MLP that some families join, or have elsewhere."""
    sources: dict[str, WeightSource] = {}
    if spec.attention_gate:
        sources |= gated_queries(spec, ours, f"{theirs}self_attn.q_proj")
    for module in HF_DENSE:
        if f"{theirs}{module}.down_proj.weight" in tensors:
            linear = with_biases({name: f"{module}.{name}_proj" for name in HF_NUMBERED})
            sources |= {ours + o: WeightSource(theirs + t) for o, t in linear.items()}
    if f"{theirs}shared_mlp.input_linear.weight" in tensors:  # Granite 4 without experts
        sources |= fused_gate_up(spec, ours, f"{theirs}shared_mlp.input_linear")
        sources[f"{ours}down"] = WeightSource(f"{theirs}shared_mlp.output_linear.weight")
    if f"{theirs}self_attn.qkv_proj.weight" in tensors:  # Phi-3
        sources |= fused_qkv(spec, ours, f"{theirs}self_attn.qkv_proj")
    if by_head := FOLDER_NAMES.get(spec.architecture, LLAMA).qkv_by_head:
        sources |= qkv_by_head(spec, ours, f"{theirs}{by_head}")
    if f"{theirs}mlp.gate_up_proj.weight" in tensors:  # Phi-3, GLM-4
        sources |= fused_gate_up(spec, ours, f"{theirs}mlp.gate_up_proj")
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
        case MambaSpec():
            return mamba_parts(mixer, ours, f"{theirs}mamba.", HF_MAMBA)
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
        "block_sparse_moe.gate.e_score_correction_bias",  # Kimi
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
    "block_sparse_moe.shared_experts",  # Kimi
    "mlp",  # Gemma 4
)
HF_DENSE = ("feed_forward", "block_sparse_moe")  # Llama 4, Bamba; Kimi, as transformers writes it
HF_NUMBERED = {"gate": "w1", "up": "w3", "down": "w2"}
HF_PROJECTIONS = {name: f"{name}_proj" for name in HF_NUMBERED}
HF_SEPARATE = (  # modules whose experts have tensors of their own
    ("block_sparse_moe", HF_NUMBERED),  # Mixtral
    ("feed_forward", HF_NUMBERED),  # LFM2
    ("mixer", HF_PROJECTIONS),  # Nemotron-H
    ("feed_forward", HF_PROJECTIONS),  # Jamba
    ("mlp", HF_PROJECTIONS),
)
HF_STACKS = (  # of gate and up, and of down
    ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),  # Granite
    ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),  # Llama 4
    ("experts.gate_up_proj", "experts.down_proj"),  # Gemma 4
)


def hf_mixture(
    mixture: MixtureSpec, ours: str, theirs: str, tensors: Mapping[str, Weight]
) -> dict[str, WeightSource]:
    """Name the tensors of a layer's mixture."""
    sources = {}
    for name, choices in HF_MIXTURE.items():
        stored = (choice for choice in choices if theirs + choice in tensors)
        sources[ours + name] = WeightSource(theirs + next(stored, choices[0]))
    shared = (
        module
        for module in HF_SHARED
        if any(f"{theirs}{module}.{name}_proj.weight" in tensors for name in HF_NUMBERED)
    )
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
    """Name the tensors of an expert: its own, or parts of those of all experts.

    An adapter has some of them.
    """
    if f"{theirs}mlp.experts.gate_up_proj[{expert}][0::2]" in tensors:
        return alternating_expert(ours, f"{theirs}mlp.experts.", expert)
    for gate_up, down in HF_STACKS:
        names = f"{theirs}{gate_up}[{expert}]", f"{theirs}{down}[{expert}]"
        if any(name in tensors for name in names):
            sources = gate_and_up(ours, names[0], mixture.intermediate_size)
            return sources | {f"{ours}down": WeightSource(names[1])}
    for module, linear in HF_SEPARATE:
        own = {our: f"{module}.experts.{expert}.{their}" for our, their in linear.items()}
        if any(f"{theirs}{name}.weight" in tensors for name in own.values()):
            break
    return {ours + o: WeightSource(theirs + t) for o, t in with_biases(own).items()}


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


def qkv_by_head(spec: DecoderSpec, layer: str, theirs: str) -> dict[str, WeightSource]:
    """Name the rows of queries, keys and values that lie head after head: GPT-NeoX has them so."""
    dim = spec.head_dim
    return {
        f"{layer}{ours}{bias}": WeightSource(f"{theirs}{bias or '.weight'}", i * dim, dim, 3 * dim)
        for bias in ("", ".bias")
        for i, ours in enumerate(("q", "k", "v"))
    }
