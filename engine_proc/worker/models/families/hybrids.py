"""The families of hybrids, some of whose layers have a state in place of keys and values."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.engine_proc.worker.models.families.dense import FULL, biases, decoder, mrope, rope
from headrace.engine_proc.worker.models.families.mixtures import (
    mixture,
    qwen_sparse,
    whole,
    with_mixture,
)
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MixtureSpec,
    Norm,
    QKNorm,
    RouterScore,
    ShortConvSpec,
)

CONV, LINEAR = "conv", "linear_attention"
INTERVAL = "full_attention_interval"
MROPE_SECTIONS = [11, 11, 10]  # of Qwen3.5
# Published fields of Qwen3.5 that transformers does not read: of layers that predict further
# tokens, and the type of states, which are fp32 here.
QWEN_FIELDS = ("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
# Published fields of LFM2 that transformers does not read: how it was trained, and sizes again.
LFM2_FIELDS = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "use_pos_enc",
)


def lfm2(fields: ConfigFields) -> DecoderSpec:
    """Short convolutions, and attention in the layers that `layer_types` or `full_attn_idxs` name.

    `intermediate_size`, or the older `block_ff_dim`, is a size before it is adjusted.
    """
    num_layers = fields.integer("num_hidden_layers")
    attends = fields.get("full_attn_idxs", None)
    if not isinstance(attends, list | None):
        raise fields.wrong("full_attn_idxs", "a list of layers")
    types = fields.one_per_layer("layer_types", num_layers)
    if types is None:
        types = [FULL if attends is None or i in attends else CONV for i in range(num_layers)]
    return lfm2_decoder(fields, types, adjusted_size(fields))


def adjusted_size(fields: ConfigFields) -> int:
    """Return the intermediate size: two thirds of what the config says, made a multiple."""
    size = fields.integer("intermediate_size", 12288)
    size = fields.integer("block_ff_dim", size)
    unit = fields.integer("block_multiple_of", 256)
    multiplier = fields.positive("block_ffn_dim_multiplier", 1.0)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    return -(-int(multiplier * int(2 * size / 3)) // unit) * unit


def lfm2_moe(fields: ConfigFields) -> DecoderSpec:
    """LFM2 with a mixture from layer `num_dense_layers` on."""
    num_layers = fields.integer("num_hidden_layers")
    types = fields.one_per_layer("layer_types", num_layers)
    if types is None:
        raise fields.wrong("layer_types", f"a list of {num_layers}")
    spec = lfm2_decoder(fields, types, fields.integer("intermediate_size"))
    own = mixture(
        fields,
        score=RouterScore.SIGMOID,
        normalized=fields.flag("norm_topk_prob", True),
        weight_sum_eps=1e-6,
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        selection_bias=fields.flag("use_expert_bias", True),
    )
    first = whole(fields, "num_dense_layers", 2)
    return with_mixture(spec, own, lambda i: i >= first)


def lfm2_decoder(fields: ConfigFields, types: list[Any], intermediate_size: int) -> DecoderSpec:
    """Lower what both have."""
    for name in LFM2_FIELDS:
        fields.get(name, None)
    if not set(types) <= {CONV, FULL} or FULL not in types:
        raise fields.wrong("layer_types", f"a list of {CONV!r} and {FULL!r}, with one that attends")
    conv = ShortConvSpec(
        channels=fields.integer("hidden_size"),
        kernel_size=fields.integer("conv_L_cache", 3),
        bias=fields.flag("conv_bias", False),
    )
    # Whatever the config may leave out: the activation is built in.
    fields.values = {
        "hidden_act": "silu",
        **fields.values,
        "intermediate_size": intermediate_size,
    }
    tied = fields.flag("tie_embedding", True)
    spec = decoder(
        fields,
        eps="norm_eps",
        rope_theta=1e6,
        layers=tuple(LayerSpec(mixer=conv if kind == CONV else None) for kind in types),
        tied_head=tied,
        qk_norm=QKNorm.PER_HEAD,
    )
    given = fields.get("tie_embedding", None)  # which transformers prefers
    return spec if given is None else replace(spec, tied_head=tied)


def qwen3_next(fields: ConfigFields) -> DecoderSpec:
    """Gated delta nets with a mixture, and layers between that attend."""
    spec = delta_net_decoder(fields)
    return with_mixture(spec, gated_mixture(fields), qwen_sparse(fields))


def qwen3_5(fields: ConfigFields) -> DecoderSpec:
    """Qwen3-Next without experts."""
    fields.get("mlp_only_layers", None)  # published, but there is nothing else
    return delta_net_decoder(fields, MROPE_SECTIONS)


def qwen3_5_moe(fields: ConfigFields) -> DecoderSpec:
    """Every layer has a mixture, whose weights are always divided by their sum."""
    fields.get("mlp_only_layers", None)
    size = fields.integer("moe_intermediate_size")
    fields.values = {"norm_topk_prob": True, **fields.values, "intermediate_size": size}
    if not fields.flag("norm_topk_prob"):
        raise fields.wrong("norm_topk_prob", "true")
    return with_mixture(delta_net_decoder(fields, MROPE_SECTIONS), gated_mixture(fields))


def gated_mixture(fields: ConfigFields) -> MixtureSpec:
    """Lower the mixture of all that have gated delta nets."""
    return mixture(
        fields,
        normalized=fields.flag("norm_topk_prob", True),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def delta_net_decoder(fields: ConfigFields, sections: list[int] | None = None) -> DecoderSpec:
    """Lower all but the MLP. One layer in `full_attention_interval` attends, or `layer_types` says.

    A quarter of each head rotates, unless the config says otherwise.

    Args:
        sections: of M-RoPE, the family's default; None is one position for all.
    """
    num_layers, interval = fields.integer("num_hidden_layers"), fields.integer(INTERVAL, 4)
    types = fields.one_per_layer("layer_types", num_layers)
    if types is None:
        types = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    if not set(types) <= {LINEAR, FULL} or FULL not in types:
        raise fields.wrong(
            "layer_types", f"a list of {LINEAR!r} and {FULL!r}, with one that attends"
        )
    for name in QWEN_FIELDS:
        fields.get(name, None)
    if not fields.flag("attn_output_gate", True):
        raise fields.wrong("attn_output_gate", "true")
    delta = delta_net(fields)
    partial = fields.number("partial_rotary_factor", 0.25)
    head_dim = fields.integer("head_dim", 256)
    if sections is None:
        table = rope(fields, head_dim, 10_000.0, partial=partial)
    else:
        table = mrope(
            fields,
            head_dim=head_dim,
            theta=10_000.0,
            sections=sections,
            interleaved=True,
            partial=partial,
        )
    return decoder(
        fields,
        head_dim=256,
        ropes=(table,),
        layers=tuple(LayerSpec(mixer=delta if kind == LINEAR else None) for kind in types),
        norm=Norm.RMS_ONE_PLUS,
        qk_norm=QKNorm.PER_HEAD,
        attention_gate=True,
        **biases(fields),
    )


def delta_net(fields: ConfigFields) -> GatedDeltaNetSpec:
    """Lower the gated delta net of all layers that have one."""
    delta = GatedDeltaNetSpec(
        num_key_heads=fields.integer("linear_num_key_heads", 16),
        num_value_heads=fields.integer("linear_num_value_heads", 32),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel_size=fields.integer("linear_conv_kernel_dim", 4),
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise fields.wrong("linear_num_value_heads", f"a multiple of {delta.num_key_heads}")
    return delta


HYBRIDS: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
}
