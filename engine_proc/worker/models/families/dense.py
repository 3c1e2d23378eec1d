"""The families of dense decoders: functions from a config's fields to a `DecoderSpec`.

`lowering.py` calls them, and refuses what they did not read. `mixtures.py` has mixtures.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    DecoderSpec,
    LayerSpec,
    Norm,
    NormPlacement,
    QKNorm,
    RopeTable,
)
from headrace.engine_proc.worker.models.specs.rope import rope_table
from headrace.model import longrope

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def decoder(
    fields: ConfigFields,
    *,
    rope_theta: float = 10_000.0,
    head_dim: int | None = None,
    layers: tuple[LayerSpec, ...] | None = None,
    ropes: tuple[RopeTable, ...] | None = None,
    tied_head: bool = False,
    act: str = "hidden_act",
    activations: Mapping[str, Activation] = ACTIVATIONS,
    eps: str = "rms_norm_eps",
    **differences: Any,
) -> DecoderSpec:
    """Lower the fields all families share, as Llama has them.

    Args:
        rope_theta, head_dim, tied_head: the family's defaults, for configs that leave them out.
        layers, ropes: where they are not the same for all layers.
        act, eps: the fields that name the activation and the norm's epsilon.
        activations: those that the family can have.
        differences: fields of the spec in which the family is not Llama.
    """
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", head_dim or split_head_dim(fields))
    num_layers = fields.integer("num_hidden_layers")
    max_position = fields.integer("max_position_embeddings")
    common = DecoderSpec(
        architecture=fields.text("model_type"),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position=min(max_position, longrope.trained_length(fields.values) or max_position),
        layers=layers or (LayerSpec(),) * num_layers,
        ropes=ropes or (rope(fields, head_dim, rope_theta),),
        norm_eps=fields.number(eps),
        activation=fields.choice(act, activations),
        tied_head=fields.flag("tie_word_embeddings", tied_head),
        attention_scale=head_dim**-0.5,
    )
    spec = replace(common, **differences)
    if spec.num_heads % spec.num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of {spec.num_heads}")
    return spec


def split_head_dim(fields: ConfigFields) -> int:
    """Return the head_dim of a config that gives none: its share of the hidden size."""
    return fields.integer("hidden_size") // fields.integer("num_attention_heads")


def rope_params(fields: ConfigFields) -> Mapping[str, Any]:
    """Return what a config says of RoPE."""
    return fields.table("rope_scaling") or fields.table("rope_parameters")


def rope(
    fields: ConfigFields,
    head_dim: int,
    theta: float,
    partial: float | None = None,
    interleaved: bool = False,
    params: Mapping[str, Any] | None = None,
) -> RopeTable:
    """Lower the RoPE that all layers share: `rope_parameters`, or the older `rope_scaling`.

    Args:
        params: in place of these.
    """
    params = rope_params(fields) if params is None else params
    if longrope.trained_length(fields.values) and longrope.LENGTH not in params:
        params = {**params, longrope.LENGTH: fields.get(longrope.LENGTH)}
    return rope_table(
        params,
        owner=fields.owner,
        head_dim=head_dim,
        max_position=fields.integer("max_position_embeddings"),
        theta=fields.number("rope_theta", theta),
        partial=partial,
        interleaved=interleaved,
    )


def mrope(
    fields: ConfigFields,
    *,
    head_dim: int,
    theta: float,
    sections: list[int],
    interleaved: bool = False,
    adjacent: bool = False,
    partial: float | None = None,
) -> RopeTable:
    """Lower M-RoPE: `mrope_section` has the number of pairs that rotate by time, height and width.

    Args:
        theta, sections: the family's defaults.
        interleaved: pairs alternate, as Qwen 3's, those of time last; else those of time come
            first, then those of height.
        adjacent: the numbers of a pair are.
    """
    params = {**rope_params(fields)}
    sections = params.pop("mrope_section", sections)
    if params.pop("mrope_interleaved", interleaved) != interleaved:
        raise fields.wrong("rope_scaling", f"with mrope_interleaved {interleaved}")
    for name in ("type", "rope_type"):
        if params.get(name) == "mrope":
            params[name] = "default"
    table = rope(fields, head_dim, theta, partial, interleaved=adjacent, params=params)
    num_pairs = len(table.inv_freq)
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if len(sections) != 3 or (len(axes) != num_pairs and not interleaved):
        raise fields.wrong("rope_scaling", f"with an mrope_section of 3, {num_pairs} in all")
    if interleaved:  # all others turn by time
        axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(num_pairs)]
    return replace(table, axes=tuple(axes))


def biases(fields: ConfigFields) -> dict[str, Any]:
    """Lower `attention_bias`, which most families apply to all four projections."""
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias}


def window(fields: ConfigFields) -> int | None:
    """Lower `sliding_window`: tokens attended to, the newest included, as in transformers."""
    return None if fields.get("sliding_window", None) is None else fields.integer("sliding_window")


def optional_window(fields: ConfigFields) -> int | None:
    """Lower `sliding_window`, which applies only with `use_sliding_window`."""
    size = window(fields)
    return size if fields.flag("use_sliding_window", False) else None


def layer_types(fields: ConfigFields, default: Callable[[int], bool]) -> list[bool]:
    """Return for each layer whether it slides; `default` decides by index if the config does
    not."""
    num_layers = fields.integer("num_hidden_layers")
    types = fields.one_per_layer("layer_types", num_layers)
    if types is None:
        return [default(i) for i in range(num_layers)]
    if not set(types) <= {SLIDING, FULL}:
        raise fields.wrong("layer_types", f"a list of {SLIDING!r} and {FULL!r}")
    return [kind == SLIDING for kind in types]


def ropes_by_type(
    fields: ConfigFields, *, head_dim: int, thetas: tuple[float, float]
) -> tuple[RopeTable, ...]:
    """Lower the RoPE of full layers and that of sliding ones: newer configs nest them by type.

    Args:
        head_dim: the family's default.
        thetas: the bases, where the tables have none of their own.
    """
    nested = ConfigFields(fields.table("rope_parameters"), f"the RoPE of {fields.owner}")
    old_full = fields.table("rope_scaling")
    tables = tuple(
        rope_table(
            params,
            owner=fields.owner,
            head_dim=fields.integer("head_dim", head_dim),
            max_position=fields.integer("max_position_embeddings"),
            theta=theta,
        )
        for params, theta in zip(
            (old_full or nested.table(FULL), nested.table(SLIDING)), thetas, strict=True
        )
    )
    nested.refuse_unread()
    return tables


def sliding(fields: ConfigFields, default: Callable[[int], bool]) -> tuple[LayerSpec, ...]:
    """Lower layers that differ in nothing but whether they slide."""
    size = window(fields)
    return tuple(
        LayerSpec(window=size if slides else None) for slides in layer_types(fields, default)
    )


def llama(fields: ConfigFields) -> DecoderSpec:
    return decoder(fields, **biases(fields), mlp_bias=fields.flag("mlp_bias", False))


def qwen2(fields: ConfigFields) -> DecoderSpec:
    return decoder(fields, layers=qwen_layers(fields), qkv_bias=True)


def qwen2_5_vl(fields: ConfigFields) -> DecoderSpec:
    table = mrope(fields, head_dim=split_head_dim(fields), theta=1e6, sections=[16, 24, 24])
    return decoder(fields, layers=qwen_layers(fields), ropes=(table,), qkv_bias=True)


def qwen3(fields: ConfigFields) -> DecoderSpec:
    return decoder(
        fields,
        layers=qwen_layers(fields),
        head_dim=128,
        qk_norm=QKNorm.PER_HEAD,
        **biases(fields),
    )


def qwen3_vl(fields: ConfigFields, head_dim: int = 128) -> DecoderSpec:
    """Qwen 3 with M-RoPE; `head_dim` is the family's default."""
    head_dim = fields.integer("head_dim", head_dim)
    table = mrope(fields, head_dim=head_dim, theta=5e5, sections=[24, 20, 20], interleaved=True)
    return decoder(
        fields, head_dim=head_dim, ropes=(table,), qk_norm=QKNorm.PER_HEAD, **biases(fields)
    )


