"""What files call the weights that only Gemma 3n and 4 have."""

from collections.abc import Mapping

from headrace.engine_proc.worker.models.specs.decoder_spec import AltUpSpec, DecoderSpec
from headrace.engine_proc.worker.models.weight_source import WeightSource

HF_OUTER = {
    "per_layer.embed": "embed_tokens_per_layer.weight",
    "per_layer.proj": "per_layer_model_projection.weight",
    "per_layer.proj_norm": "per_layer_projection_norm.weight",
}
HF_LAYER = {
    "per_layer.gate": "per_layer_input_gate.weight",
    "per_layer.out": "per_layer_projection.weight",
    "per_layer.norm": "post_per_layer_input_norm.weight",
    "scale": "layer_scalar",
    "altup.router": "altup.modality_router.weight",
    "altup.norm": "altup.router_norm.weight",
    "altup.predict": "altup.prediction_coefs.weight",
    "altup.correct": "altup.correction_coefs.weight",
    "altup.scale": "altup.correct_output_scale",
    "laurel.left": "laurel.linear_left.weight",
    "laurel.right": "laurel.linear_right.weight",
    "laurel.norm": "laurel.post_laurel_norm.weight",
    "router": "router.proj.weight",
    "router.norm": "router.scale",
    "router.scales": "router.per_expert_scale",
    "expert_norm": "pre_feedforward_layernorm_2.weight",
    "expert_post_norm": "post_feedforward_layernorm_2.weight",
    "shared_post_norm": "post_feedforward_layernorm_1.weight",
}
GGUF_OUTER = {
    "per_layer.embed": "per_layer_token_embd.weight",
    "per_layer.proj": "per_layer_model_proj.weight",
    "per_layer.proj_norm": "per_layer_proj_norm.weight",
}
GGUF_LAYER = {
    "per_layer.gate": "inp_gate.weight",
    "per_layer.out": "proj.weight",
    "per_layer.norm": "post_norm.weight",
    "scale": "layer_output_scale.weight",
    "altup.router": "altup_router.weight",
    "altup.norm": "altup_router_norm.weight",
    "altup.predict": "altup_predict_coef.weight",
    "altup.correct": "altup_correct_coef.weight",
    "altup.scale": "altup_correct_scale.weight",
    "laurel.left": "laurel_l.weight",
    "laurel.right": "laurel_r.weight",
    "laurel.norm": "laurel_post_norm.weight",
    "router.norm": "ffn_gate_inp.scale",
    "router.scales": "ffn_down_exps.scale",
    "expert_norm": "pre_ffw_norm_2.weight",
    "expert_post_norm": "post_ffw_norm_2.weight",
    "shared_post_norm": "post_ffw_norm_1.weight",
}


def is_newer_gemma(spec: DecoderSpec) -> bool:
    """Whether a decoder has some of these weights."""
    return spec.value_norm


def hf_gemma(spec: DecoderSpec, prefix: str) -> dict[str, WeightSource]:
    """Name the weights in a Hugging Face folder."""
    sources = named(spec, HF_OUTER, HF_LAYER, prefix, f"{prefix}layers.")
    return sources | altup_projections(
        spec.altup,
        f"{prefix}altup_projections.{{}}.weight",
        f"{prefix}altup_unembed_projections.{{}}.weight",
    )


def gguf_gemma(spec: DecoderSpec) -> dict[str, WeightSource]:
    """Name the weights in a GGUF file."""
    sources = named(spec, GGUF_OUTER, GGUF_LAYER, "", "blk.")
    for i, layer in enumerate(spec.layers):
        if layer.mixture is not None:  # the MLP beside the experts
            for name in ("gate", "up", "down"):
                sources[f"layers.{i}.shared.{name}"] = WeightSource(f"blk.{i}.ffn_{name}.weight")
    return sources | altup_projections(
        spec.altup, "altup_proj.weight[{}]", "altup_unembd_proj.weight[{}]"
    )


def named(
    spec: DecoderSpec, outer: Mapping[str, str], in_layer: Mapping[str, str], prefix: str, blk: str
) -> dict[str, WeightSource]:
    """Name what is not a layer's, and what each layer has."""
    sources = {ours: WeightSource(prefix + theirs) for ours, theirs in outer.items()}
    for i in range(len(spec.layers)):
        for ours, theirs in in_layer.items():
            sources[f"layers.{i}.{ours}"] = WeightSource(f"{blk}{i}.{theirs}")
    return sources


def altup_projections(altup: AltUpSpec | None, into: str, out: str) -> dict[str, WeightSource]:
    """Name the matrices that make further residuals, and those that undo it."""
    count = 0 if altup is None else altup.num_inputs - 1
    return {
        f"altup.{ours}.{i + 1}": WeightSource(theirs.format(i))
        for i in range(count)
        for ours, theirs in (("in", into), ("out", out))
    }
