"""The families with multi-head latent attention: DeepSeek V2 and V3, and their kin.

Sparse attention (DeepSeek V3.2, GLM-5) is dense attention up to `index_topk` tokens, and texts are
no longer than that.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.engine_proc.worker.models.families.dense import (
    FULL,
    decoder,
    rope,
    rope_params,
    split_head_dim,
)
from headrace.engine_proc.worker.models.families.hybrids import LINEAR
from headrace.engine_proc.worker.models.families.mistral import tempered_rope
from headrace.engine_proc.worker.models.families.mixtures import (
    DEEPSEEK_FIELDS,
    check_groups,
    grouped,
    mixture,
    whole,
    with_mixture,
)
from headrace.engine_proc.worker.models.specs.config_fields import ConfigFields
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    MixtureSpec,
    RouterScore,
)
from headrace.model.sparse_attention import dense_length

UNIT = 16  # numbers; no vector of the core has some of two heads


def latent_decoder(
    fields: ConfigFields, *, interleaved: bool, bias: bool | None = None, **differences: Any
) -> DecoderSpec:
    """Lower what all have: a decoder with one KV head, a latent.

    Args:
        bias: of the projections to latents and from heads; None is that the config says it.
    """
    for name in ("qk_head_dim", "head_dim"):  # they repeat others
        fields.get(name, None)
    bias = fields.flag("attention_bias", False) if bias is None else bias
    for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"):
        if fields.integer(name) % UNIT:
            raise fields.wrong(name, f"a multiple of {UNIT}, as our own modules need it")
    rank = fields.get("q_lora_rank", None)
    latent = LatentAttentionSpec(
        query_rank=None if rank is None else fields.integer("q_lora_rank"),
        rank=fields.integer("kv_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        bias=bias,
    )
    common: dict[str, Any] = {
        "layers": (LayerSpec(mixer=latent),) * fields.integer("num_hidden_layers"),
        "ropes": (rope(fields, latent.rope_dim, 10_000.0, interleaved=interleaved),),
        "num_kv_heads": 1,
        "attention_scale": latent.query_dim**-0.5 * yarn_growth(fields),
        "output_bias": bias,
    }
    return replace(decoder(fields, **common | differences), head_dim=latent.latent_dim)


def yarn_growth(fields: ConfigFields) -> float:
    """Return what YaRN multiplies scores by, beside the scale of cos and sin."""
    params = rope_params(fields)
    kind = params.get("rope_type") or params.get("type") or "default"
    scaling = ConfigFields(params, f"the RoPE of {fields.owner}")
    all_dim = scaling.number("mscale_all_dim", 0)
    if kind == "default" or not all_dim:
        return 1.0
    factor = scaling.positive("factor")
    return 1.0 if factor <= 1 else (0.1 * all_dim * math.log(factor) + 1.0) ** 2


def with_sparse(
    fields: ConfigFields, spec: DecoderSpec, own: MixtureSpec, default_first: int = 0
) -> DecoderSpec:
    """Return the decoder with a mixture in the layers that `mlp_layer_types` calls sparse.

    Without it, layers are sparse from `first_k_dense_replace` on.
    """
    first = whole(fields, "first_k_dense_replace", default_first)
    types = fields.one_per_layer("mlp_layer_types", len(spec.layers))
    if types is None:
        return with_mixture(spec, own, lambda i: i >= first)
    if not set(types) <= {"dense", "sparse"}:
        raise fields.wrong("mlp_layer_types", "a list of 'dense' and 'sparse'")
    return with_mixture(spec, own, lambda i: types[i] == "sparse")


def deepseek_v2(fields: ConfigFields) -> DecoderSpec:
    """Experts are chosen by softmax, from groups or not; their weights are not normalized."""
    for name in DEEPSEEK_FIELDS:
        fields.get(name, None)
    spec = latent_decoder(fields, interleaved=True, mlp_bias=fields.flag("mlp_bias", False))
    method = fields.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    if fields.flag("norm_topk_prob", False):
        raise fields.wrong("norm_topk_prob", "false, as transformers has it")
    size = fields.integer("moe_intermediate_size")
    num_groups, chosen = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    own = mixture(
        fields,
        experts="n_routed_experts",
        normalized=False,
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=num_groups if method else 1,
        groups_per_token=chosen if method else 1,
        group_score_experts=1,
        shared_intermediate_size=size * whole(fields, "n_shared_experts", 2),
        shared_bias=spec.mlp_bias,
    )
    return with_sparse(fields, spec, check_groups(fields, own))


def deepseek_v3(fields: ConfigFields) -> DecoderSpec:
    """Layers that predict further tokens are left out."""
    for name in (*DEEPSEEK_FIELDS, "num_nextn_predict_layers", "num_mtp_layers"):
        fields.get(name, None)
    spec = latent_decoder(fields, interleaved=fields.flag("rope_interleave", True))
    own = grouped(fields, default_shared=1, default_normalized=True)
    return with_sparse(fields, spec, own)


def glm4_moe_lite(fields: ConfigFields) -> DecoderSpec:
    """DeepSeek V3 with one dense layer, unless the config names more."""
    for name in (*DEEPSEEK_FIELDS, "num_nextn_predict_layers", "num_mtp_layers"):
        fields.get(name, None)
    spec = latent_decoder(fields, interleaved=fields.flag("rope_interleave", True))
    own = grouped(fields, default_shared=1, default_normalized=True)
    return with_sparse(fields, spec, own, default_first=1)


def mistral4(fields: ConfigFields) -> DecoderSpec:
    """Queries have Ministral 3's temperatures; experts are chosen by softmax."""
    for name in DEEPSEEK_FIELDS:
        fields.get(name, None)
    params, tuned = tempered_rope(fields)
    params.pop("partial_rotary_factor", None)  # `qk_rope_head_dim` says it
    fields.values = {**fields.values, "rope_scaling": None, "rope_parameters": params}
    spec = latent_decoder(fields, interleaved=fields.flag("rope_interleave", True))
    layers = tuple(replace(layer, temperature=tuned) for layer in spec.layers)
    own = grouped(fields, default_shared=1, default_normalized=True)
    own = replace(own, score=RouterScore.SOFTMAX, selection_bias=False)
    return with_sparse(fields, replace(spec, layers=layers), own)


