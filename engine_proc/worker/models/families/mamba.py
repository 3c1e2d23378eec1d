"""The families of decoders with layers of Mamba and Mamba-2."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from headrace.engine_proc.worker.models.families.dense import (
    FULL,
    biases,
    decoder,
    granite,
    rope,
    split_head_dim,
)
from headrace.engine_proc.worker.models.families.mixtures import (
    ALIAS,
    grouped,
    mixture,
    whole,
    with_mixture,
)
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
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
    num_layers = fields.integer("num_hidden_layers")
    if not isinstance(attends, list) or not set(range(num_layers)).intersection(attends):
        raise fields.wrong("attn_layer_indices", "a list of layers: a model has one that attends")
    mamba2 = mamba2_of(fields, expanded(fields))
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
    """Return what each layer mixes with. Models without attention have no pages to be served on."""
    for name in ("layer_types", "layers_block_type"):
        types = fields.one_per_layer(name, num_layers)
        if types is not None:
            kinds = [KINDS.get(kind) for kind in types]
            if None in kinds or ATTENTION not in kinds:
                raise fields.wrong(name, f"a list of {MAMBA!r} and {ATTENTION!r}, with the latter")
            return [KINDS[kind] for kind in types]
    raise fields.wrong("layer_types", f"a list of {num_layers}: a model has layers that attend")


# Published fields of Nemotron-H: of training, kernels and layers that predict further tokens, and
# sizes again. `time_step_min` bounds steps in transformers' prompts alone, and nowhere else.
NEMOTRON_FIELDS = (
    "chunk_size",
    "expand",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "n_shared_experts",
    "num_logits_to_keep",
    "num_nextn_predict_layers",
    "num_query_groups",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "rms_norm_eps",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
    "use_mamba_kernels",
)
MIXTURE_FIELDS = (  # of configs whose layers have no experts
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "n_group",
    "n_routed_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "topk_group",
)
MLP, MOE = "mlp", "moe"
PATTERN = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}


def nemotron_h(fields: ConfigFields) -> DecoderSpec:
    """A layer is Mamba-2, attention without RoPE, an MLP or a mixture. MLPs have no gates."""
    for name in NEMOTRON_FIELDS:
        fields.get(name, None)
    for name in ("attention_bias", "moe_latent_size"):
        if fields.get(name, None):
            raise fields.wrong(name, "absent")
    types = nemotron_kinds(fields)
    fields.values = {**fields.values, "num_hidden_layers": len(types)}
    made = {MAMBA: LayerSpec(mixer=nemotron_mamba2(fields), has_mlp=False)}
    made[ATTENTION] = LayerSpec(rope=None, has_mlp=False)
    made[MLP] = LayerSpec(has_mixer=False)
    spec = decoder(
        fields,
        act="mlp_hidden_act",
        eps="layer_norm_epsilon",
        head_dim=fields.integer("attention_head_dim", 128),
        layers=tuple(made.get(kind, made[MLP]) for kind in types),
        gated_mlp=False,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    if MOE not in types:
        for name in MIXTURE_FIELDS:
            fields.get(name, None)
        return spec
    own = replace(
        grouped(fields, default_shared=1, default_normalized=True),
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size"),
        shared_bias=spec.mlp_bias,
    )
    return with_mixture(spec, own, lambda i: types[i] == MOE)


def nemotron_kinds(fields: ConfigFields) -> list[str]:
    """Return what each layer is: `layers_block_type`, or the letters that older configs have."""
    pattern = fields.text("hybrid_override_pattern", "")
    for name in ("layers_block_type", "layer_types"):
        types = fields.get(name, None)
        if types is not None:
            kinds, attention = KINDS | {MLP: MLP, MOE: MOE}, {FULL, ATTENTION}
            if (
                not isinstance(types, list)
                or not set(types) <= kinds.keys()
                or not attention & set(types)
            ):
                raise fields.wrong(name, f"a list of {', '.join(map(repr, kinds))}, with {FULL!r}")
            return [kinds[kind] for kind in types]
    if "*" not in pattern or not set(pattern) <= PATTERN.keys():
        raise fields.wrong("hybrid_override_pattern", f"letters of {''.join(PATTERN)}, with a *")
    return [PATTERN[letter] for letter in pattern]


def nemotron_mamba2(fields: ConfigFields) -> Mamba2Spec:
    """Lower Mamba-2 under the names that this family has."""
    fields.choice("mamba_hidden_act", {"silu": None}, "silu")
    num_heads, head_dim = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
    bias = fields.flag("use_bias", False)
    names = {
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": fields.integer("n_groups", 8),
        "mamba_d_state": fields.integer("ssm_state_size", 128),
        "mamba_d_conv": fields.integer("conv_kernel", 4),
        "mamba_conv_bias": fields.flag("use_conv_bias", True),
        "mamba_proj_bias": False,
    }
    fields.values = {**fields.values, **names}
    return mamba2_of(fields, num_heads * head_dim, input_bias=bias, output_bias=bias)


# Published fields of Falcon-H1 that transformers does not read.
FALCON_FIELDS = (
    "attn_layer_indices",
    "mamba_use_mlp",
    "mlp_expansion_factor",
    "time_step_floor",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
)


def falcon_h1(fields: ConfigFields) -> DecoderSpec:
    """Every layer has attention beside Mamba-2. Multipliers are all over the model."""
    for name in FALCON_FIELDS:
        fields.get(name, None)
    inner_size = fields.integer("mamba_d_ssm", expanded(fields))
    ssm_in, *parts = (
        fields.number("ssm_in_multiplier", 1.0),
        *factors(fields, "ssm_multipliers", 5),
    )
    attention_in = fields.number("attention_in_multiplier", 1.0)
    bias = biases(fields)
    for name, factor in (("mamba_proj_bias", ssm_in), ("attention_bias", attention_in)):
        if fields.flag(name, False) and factor != 1:
            raise fields.wrong(name, "false, beside a multiplier of what is projected")
    num_groups = fields.integer("mamba_n_groups", 1)
    z, x, b, c, dt = parts
    mamba2 = mamba2_of(
        fields,
        inner_size,
        output_bias=fields.flag("projectors_bias", False),
        norm_size=inner_size // num_groups if fields.flag("mamba_rms_norm", False) else 0,
        norm_before_gate=fields.flag("mamba_norm_before_gate", True),
        multipliers=(z * ssm_in, x * ssm_in, b * ssm_in, c * ssm_in, dt * ssm_in),
    )
    layer = LayerSpec(
        mixer=mamba2,
        attention_beside=True,
        mixer_multiplier=fields.number("ssm_out_multiplier", 1.0),
        attention_multiplier=fields.number("attention_out_multiplier", 1.0) * attention_in,
    )
    gate, down = factors(fields, "mlp_multipliers", 2)
    spec = decoder(
        fields,
        layers=(layer,) * fields.integer("num_hidden_layers"),
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logit_multiplier=fields.number("lm_head_multiplier", 1.0),
        gate_multiplier=gate,
        mlp_multiplier=down,
        **bias,
    )
    scale = spec.attention_scale * attention_in**2 * fields.number("key_multiplier", 1.0)
    return replace(spec, attention_scale=scale)


def factors(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """Return a list of numbers; absent, they are 1."""
    values = fields.get(name, [1.0] * count)
    if not isinstance(values, list) or len(values) != count:
        raise fields.wrong(name, f"a list of {count} numbers")
    one = ConfigFields({str(i): value for i, value in enumerate(values)}, fields.owner)
    return tuple(one.number(str(i)) for i in range(count))


# Published fields of Jamba: of kernels, and of layers by name where their periods say the same.
JAMBA_FIELDS = (
    "layer_types",
    "layers_block_type",
    "layers_num_experts",
    "mamba_inner_layernorms",
    "use_associative_scan",
    "use_mamba_kernels",
    "use_mambapy",
)


def jamba(fields: ConfigFields) -> DecoderSpec:
    """Some layers attend, without RoPE, the others are Mamba; some have experts."""
    for name in (*JAMBA_FIELDS, *INERT_FIELDS):
        fields.get(name, None)
    num_layers = fields.integer("num_hidden_layers")
    attends = in_period(fields, "attn", 8, 4)
    if not any(attends(i) for i in range(num_layers)):
        raise fields.wrong(
            "attn_layer_offset", "one that is a layer's: a model has one that attends"
        )
    rank = fields.get("mamba_dt_rank", "auto")
    bias = fields.flag("mamba_proj_bias", False)
    mamba = MambaSpec(
        channels=expanded(fields),
        state_size=fields.integer("mamba_d_state", 16),
        rank=-(-fields.integer("hidden_size") // 16)
        if rank == "auto"
        else fields.integer("mamba_dt_rank"),
        kernel_size=fields.integer("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=bias,
        norms=True,
    )
    attention, mixer = LayerSpec(rope=None), LayerSpec(mixer=mamba)
    spec = decoder(
        fields,
        layers=tuple(attention if attends(i) else mixer for i in range(num_layers)),
    )
    has_experts = in_period(fields, "expert", 2, 1)
    if whole(fields, "num_experts", 16) == 1:
        fields.get("num_experts_per_tok", None)
        return spec
    own = mixture(fields, size="intermediate_size", normalized=False)
    return with_mixture(spec, own, has_experts)


def in_period(fields: ConfigFields, kind: str, period: int, offset: int) -> Callable[[int], bool]:
    """Return which layers are of a kind: one in so many."""
    period = fields.integer(f"{kind}_layer_period", period)
    offset = whole(fields, f"{kind}_layer_offset", offset)
    if offset >= period:
        raise fields.wrong(f"{kind}_layer_offset", f"less than {period}")
    return lambda i: i % period == offset


MAMBAS: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granitemoehybrid,
    "jamba": jamba,
    "nemotron_h": nemotron_h,
}
