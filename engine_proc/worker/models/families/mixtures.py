"""The families of mixtures of experts: functions from a config's fields to a `DecoderSpec`.

Routing is that of transformers. All divisors of weights are bounded from below by 1e-20.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.engine_proc.worker.models.families.dense import (
    FULL,
    GLM_SECTIONS,
    biases,
    decoder,
    granite,
    granite_swa,
    hunyuan,
    layer_types,
    mrope,
    optional_window,
    qwen3_vl,
    rope,
    rope_params,
    sliding,
    split_head_dim,
    window,
)
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    LayerSpec,
    MixtureSpec,
    Norm,
    NormPlacement,
    QKNorm,
    QueryTemperature,
    RopeTable,
    RouterScore,
)
from headrace.engine_proc.worker.models.specs.rope import rope_table
from headrace.model import longrope

MAX_EXPERTS = 1 << 12  # a config that says more is corrupt
OWN, ALIAS = "num_experts", "num_local_experts"  # transformers reads either in most families


def mixture(
    fields: ConfigFields,
    *,
    experts: str = OWN,
    chosen: str = "num_experts_per_tok",
    size: str = "moe_intermediate_size",
    **differences: Any,
) -> MixtureSpec:
    """Lower what all mixtures have.

    Args:
        experts, chosen, size: the fields that name the counts and the experts' intermediate size.
        differences: fields of the spec that are not the default.
    """
    if experts == OWN and fields.get(OWN, None) is None:
        experts = ALIAS
    num_experts = fields.integer(experts)
    if num_experts > MAX_EXPERTS:
        raise fields.wrong(experts, f"at most {MAX_EXPERTS}")
    per_token = fields.integer(chosen)
    if per_token > num_experts:
        raise fields.wrong(chosen, f"at most the number of experts, {num_experts}")
    return MixtureSpec(
        num_experts=num_experts,
        experts_per_token=per_token,
        intermediate_size=fields.integer(size),
        **differences,
    )


def with_mixture(
    spec: DecoderSpec, own: MixtureSpec, is_sparse: Callable[[int], bool] = lambda layer: True
) -> DecoderSpec:
    """Return the decoder with a mixture in some layers; the others keep their MLP."""
    layers = tuple(
        replace(layer, mixture=own) if is_sparse(i) else layer
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)


def whole(fields: ConfigFields, name: str, default: int) -> int:
    """Return a count that may be 0."""
    value = fields.get(name, default)
    return 0 if value == 0 and not isinstance(value, bool) else fields.integer(name, default)


def mixtral(fields: ConfigFields) -> DecoderSpec:
    fields.get("router_jitter_noise", None)  # of training
    layers = (LayerSpec(window=window(fields)),) * fields.integer("num_hidden_layers")
    return with_mixture(
        decoder(fields, layers=layers, rope_theta=1e6),
        mixture(fields, experts=ALIAS, size="intermediate_size"),
    )


def qwen_sparse(fields: ConfigFields) -> Callable[[int], bool]:
    """Lower which layers are mixtures: each `decoder_sparse_step`th, but not those listed."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise fields.wrong("mlp_only_layers", "a list of layers")
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def qwen_window(fields: ConfigFields) -> int | None:
    """Lower `sliding_window`, which is 0 in configs that do not use it."""
    if fields.get("sliding_window", None) == 0 and not fields.flag("use_sliding_window", False):
        return None
    return optional_window(fields)