def sparse_attention(fields: ConfigFields) -> DecoderSpec:
    """DeepSeek V3 with an indexer, whose weights are left out."""
    for name in (*DEEPSEEK_FIELDS, *INDEXER_FIELDS):
        fields.get(name, None)
    spec = latent_decoder(fields, interleaved=True, mlp_bias=fields.flag("mlp_bias", False))
    own = grouped(fields, default_shared=1, default_normalized=True)
    own = replace(own, shared_bias=spec.mlp_bias)
    longest = dense_length(fields.values) or spec.max_position
    spec = replace(spec, max_position=min(spec.max_position, longest))
    return with_sparse(fields, spec, own, default_first=3)


# What an indexer is, and which layers have one of their own.
INDEXER_FIELDS = (
    "index_head_dim",
    "index_n_heads",
    "index_skip_topk_offset",
    "index_topk",
    "index_topk_freq",
    "index_topk_pattern",
    "indexer_rope_interleave",
    "indexer_types",
    "layer_types",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "rope_interleave",
)


def youtu(fields: ConfigFields) -> DecoderSpec:
    """DeepSeek V3 without experts."""
    fields.get("embedding_initializer_range", None)  # of training
    return latent_decoder(
        fields,
        interleaved=fields.flag("rope_interleave", True),
        tied_head=fields.flag("tie_word_embeddings", True),
    )


def minicpm3(fields: ConfigFields) -> DecoderSpec:
    """Embeddings, sublayers and logits are scaled; halves of keys rotate."""
    num_layers, hidden = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    width = fields.integer("v_head_dim", split_head_dim(fields))
    fields.values = {**fields.values, "v_head_dim": width}
    return latent_decoder(
        fields,
        interleaved=False,
        tied_head=fields.flag("tie_word_embeddings", True),
        mlp_bias=fields.flag("mlp_bias", False),
        embedding_multiplier=fields.number("scale_emb", 12),
        residual_multiplier=fields.number("scale_depth", 1.4) / math.sqrt(num_layers),
        logit_multiplier=fields.integer("dim_model_base", 256) / hidden,
    )


KIMI_NAMES = {  # of what DeepSeek V3 has under other ones
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def kimi_linear(fields: ConfigFields) -> DecoderSpec:
    """Latent attention without RoPE, and gated delta nets with a decay for each row."""
    for name in (*DEEPSEEK_FIELDS, "num_nextn_predict_layers", "rope_theta", "rope_scaling"):
        fields.get(name, None)
    fields.choice("moe_router_activation_func", {"sigmoid": None}, "sigmoid")
    for name in ("mla_use_nope", "use_grouped_topk"):
        if not fields.flag(name, True):
            raise fields.wrong(name, "true")
    renamed = {ours: fields.get(theirs, None) for theirs, ours in KIMI_NAMES.items()}
    given = {name: value for name, value in renamed.items() if value is not None}
    fields.values = {**fields.values, **given, "rope_scaling": None}
    spec = latent_decoder(fields, interleaved=False)
    delta, kinds = kimi_delta_net(fields, len(spec.layers))
    layers = tuple(
        replace(layer, rope=None) if kind == FULL else LayerSpec(mixer=delta, rope=None)
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    own = grouped(fields, default_shared=1, default_normalized=True)
    return with_sparse(fields, replace(spec, layers=layers, ropes=()), own, default_first=1)


def kimi_delta_net(fields: ConfigFields, num_layers: int) -> tuple[GatedDeltaNetSpec, list[str]]:
    """Lower the gated delta net, and which layers have it.

    Published configs have a table for both, whose layers count from 1.
    """
    table = ConfigFields(
        fields.table("linear_attn_config"), f"'linear_attn_config' of {fields.owner}"
    )
    num_heads = table.integer("num_heads", fields.get("linear_num_heads", 32))
    head_dim = table.integer("head_dim", fields.get("linear_head_dim", 128))
    kernel_size = table.integer("short_conv_kernel_size", fields.get("linear_conv_kernel_dim", 4))
    attends = table.get("full_attn_layers", None)
    table.get("kda_layers", None)  # all others
    table.refuse_unread()
    kinds = fields.one_per_layer("layer_types", num_layers)
    if kinds is None:
        attends = range(5, num_layers + 1, 4) if attends is None else attends
        kinds = [FULL if i in attends else LINEAR for i in range(1, num_layers + 1)]
    if not set(kinds) <= {FULL, LINEAR} or FULL not in kinds:
        raise fields.wrong("layer_types", f"a list of {FULL!r} and {LINEAR!r}, with the former")
    delta = GatedDeltaNetSpec(
        num_key_heads=num_heads,
        num_value_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        kernel_size=kernel_size,
        gate_rank=head_dim,
    )
    return delta, kinds


LATENT: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": sparse_attention,
    "glm4_moe_lite": glm4_moe_lite,
    "glm_moe_dsa": sparse_attention,
    "kimi_k2": deepseek_v3,  # as its config says, but for the name
    "kimi_linear": kimi_linear,
    "minicpm3": minicpm3,
    "mistral4": mistral4,
    "youtu": youtu,
}
