"""The families of dense decoders whose MLP has no gate: `down(act(up(x)))`."""

from collections.abc import Callable

from headrace.engine_proc.worker.models.families.dense import (
    biases,
    decoder,
    rope,
    split_head_dim,
    window,
)
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    DecoderSpec,
    LayerSpec,
    Norm,
    NormPlacement,
    QKNorm,
)


def starcoder2(fields: ConfigFields) -> DecoderSpec:
    """Every layer slides, if any does; `use_bias` is of all projections."""
    fields.get("embedding_dropout", None)  # of training
    fields.choice("norm_type", {"layer_norm": None}, "layer_norm")
    fields.choice("mlp_type", {"default": None}, "default")
    bias = fields.flag("use_bias", True)
    return decoder(
        fields,
        eps="norm_epsilon",
        layers=(LayerSpec(window=window(fields)),) * fields.integer("num_hidden_layers"),
        tied_head=True,
        norm=Norm.LAYER,
        norm_bias=True,
        gated_mlp=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def nemotron(fields: ConfigFields) -> DecoderSpec:
    """A part of each head rotates. LayerNorms have weights of 1 + w."""
    fields.get("rope_percent", None)  # published, but not read by transformers
    head_dim = fields.integer("head_dim", split_head_dim(fields))
    partial = fields.number("partial_rotary_factor", 0.5)
    return decoder(
        fields,
        eps="norm_eps",
        ropes=(rope(fields, head_dim, 10_000.0, partial=partial),),
        norm=Norm.LAYER_ONE_PLUS,
        norm_bias=True,
        gated_mlp=False,
        mlp_bias=fields.flag("mlp_bias", False),
        **biases(fields),
    )


def arcee(fields: ConfigFields) -> DecoderSpec:
    """Llama without gates."""
    mlp_bias = fields.flag("mlp_bias", False)
    return decoder(fields, gated_mlp=False, mlp_bias=mlp_bias, **biases(fields))


def apertus(fields: ConfigFields) -> DecoderSpec:
    """Queries and keys are normalized. The activation has numbers of each layer."""
    for name, built_in in (("mlp_bias", False), ("post_norm", False), ("qk_norm", True)):
        if fields.flag(name, built_in) != built_in:
            raise fields.wrong(name, str(built_in).lower())
    return decoder(
        fields,
        rope_theta=12e6,
        activations={"xielu": Activation.XIELU},
        gated_mlp=False,
        qk_norm=QKNorm.PER_HEAD,
        **biases(fields),
    )


def gpt_neox(fields: ConfigFields) -> DecoderSpec:
    """Attention and MLP read the same residual, unless `use_parallel_residual` is off."""
    fields.get("classifier_dropout", None)  # of another head
    partial = fields.number("partial_rotary_factor", fields.number("rotary_pct", 0.25))
    is_parallel = fields.flag("use_parallel_residual", True)
    bias = fields.flag("attention_bias", True)
    fields.get("num_key_value_heads", None)  # said of others; there are as many as of queries
    head_dim, theta = split_head_dim(fields), fields.number("rotary_emb_base", 10_000.0)
    return decoder(
        fields,
        eps="layer_norm_eps",
        ropes=(rope(fields, head_dim, theta, partial=partial),),
        norm=Norm.LAYER,
        norm_bias=True,
        num_kv_heads=fields.integer("num_attention_heads"),
        placement=NormPlacement.PARALLEL_TWO_NORMS if is_parallel else NormPlacement.PRE,
        gated_mlp=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
    )


def phi(fields: ConfigFields) -> DecoderSpec:
    """One norm for attention and MLP. `qk_layernorm` is refused: its norms have biases."""
    partial = fields.number("partial_rotary_factor", 0.5)
    return decoder(
        fields,
        eps="layer_norm_eps",
        ropes=(rope(fields, split_head_dim(fields), 10_000.0, partial=partial),),
        norm=Norm.LAYER,
        norm_bias=True,
        placement=NormPlacement.PARALLEL,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


UNGATED: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "starcoder2": starcoder2,
    "nemotron": nemotron,
    "arcee": arcee,
    "apertus": apertus,
    "gpt_neox": gpt_neox,
    "phi": phi,
}