def qwen_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """With `use_sliding_window`, layers from `max_window_layers` on slide."""
    first = fields.get("max_window_layers", 0)
    size = optional_window(fields)
    slides = layer_types(fields, lambda i: i >= first)
    return tuple(LayerSpec(window=size if slide else None) for slide in slides)


def phi3(fields: ConfigFields) -> DecoderSpec:
    """Of longer contexts only the part within the trained length, whose LongRoPE is fixed."""
    for name in ("rope_scaling", "rope_parameters"):
        params = fields.table(name)
        if params.get("rope_type", params.get("type", "default")) not in ("default", longrope.KIND):
            raise fields.wrong(name, f"of type 'default' or {longrope.KIND!r}")
    fields.get(longrope.LENGTH, None)
    head_dim = fields.integer("head_dim", split_head_dim(fields))
    partial = fields.number("partial_rotary_factor", 1.0)
    return decoder(
        fields,
        ropes=(rope(fields, head_dim, 10_000.0, partial=partial),),
        layers=(LayerSpec(window=window(fields)),) * fields.integer("num_hidden_layers"),
    )


def smollm3(fields: ConfigFields) -> DecoderSpec:
    """Every fourth layer is NoPE, or those that `no_rope_layers` marks with 0."""
    fields.get("max_window_layers", None)  # published, but `layer_types` is what counts
    interval = fields.integer("no_rope_layer_interval", 4)
    num_layers = fields.integer("num_hidden_layers")
    rotated = fields.one_per_layer("no_rope_layers", num_layers)
    if rotated is None:
        rotated = [(i + 1) % interval != 0 for i in range(num_layers)]
    size = optional_window(fields)
    slides = layer_types(fields, lambda i: not rotated[i])
    layers = tuple(
        LayerSpec(rope=0 if has_rope else None, window=size if slide else None)
        for has_rope, slide in zip(rotated, slides, strict=True)
    )
    return decoder(
        fields,
        layers=layers,
        rope_theta=2e6,
        tied_head=True,
        num_kv_heads=fields.integer("num_key_value_heads"),
        **biases(fields),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def olmo2(fields: ConfigFields) -> DecoderSpec:
    return decoder(fields, placement=NormPlacement.POST, qk_norm=QKNorm.FULL, **biases(fields))


def olmo3(fields: ConfigFields) -> DecoderSpec:
    """OLMo 2 with sliding layers, whose RoPE is never scaled."""
    slides = layer_types(fields, lambda i: (i + 1) % 4 != 0)
    size, theta = window(fields), fields.number("rope_theta", 500_000.0)
    return decoder(
        fields,
        layers=tuple(
            LayerSpec(rope=1, window=size) if slide else LayerSpec(rope=0) for slide in slides
        ),
        ropes=ropes_by_type(fields, head_dim=split_head_dim(fields), thetas=(theta, theta)),
        placement=NormPlacement.POST,
        qk_norm=QKNorm.FULL,
        **biases(fields),
    )


def glm4(fields: ConfigFields) -> DecoderSpec:
    """Half of each head rotates; `attention_bias` is for queries, keys and values only."""
    head_dim = fields.integer("head_dim", split_head_dim(fields))
    partial = fields.number("partial_rotary_factor", 0.5)
    return decoder(
        fields,
        ropes=(rope(fields, head_dim, 10_000.0, partial=partial, interleaved=True),),
        placement=NormPlacement.PRE_POST,
        qkv_bias=fields.flag("attention_bias", False),
    )


GLM_SECTIONS = [8, 12, 12]  # of M-RoPE


def glm4v(fields: ConfigFields) -> DecoderSpec:
    """GLM-4 with M-RoPE. Queries, keys and values have biases."""
    if not fields.flag("attention_bias", True):
        raise fields.wrong("attention_bias", "true")
    table = mrope(
        fields,
        head_dim=split_head_dim(fields),
        theta=10_000.0,
        sections=GLM_SECTIONS,
        adjacent=True,
        partial=fields.number("partial_rotary_factor", 1.0),
    )
    return decoder(fields, ropes=(table,), placement=NormPlacement.PRE_POST, qkv_bias=True)


def exaone4(fields: ConfigFields) -> DecoderSpec:
    """If some layers slide, the others are NoPE."""
    fields.get("sliding_window_pattern", None)  # may be letters, beside `layer_types`
    size = window(fields)
    slides = layer_types(
        fields,
        lambda i: size is not None and (i + 1) % fields.integer("sliding_window_pattern", 4) != 0,
    )
    if size is None and any(slides):
        raise fields.wrong("sliding_window", "the size that its 'sliding_attention' layers need")
    return decoder(
        fields,
        layers=tuple(
            LayerSpec(rope=0 if slide or size is None else None, window=size if slide else None)
            for slide in slides
        ),
        placement=NormPlacement.POST,
        qk_norm=QKNorm.PER_HEAD,
    )


def granite(fields: ConfigFields) -> DecoderSpec:
    return decoder(
        fields,
        **biases(fields),
        mlp_bias=fields.flag("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logit_multiplier=1 / fields.number("logits_scaling", 1.0),
    )


def granite_swa(fields: ConfigFields) -> DecoderSpec:
    """Granite with windows and sinks. `layer_rope_theta` has a RoPE base per layer; 0 is NoPE."""
    head_dim, num_layers = split_head_dim(fields), fields.integer("num_hidden_layers")
    bases = fields.one_per_layer("layer_rope_theta", num_layers) or [None] * num_layers
    kinds = sorted({base for base in bases if base != 0}, key=str)
    params = fields.table("rope_parameters")
    ropes = tuple(
        rope_table(
            params if base is None else {**params, "rope_theta": base},
            owner=fields.owner,
            head_dim=head_dim,
            max_position=fields.integer("max_position_embeddings"),
            theta=fields.number("rope_theta", 10_000.0),
        )
        for base in kinds
    )
    size = fields.integer("sliding_window", 128)
    slides = layer_types(fields, lambda i: i % 4 != 0)
    layers = tuple(
        LayerSpec(rope=None if base == 0 else kinds.index(base), window=size if slide else None)
        for base, slide in zip(bases, slides, strict=True)
    )
    return replace(granite(fields), layers=layers, ropes=ropes, attention_sinks=True)


def cohere(fields: ConfigFields) -> DecoderSpec:
    """`use_qk_norm` has a weight for each head and dimension, so it is refused."""
    head_dim = fields.integer("head_dim", split_head_dim(fields))
    return decoder(
        fields,
        eps="layer_norm_eps",
        ropes=(rope(fields, head_dim, 500_000.0, interleaved=True),),
        tied_head=True,
        norm=Norm.LAYER,
        placement=NormPlacement.PARALLEL,
        logit_multiplier=fields.number("logit_scale", 0.0625),
        **biases(fields),
    )


# Published fields of the only way the family is built.
COHERE2_BUILT_IN = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def cohere2(fields: ConfigFields) -> DecoderSpec:
    """Cohere with layers that slide and rotate, and every fourth that does neither."""
    for name, built_in in COHERE2_BUILT_IN.items():
        if fields.get(name, built_in) != built_in:
            raise fields.wrong(name, repr(built_in))
    fields.get("layer_switch", None)  # says `sliding_window_pattern` again
    fields.get("use_parallel_embedding", None)  # of the machine it was trained on
    pattern = fields.integer("sliding_window_pattern", 4)
    slides = layer_types(fields, lambda i: (i + 1) % pattern != 0)
    size = window(fields)
    layers = tuple(LayerSpec(window=size) if slide else LayerSpec(rope=None) for slide in slides)
    return replace(cohere(fields), layers=layers)


def seed_oss(fields: ConfigFields) -> DecoderSpec:
    return decoder(
        fields,
        head_dim=128,
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def helium(fields: ConfigFields) -> DecoderSpec:
    """`attention_bias` is for queries, keys and values only."""
    return decoder(
        fields,
        head_dim=128,
        ropes=(rope(fields, fields.integer("head_dim", 128), 100_000.0, interleaved=True),),
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def ernie4_5(fields: ConfigFields) -> DecoderSpec:
    bias = fields.flag("use_bias", False)
    return decoder(
        fields,
        head_dim=128,
        ropes=(rope(fields, fields.integer("head_dim", 128), 500_000.0, interleaved=True),),
        tied_head=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def stablelm(fields: ConfigFields) -> DecoderSpec:
    """A part of each head rotates. `qk_layernorm` has a norm for each head, so it is refused."""
    partial = fields.number("partial_rotary_factor", 0.25)
    is_parallel = fields.flag("use_parallel_residual", False)
    return decoder(
        fields,
        eps="layer_norm_eps",
        ropes=(rope(fields, split_head_dim(fields), 10_000.0, partial=partial),),
        norm=Norm.LAYER,
        norm_bias=True,
        placement=NormPlacement.PARALLEL if is_parallel else NormPlacement.PRE,
        qkv_bias=fields.flag("use_qkv_bias", False),
    )


# Published fields of Hunyuan that transformers does not read, as far as they are not off.
HUNYUAN_FIELDS = (
    "attention_head_dim",
    "cla_share_factor",
    "dense_list",
    "eod_token_id",
    "expert_hidden_dim",
    "mask_init_id",
    "moe_intermediate_size",
    "norm_type",
    "num_media_embeds",
    "num_shared_expert",
    "org_vocab_size",
    "pad_id",
    "pool_type",
    "routed_scaling_factor",
    "sep_token_id",
    "text_end_id",
    "text_start_id",
    "use_mixed_mlp_moe",
    "use_qk_norm",
    "use_rotary_pos_emb",
)


def hunyuan(fields: ConfigFields) -> DecoderSpec:
    """Queries and keys are normalized after RoPE, whose `alpha` stretches the base alone."""
    for name in HUNYUAN_FIELDS:
        fields.get(name, None)
    head_dim = fields.integer("head_dim", split_head_dim(fields))
    params = {**rope_params(fields)}
    own = ConfigFields(params, f"the RoPE of {fields.owner}")
    theta = own.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if params.get("rope_type", params.get("type")) == "dynamic" and params.get("alpha"):
        if head_dim < 4:
            raise fields.wrong("head_dim", "4 or more")
        theta, params = theta * own.positive("alpha") ** (head_dim / (head_dim - 2)), {}
    table = rope_table(
        {**params, "rope_theta": theta},
        owner=fields.owner,
        head_dim=head_dim,
        max_position=fields.integer("max_position_embeddings"),
        theta=theta,
    )
    return decoder(fields, ropes=(table,), qk_norm=QKNorm.PER_HEAD_AFTER_ROPE, **biases(fields))


DENSE: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen2_5_vl_text": qwen2_5_vl,
    "qwen3": qwen3,
    "qwen3_vl_text": qwen3_vl,
    "phi3": phi3,
    "smollm3": smollm3,
    "olmo2": olmo2,
    "glm4": glm4,
    "glm4v_text": glm4v,
    "granite": granite,
    "granite_swa": granite_swa,
    "cohere": cohere,
    "cohere2": cohere2,
    "ernie4_5": ernie4_5,
    "exaone4": exaone4,
    "helium": helium,
    "olmo3": olmo3,
    "seed_oss": seed_oss,
    "hunyuan_v1_dense": hunyuan,
    "stablelm": stablelm,
}
