"""The families of decoders with layers of Mamba-2."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from headrace.engine_proc.worker.models.config_fields import ConfigFields
from headrace.engine_proc.worker.models.decoder_spec import DecoderSpec, LayerSpec, Mamba2Spec
from headrace.engine_proc.worker.models.mixture_families import ALIAS, mixture, whole, with_mixture
from headrace.engine_proc.worker.models.model_families import (
    FULL,
    biases,
    decoder,
    granite,
    rope,
    split_head_dim,
)

MAMBA, ATTENTION = "mamba", "attention"  # older configs call layers so
KINDS = {"linear_attention": MAMBA, MAMBA: MAMBA, FULL: ATTENTION, ATTENTION: ATTENTION}
UNLIMITED = ([0, inf], [0, {"__float__": "Infinity"}])  # as transformers 5 writes it
# Of the chunks in which other engines scan, and of training.
INERT_FIELDS = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")


def mamba2_of(fields: ConfigFields, inner_size: int, **differences: Any) -> Mamba2Spec:
    """Lower the fields `mamba_*`. Heads make up `inner_size`."""
    for name in INERT_FIELDS:
        fields.get(name, None)
    if fields.get("time_step_limit", UNLIMITED[0]) not in UNLIMITED:
        raise fields.wrong(
            "time_step_limit", "[0, Infinity]: others would be those of prompts only"
        )
    num_heads = fields.integer("mamba_n_heads", 128)
    head_dim = fields.get("mamba_d_head", "auto")
    head_dim = inner_size // num_heads if head_dim == "auto" else fields.integer("mamba_d_head")
    num_groups = fields.integer("mamba_n_groups", 1)
    if num_heads * head_dim != inner_size:
        raise fields.wrong("mamba_n_heads", f"{inner_size} numbers in heads of {head_dim}")
    if num_heads % num_groups:
        raise fields.wrong("mamba_n_groups", f"a divisor of {num_heads} heads")
    bias = fields.flag("mamba_proj_bias", False)
    common = Mamba2Spec(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=fields.integer("mamba_d_state", 256),
        num_groups=num_groups,
        kernel_size=fields.integer("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        input_bias=bias,
        output_bias=bias,
        norm_size=inner_size // num_groups,
    )
    return replace(common, **differences)


def expanded(fields: ConfigFields) -> int:
    """Return the numbers of all heads together."""
    return fields.integer("mamba_expand", 2) * fields.integer("hidden_size")


def bamba(fields: ConfigFields) -> DecoderSpec:
    """`attn_layer_indices` names the layers that attend. Half of each head is rotated."""
    fields.get("attn_rotary_emb", None)  # published, but not read by transformers
    attends = fields.get("attn_layer_indices", [])
    if not isinstance(attends, list):
        raise fields.wrong("attn_layer_indices", "a list of layers")
    mamba2 = mamba2_of(fields, expanded(fields))
    num_layers = fields.integer("num_hidden_layers")
    head_dim = split_head_dim(fields)
    return decoder(
        fields,
        layers=tuple(LayerSpec(mixer=None if i in attends else mamba2) for i in range(num_layers)),
        ropes=(rope(fields, head_dim, 10_000.0, partial=0.5),),
        mlp_bias=fields.flag("mlp_bias", False),
        **biases(fields),
    )


def granitemoehybrid(fields: ConfigFields) -> DecoderSpec:
    """Granite 4: with experts beside a shared MLP, or that MLP alone; with RoPE or without."""
    fields.get("init_method", None)  # of training
    fields.choice("normalization_function", {"rmsnorm": None}, "rmsnorm")
    num_layers = fields.integer("num_hidden_layers")
    rotates = fields.choice("position_embedding_type", {"rope": True, "nope": False}, "nope")
    mamba2 = mamba2_of(fields, expanded(fields))
    attention = LayerSpec(rope=0 if rotates else None)
    layers = tuple(
        attention if kind == ATTENTION else LayerSpec(mixer=mamba2)
        for kind in kinds_of(fields, num_layers)
    )
    shared_size = fields.integer("shared_intermediate_size", 1024)
    spec = replace(granite(fields), layers=layers, intermediate_size=shared_size)
    if whole(fields, ALIAS, 8) == 0:
        fields.get("num_experts_per_tok", None)
        return spec
    own = mixture(
        fields,
        experts=ALIAS,
        size="intermediate_size",
        shared_intermediate_size=shared_size,
    )
    return with_mixture(spec, own)


def kinds_of(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return what each layer mixes with, Mamba-2 if the config does not say."""
    for name in ("layer_types", "layers_block_type"):
        types = fields.one_per_layer(name, num_layers)
        if types is not None:
            if not set(types) <= KINDS.keys():
                raise fields.wrong(name, f"a list of {MAMBA!r} and {ATTENTION!r}")
            return [KINDS[kind] for kind in types]
    return [MAMBA] * num_layers


MAMBAS: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "bamba": bamba,
    "granitemoehybrid": granitemoehybrid,
}
