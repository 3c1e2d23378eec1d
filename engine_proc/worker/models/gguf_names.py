"""What GGUF files call weights."""

from collections.abc import Mapping

from headrace.engine_proc.worker.checkpoints.head_matrices import KEYS, VALUES
from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.models.delta_net_names import gguf_delta_net
from headrace.engine_proc.worker.models.gemma_names import gguf_gemma, is_newer_gemma
from headrace.engine_proc.worker.models.mamba_names import (
    GGUF_MAMBA,
    GGUF_MAMBA2,
    mamba2_parts,
    mamba_parts,
)
from headrace.engine_proc.worker.models.mtp import GGUF_NAMES, mtp_sources
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MambaSpec,
    Mixer,
    MixtureSpec,
    NormPlacement,
    ShortConvSpec,
)
from headrace.engine_proc.worker.models.weight_shapes import XIELU
from headrace.engine_proc.worker.models.weight_source import (
    WeightSource,
    fused_gate_up,
    fused_qkv,
    gate_and_up,
    gated_queries,
    short_conv,
    with_biases,
)

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
        case MambaSpec():
            return mamba_parts(mixer, ours, theirs, GGUF_MAMBA)
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
    sources |= mtp_sources(spec, "blk.", GGUF_NAMES, tensors)
    return sources | (gguf_gemma(spec) if is_newer_gemma(spec) else {})


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
