"""The families with multi-head latent attention: DeepSeek V2 and V3, and their kin."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.engine_proc.worker.models.config_fields import ConfigFields
from headrace.engine_proc.worker.models.decoder_spec import (
    DecoderSpec,
    LatentAttentionSpec,
    LayerSpec,
    MixtureSpec,
)
from headrace.engine_proc.worker.models.mixture_families import (
    DEEPSEEK_FIELDS,
    check_groups,
    grouped,
    mixture,
    whole,
    with_mixture,
)
from headrace.engine_proc.worker.models.model_families import decoder, rope


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
    params = fields.table("rope_scaling") or fields.table("rope_parameters")
    kind = params.get("rope_type") or params.get("type") or "default"
    scaling = ConfigFields(params, f"the RoPE of {fields.owner}")
    all_dim = scaling.number("mscale_all_dim", 0)
    if kind == "default" or not all_dim:
        return 1.0
    factor = scaling.positive("factor")
    return 1.0 if factor <= 1 else (0.1 * all_dim * math.log(factor) + 1.0) ** 2


def with_sparse(fields: ConfigFields, spec: DecoderSpec, own: MixtureSpec) -> DecoderSpec:
    """Return the decoder with a mixture from layer `first_k_dense_replace` on."""
    first = whole(fields, "first_k_dense_replace", 0)
    return with_mixture(spec, own, lambda i: i >= first)


def deepseek_v2(fields: ConfigFields) -> DecoderSpec:
    """Experts are chosen by softmax, from groups or not; their weights are not normalized."""
    for name in DEEPSEEK_FIELDS:
        fields.get(name, None)
    spec = latent_decoder(
        fields, interleaved=True, mlp_bias=fields.flag("mlp_bias", False)
    )
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


LATENT: dict[str, Callable[[ConfigFields], DecoderSpec]] = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
}
