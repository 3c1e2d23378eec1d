"""The families of Gemma, from the first to Gemma 4."""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from headrace.engine_proc.worker.models.families.dense import (
    FULL,
    SLIDING,
    biases,
    decoder,
    layer_types,
    ropes_by_type,
    sliding,
    window,
)
from headrace.engine_proc.worker.models.families.mixtures import mixture, whole, with_mixture
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    Activation,
    AltUpSpec,
    DecoderSpec,
    EncoderSpec,
    LayerSpec,
    Norm,
    NormPlacement,
    PerLayerSpec,
    QKNorm,
    RopeTable,
)
from headrace.engine_proc.worker.models.specs.rope import rope_table


def gemma(fields: ConfigFields) -> DecoderSpec:
    """`hidden_act: gelu` has always meant the tanh approximation here."""
    fields.choice("hidden_activation", {"gelu_pytorch_tanh": None}, "gelu_pytorch_tanh")
    fields.choice("hidden_act", {"gelu": None, "gelu_pytorch_tanh": None})
    return decoder(fields, head_dim=256, **gemma_common(fields), activation=Activation.GELU_TANH)


def gemma2(fields: ConfigFields) -> DecoderSpec:
    fields.get("sliding_window_size", None)  # the original releases say it twice
    return decoder(
        fields,
        act="hidden_activation",
        layers=sliding(fields, lambda i: i % 2 == 0),
        head_dim=256,
        **gemma_common(fields),
        placement=NormPlacement.PRE_POST,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def gemma3(fields: ConfigFields) -> DecoderSpec:
    """Sliding layers have a RoPE of their own. `attn_logit_softcapping` is not applied, so refused.

    Older configs give one layer in `sliding_window_pattern` the full window and global RoPE.
    EmbeddingGemma is an encoder, whose `sliding_window` counts the tokens of both sides.
    """
    pattern = fields.integer("sliding_window_pattern", 6)
    slides = layer_types(fields, lambda i: (i + 1) % pattern != 0)
    size = window(fields)
    is_encoder = fields.flag("use_bidirectional_attention", False)
    if is_encoder and size is not None:
        size = size // 2 + 1
    return decoder(
        fields,
        act="hidden_activation",
        layers=tuple(
            LayerSpec(rope=1, window=size) if slide else LayerSpec(rope=0) for slide in slides
        ),
        ropes=gemma3_ropes(fields),
        encoder=EncoderSpec() if is_encoder else None,
        head_dim=256,
        **gemma_common(fields),
        placement=NormPlacement.PRE_POST,
        qk_norm=QKNorm.PER_HEAD,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def gemma3_ropes(fields: ConfigFields) -> tuple[RopeTable, ...]:
    """Lower the RoPE of full layers, and that of sliding ones."""
    thetas = (fields.number("rope_theta", 1e6), fields.number("rope_local_base_freq", 1e4))
    return ropes_by_type(fields, head_dim=256, thetas=thetas)


def gemma_common(fields: ConfigFields) -> dict[str, Any]:
    """Lower what all Gemmas share. Those with `hidden_activation` ignore `hidden_act`."""
    fields.get("hidden_act", None)
    return {
        "tied_head": fields.flag("tie_word_embeddings", True),
        "num_kv_heads": fields.integer("num_key_value_heads"),
        "norm": Norm.RMS_ONE_PLUS,
        "embedding_multiplier": fields.integer("hidden_size") ** 0.5,
        **biases(fields),
    }


def gemma4(fields: ConfigFields) -> DecoderSpec:
    """Full layers have heads of another width, and perhaps other KV heads."""
    if fields.get("use_bidirectional_attention", None) == "all":
        raise fields.wrong("use_bidirectional_attention", "'vision', or absent")
    layers = gemma4_layers(fields)
    size = fields.integer("intermediate_size")
    spec = decoder(
        fields,
        act="hidden_activation",
        head_dim=256,
        layers=layers,
        ropes=gemma4_ropes(fields, max(layer.head_dim or 0 for layer in layers)),
        **gemma_common(fields) | {"norm": Norm.RMS},
        **newer_gemma(fields),
        layer_scale=True,
    )
    for name in ("vocab_size_per_layer_input", "num_experts", "top_k_experts"):
        fields.get(name, None)
    if not fields.flag("enable_moe_block", False):
        fields.get("moe_intermediate_size", None)
        return spec
    own = mixture(
        fields,
        chosen="top_k_experts",
        shared_intermediate_size=size,
        own_norms=True,
        expert_scales=True,
    )
    return with_mixture(spec, own)


def newer_gemma(fields: ConfigFields) -> dict[str, Any]:
    """Lower what Gemma 3n and 4 share. Scores are not scaled: queries and keys have norms."""
    size = whole(fields, "hidden_size_per_layer_input", 256)
    vocab_size = fields.integer("vocab_size_per_layer_input", 262_144)
    return {
        "placement": NormPlacement.PRE_POST,
        "qk_norm": QKNorm.PER_HEAD,
        "value_norm": True,
        "attention_scale": 1.0,
        "logit_softcap": fields.optional_number("final_logit_softcapping"),
        "per_layer": PerLayerSpec(size=size, vocab_size=vocab_size) if size else None,
    }


def gemma4_layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Lower the layers: `per_layer_config` has heads that differ, older configs have full ones'."""
    slides = layer_types(fields, lambda i: (i + 1) % 6 != 0)
    slides[-1] = False  # whatever the config says
    global_heads = {
        "head_dim": fields.get("global_head_dim", 512),
        "num_key_value_heads": fields.get("num_global_key_value_heads", None),
    }
    given = fields.get("per_layer_config", None)
    own = {str(i): global_heads for i, slide in enumerate(slides) if not slide}
    if given is not None:
        own = dict(fields.table("per_layer_config"))
    shared_values = fields.flag("attention_k_eq_v", False)
    is_wide = fields.flag("use_double_wide_mlp", False)
    first = first_shared(fields, len(slides))
    size, inner = window(fields), fields.integer("intermediate_size")
    layers = []
    for i, slide in enumerate(slides):
        heads = ConfigFields(own.get(str(i)) or {}, f"layer {i} of {fields.owner}")
        num_kv_heads = heads.get("num_key_value_heads", None)
        has_own = num_kv_heads is not None and (given is not None or shared_values)
        layer = LayerSpec(
            rope=1 if slide else 0,
            window=size if slide else None,
            is_causal=not slide,
            head_dim=heads.integer("head_dim", fields.integer("head_dim", 256)),
            num_kv_heads=heads.integer("num_key_value_heads") if has_own else None,
            has_values=slide or not shared_values,
            keys_of=keys_of(fields, slides, i, first),
            intermediate_size=2 * inner if is_wide and i >= first else None,
        )
        heads.refuse_unread()
        layers.append(layer)
    return tuple(layers)


def first_shared(fields: ConfigFields, num_layers: int, default: int = 0) -> int:
    """Lower `num_kv_shared_layers`: the first of the last layers, which read others' keys."""
    count = whole(fields, "num_kv_shared_layers", default)
    if count >= num_layers:
        raise fields.wrong("num_kv_shared_layers", f"less than {num_layers}")
    return num_layers - count


def keys_of(fields: ConfigFields, slides: list[bool], index: int, first: int) -> int | None:
    """Return the layer whose keys one reads: the last of its kind that has some."""
    if index < first:
        return None
    for other in reversed(range(first)):
        if slides[other] == slides[index]:
            return other
    raise fields.wrong("num_kv_shared_layers", f"a number that leaves one like layer {index}")


def gemma4_ropes(fields: ConfigFields, full_dim: int) -> tuple[RopeTable, ...]:
    """Lower the RoPE of full layers, a part of whose heads rotates, and that of sliding ones."""
    nested = ConfigFields(fields.table("rope_parameters"), f"the RoPE of {fields.owner}")
    kinds: tuple[tuple[str, int, float, dict[str, Any]], ...] = (
        (FULL, full_dim, 1e6, {"rope_type": "proportional", "partial_rotary_factor": 0.25}),
        (SLIDING, fields.integer("head_dim", 256), 1e4, {}),
    )
    tables = tuple(
        rope_table(
            nested.table(kind) or default,
            owner=fields.owner,
            head_dim=head_dim,
            max_position=fields.integer("max_position_embeddings"),
            theta=theta,
            partial=1.0,
        )
        for kind, head_dim, theta, default in kinds
    )
    nested.refuse_unread()
    return tables


def gemma3n(fields: ConfigFields) -> DecoderSpec:
    """Several residuals, sparse gates, and layers that read the keys and values of others."""
    for name in ("altup_coef_clip", "default_theta"):  # of training; read with RoPE
        fields.get(name, None)
    if fields.get("altup_active_idx", 0) != 0:
        raise fields.wrong("altup_active_idx", "0")
    num_layers = fields.integer("num_hidden_layers")
    sizes = fields.get("intermediate_size", 16_384)
    sizes = list(sizes) if isinstance(sizes, list) else [sizes] * num_layers
    own = ConfigFields({str(i): size for i, size in enumerate(sizes)}, "'intermediate_size'")
    cuts = gate_cuts(fields, num_layers)
    slides = layer_types(fields, lambda i: (i + 1) % 5 != 0)
    first, size = first_shared(fields, num_layers, 15), window(fields)
    layers = tuple(
        LayerSpec(
            rope=1 if slide else 0,
            window=size if slide else None,
            keys_of=keys_of(fields, slides, i, first),
            intermediate_size=own.integer(str(i)),
            gate_cut=cuts[i],
        )
        for i, slide in enumerate(slides)
    )
    fields.values = {**fields.values, "intermediate_size": own.integer("0")}
    common = newer_gemma(fields)
    if common["per_layer"] is None:
        raise fields.wrong("hidden_size_per_layer_input", "a positive integer")
    return decoder(
        fields,
        act="hidden_activation",
        head_dim=256,
        layers=layers,
        ropes=gemma3_ropes(fields),
        **gemma_common(fields) | {"norm": Norm.RMS},
        **common | {"logit_softcap": fields.number("final_logit_softcapping", 30.0)},
        altup=AltUpSpec(
            num_inputs=fields.integer("altup_num_inputs", 4),
            rank=fields.integer("laurel_rank", 64),
            scales_output=fields.flag("altup_correct_scale", True),
        ),
    )


def gate_cuts(fields: ConfigFields, num_layers: int) -> list[float | None]:
    """Lower `activation_sparsity_pattern`: the share of an MLP's gates that are cut, by layer."""
    shares = fields.get("activation_sparsity_pattern", None)
    if shares is None:
        shares = [0.95 if num_layers > 10 and i < 10 else 0.0 for i in range(num_layers)]
    shares = list(shares) if isinstance(shares, list) else [shares] * num_layers
    own = ConfigFields({str(i): s for i, s in enumerate(shares)}, "'activation_sparsity_pattern'")
    numbers = [own.number(str(i)) for i in range(num_layers)]
    if not all(0 <= share < 1 for share in numbers):
        raise fields.wrong("activation_sparsity_pattern", "shares from 0 to below 1")
    return [NormalDist().inv_cdf(share) if share else None for share in numbers]


GEMMAS: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
}