def qwen2_moe(fields: ConfigFields) -> DecoderSpec:
    """With `use_sliding_window`, every other layer below `max_window_layers` slides."""
    first_full = whole(fields, "max_window_layers", 28)
    size = qwen_window(fields)
    slides = layer_types(fields, lambda i: size is not None and i % 2 == 0 and i < first_full)
    spec = decoder(
        fields,
        layers=tuple(LayerSpec(window=size if slide else None) for slide in slides),
        qkv_bias=fields.flag("qkv_bias", True),
    )
    own = mixture(
        fields,
        normalized=fields.flag("norm_topk_prob", False),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return with_mixture(spec, own, qwen_sparse(fields))


def qwen3_moe(fields: ConfigFields) -> DecoderSpec:
    """With `use_sliding_window`, all layers slide."""
    fields.get("max_window_layers", None)  # published, but not read by transformers
    layers = (LayerSpec(window=qwen_window(fields)),) * fields.integer("num_hidden_layers")
    spec = decoder(fields, layers=layers, qk_norm=QKNorm.PER_HEAD, **biases(fields))
    own = mixture(fields, normalized=fields.flag("norm_topk_prob", False))
    return with_mixture(spec, own, qwen_sparse(fields))


def qwen3_vl_moe(fields: ConfigFields) -> DecoderSpec:
    """Qwen3-VL with experts, whose weights are normalized whatever the config says."""
    fields.get("norm_topk_prob", None)
    spec = qwen3_vl(fields, split_head_dim(fields))
    return with_mixture(spec, mixture(fields), qwen_sparse(fields))


def olmoe(fields: ConfigFields) -> DecoderSpec:
    own = mixture(fields, size="intermediate_size", normalized=fields.flag("norm_topk_prob", False))
    spec = decoder(fields, qk_norm=QKNorm.FULL, qkv_clip=qkv_clip(fields), **biases(fields))
    return with_mixture(spec, own)


def qkv_clip(fields: ConfigFields) -> float | None:
    """Lower `clip_qkv`, the largest query, key and value."""
    return None if fields.get("clip_qkv", None) is None else fields.positive("clip_qkv")


def flex_olmo(fields: ConfigFields) -> DecoderSpec:
    """OLMoE with norms behind attention and MLP."""
    return replace(olmoe(fields), placement=NormPlacement.POST)


def granitemoe(fields: ConfigFields) -> DecoderSpec:
    """The variant with windows and sinks has those of the dense family."""
    has_windows = fields.text("model_type") == "granitemoe_swa"
    return with_mixture(
        granite_swa(fields) if has_windows else granite(fields),
        mixture(
            fields,
            experts=ALIAS,
            size="intermediate_size",
            shared_intermediate_size=whole(fields, "shared_intermediate_size", 0),
        ),
    )


GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(fields: ConfigFields) -> DecoderSpec:
    """`hidden_act` says nothing: the experts' activation is built in."""
    for name in ("initial_context_length", "experts_per_token"):  # published; they repeat others
        fields.get(name, None)
    head_dim = fields.integer("head_dim", 64)
    table = rope_table(
        rope_params(fields) or GPT_OSS_YARN,
        owner=fields.owner,
        head_dim=head_dim,
        max_position=fields.integer("max_position_embeddings"),
        theta=fields.number("rope_theta", 150_000.0),
    )
    bias = fields.flag("attention_bias", True)
    spec = decoder(
        fields,
        head_dim=head_dim,
        layers=sliding(fields, lambda i: i % 2 == 0),
        ropes=(table,),
        qkv_bias=bias,
        output_bias=bias,
        attention_sinks=True,
    )
    own = mixture(
        fields,
        experts=ALIAS,
        size="intermediate_size",
        router_bias=True,
        expert_bias=True,
        clamp=fields.positive("swiglu_limit", 7.0),
        swish_beta=fields.number("swiglu_alpha", 1.702),
    )
    return with_mixture(spec, own)


def ernie4_5_moe(fields: ConfigFields) -> DecoderSpec:
    """Every `moe_layer_interval`th layer between two is a mixture. Experts have no biases."""
    for name in ("moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers"):
        fields.get(name, None)  # published, but not read by transformers
    head_dim = fields.integer("head_dim", split_head_dim(fields))
    bias = fields.flag("use_bias", False)
    spec = decoder(
        fields,
        ropes=(rope(fields, head_dim, 500_000.0, interleaved=True),),
        tied_head=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        head_bias=bias,
    )
    size = fields.integer("moe_intermediate_size")
    own = mixture(
        fields,
        experts="moe_num_experts",
        chosen="moe_k",
        selection_bias=True,
        weight_sum_min=fields.number("moe_norm_min", 1e-12),
        shared_intermediate_size=size * whole(fields, "moe_num_shared_experts", 2),
        shared_bias=bias,
    )
    interval = fields.integer("moe_layer_interval", 1)
    first, last = whole(fields, "moe_layer_start_index", 1), fields.get("moe_layer_end_index", -1)
    if not isinstance(last, int):
        raise fields.wrong("moe_layer_end_index", "the index of a layer, or -1")
    end = len(spec.layers) if last == -1 else last + 1
    return with_mixture(spec, own, lambda i: first <= i < end and (i + 1) % interval == 0)


def grouped(fields: ConfigFields, default_shared: int, default_normalized: bool) -> MixtureSpec:
    """Lower DeepSeek-V3's routing: experts of the best groups, by sigmoid and a learned term."""
    size = fields.integer("moe_intermediate_size")
    own = mixture(
        fields,
        experts="n_routed_experts",
        score=RouterScore.SIGMOID,
        normalized=fields.flag("norm_topk_prob", default_normalized),
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        selection_bias=True,
        num_groups=fields.integer("n_group", 1),
        groups_per_token=fields.integer("topk_group", 1),
        shared_intermediate_size=size * whole(fields, "n_shared_experts", default_shared),
    )
    return check_groups(fields, own)


def check_groups(fields: ConfigFields, own: MixtureSpec) -> MixtureSpec:
    """Return a mixture whose groups can be chosen from."""
    least = own.group_score_experts
    if own.num_experts % own.num_groups or own.num_experts < least * own.num_groups:
        raise fields.wrong(
            "n_group", f"groups of {least} or more that {own.num_experts} experts make"
        )
    reach = own.num_experts // own.num_groups * own.groups_per_token
    if own.groups_per_token > own.num_groups or own.experts_per_token > reach:
        raise fields.wrong(
            "topk_group",
            f"as many of {own.num_groups} groups as hold {own.experts_per_token} experts",
        )
    return own


def glm4_moe(fields: ConfigFields) -> DecoderSpec:
    """A part of each head rotates. Layers that predict further tokens are left out."""
    head_dim = fields.integer("head_dim", split_head_dim(fields))
    partial = fields.number("partial_rotary_factor", 0.5)
    return glm4_mixture(fields, rope(fields, head_dim, 10_000.0, partial=partial))


def glm4v_moe(fields: ConfigFields) -> DecoderSpec:
    """GLM-4 MoE with M-RoPE."""
    table = mrope(
        fields,
        head_dim=fields.integer("head_dim", split_head_dim(fields)),
        theta=10_000.0,
        sections=GLM_SECTIONS,
        partial=fields.number("partial_rotary_factor", 0.5),
    )
    return glm4_mixture(fields, table)


def glm4_mixture(fields: ConfigFields, table: RopeTable) -> DecoderSpec:
    """Lower what GLM-4's mixtures share."""
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        fields.get(name, None)
    spec = decoder(
        fields,
        ropes=(table,),
        qk_norm=QKNorm.PER_HEAD if fields.flag("use_qk_norm", False) else QKNorm.NONE,
        qkv_bias=fields.flag("attention_bias", False),
    )
    first = whole(fields, "first_k_dense_replace", 1)
    own = grouped(fields, default_shared=1, default_normalized=True)
    return with_mixture(spec, own, lambda i: i >= first)


# Published fields of DeepSeek's routing that transformers does not read in its relatives.
DEEPSEEK_FIELDS = (
    "aux_loss_alpha",
    "ep_size",
    "moe_layer_freq",
    "scoring_func",
    "seq_aux",
    "topk_method",
    "use_sliding_window",
)


def dots1(fields: ConfigFields) -> DecoderSpec:
    """Layers from `max_window_layers` on slide, if there is a window."""
    for name in DEEPSEEK_FIELDS:
        fields.get(name, None)
    size, first_slides = window(fields), fields.integer("max_window_layers", 62)
    slides = layer_types(fields, lambda i: size is not None and i >= first_slides)
    spec = decoder(
        fields,
        layers=tuple(LayerSpec(window=size if slide else None) for slide in slides),
        qk_norm=QKNorm.PER_HEAD,
        **biases(fields),
    )
    first = whole(fields, "first_k_dense_replace", 0)
    own = grouped(fields, default_shared=0, default_normalized=False)
    return with_mixture(spec, own, lambda i: i >= first)


def hunyuan_moe(fields: ConfigFields) -> DecoderSpec:
    """A shared MLP as large as an expert; `moe_topk` is one number for all layers."""
    spec = hunyuan(fields)
    if isinstance(fields.get("moe_topk", 1), list):
        counts = fields.one_per_layer("moe_topk", len(spec.layers)) or []
        if counts != counts[:1] * len(counts):
            raise fields.wrong("moe_topk", "the same for all layers")
        fields.values = {**fields.values, "moe_topk": counts[0]}
    size = fields.integer("intermediate_size")
    own = mixture(
        fields, chosen="moe_topk", size="intermediate_size", shared_intermediate_size=size
    )
    return with_mixture(spec, own)


def phimoe(fields: ConfigFields) -> DecoderSpec:
    """The sparse mixer chooses two experts, whatever the config says."""
    for name in ("input_jitter_noise", longrope.LENGTH):  # of training; read with LongRoPE
        fields.get(name, None)
    spec = decoder(
        fields,
        layers=(LayerSpec(window=window(fields)),) * fields.integer("num_hidden_layers"),
        rope_theta=1e6,
        norm=Norm.LAYER,
        norm_bias=True,
        head_bias=fields.flag("lm_head_bias", False),
        **biases(fields),
    )
    own = mixture(
        fields,
        experts=ALIAS,
        size="intermediate_size",
        score=RouterScore.SPARSEMIXER,
        normalized=False,
        sparsemixer_eps=fields.number("router_jitter_noise", 0.01),
    )
    if own.experts_per_token != 2:
        raise fields.wrong("num_experts_per_tok", "2, as many as the sparse mixer chooses")
    return with_mixture(spec, own)


# Published fields of MiniMax-M2 that transformers does not read: training, or what is built in.
MINIMAX_FIELDS = (
    "attn_type_list",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_beta",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "qk_norm_type",
    "router_jitter_noise",
    "scoring_func",
    "shared_moe_mode",
    "sliding_window",
    "use_mtp",
    "use_qk_norm",
    "use_routing_bias",
)


def minimax_m2(fields: ConfigFields) -> DecoderSpec:
    """`rotary_dim`, or else `partial_rotary_factor`, says how much of a head rotates."""
    for name in MINIMAX_FIELDS:
        fields.get(name, None)
    head_dim = fields.integer("head_dim", 128)
    share = fields.integer("rotary_dim", head_dim) / head_dim
    partial = fields.number("partial_rotary_factor", share)
    spec = decoder(
        fields,
        head_dim=head_dim,
        ropes=(rope(fields, head_dim, 5e6, partial=partial),),
        qk_norm=QKNorm.FULL,
    )
    own = mixture(
        fields,
        experts=ALIAS,
        size="intermediate_size",
        score=RouterScore.SIGMOID,
        selection_bias=True,
    )
    return with_mixture(spec, own)


CHUNKED = "chunked_attention"


def llama4(fields: ConfigFields) -> DecoderSpec:
    """Most layers rotate, and see their chunk of the text; the others see all of it."""
    fields.get("router_jitter_noise", None)  # of training
    spec = decoder(
        fields,
        head_dim=128,
        layers=llama4_layers(fields),
        ropes=(rope(fields, fields.integer("head_dim", 128), 500_000.0, interleaved=True),),
        intermediate_size=fields.integer("intermediate_size_mlp"),
        qk_norm=(QKNorm.UNWEIGHTED_AFTER_ROPE if fields.flag("use_qk_norm", True) else QKNorm.NONE),
        **biases(fields),
    )
    step = fields.integer("interleave_moe_layer_step", 1)
    sparse = fields.get("moe_layers", None)
    if not isinstance(sparse, list | None):
        raise fields.wrong("moe_layers", "a list of layers")
    own = mixture(
        fields,
        experts=ALIAS,
        size="intermediate_size",
        score=RouterScore.SIGMOID,
        normalized=False,
        weighs_inputs=True,
        shared_intermediate_size=fields.integer("intermediate_size"),
    )
    return with_mixture(spec, own, lambda i: (i + 1) % step == 0 if sparse is None else i in sparse)


def llama4_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """`no_rope_layers` marks those without RoPE by 0; `layer_types` may say which see chunks."""
    num_layers = fields.integer("num_hidden_layers")
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.one_per_layer("no_rope_layers", num_layers)
    if not rotated:
        rotated = [(i + 1) % interval != 0 for i in range(num_layers)]
    types = fields.one_per_layer("layer_types", num_layers)
    if types is None:
        types = [CHUNKED if has_rope else FULL for has_rope in rotated]
    if not set(types) <= {CHUNKED, FULL}:
        raise fields.wrong("layer_types", f"a list of {CHUNKED!r} and {FULL!r}")
    size = fields.integer("attention_chunk_size", 8192) if CHUNKED in types else None
    tuned = QueryTemperature(
        scale=fields.number("attn_scale", 0.1), tokens=fields.integer("floor_scale", 8192)
    )
    is_tuned = fields.flag("attn_temperature_tuning", True)
    return tuple(
        LayerSpec(
            rope=0 if has_rope else None,
            window=size if kind == CHUNKED else None,
            is_chunked=kind == CHUNKED,
            temperature=tuned if is_tuned and not has_rope else None,
        )
        for has_rope, kind in zip(rotated, types, strict=True)
    )


MIXTURES: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "llama4_text": llama4,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl_moe_text": qwen3_vl_moe,
    "olmoe": olmoe,
    "granitemoe": granitemoe,
    "granitemoe_swa": granitemoe,
    "granitemoeshared": granitemoe,
    "gpt_oss": gpt_oss,
    "ernie4_5_moe": ernie4_5_moe,
    "glm4_moe": glm4_moe,
    "glm4v_moe_text": glm4v_moe,
    "dots1": dots1,
    "flex_olmo": flex_olmo,
    "hunyuan_v1_moe": hunyuan_moe,
    "minimax_m2": minimax_m2,
    "phimoe": phimoe,
}
