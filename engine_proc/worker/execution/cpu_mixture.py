"""A mixture of experts as the C++ core has it."""

from ctypes import Structure, c_float, c_int32

from headrace.engine_proc.worker.models.specs.decoder_spec import MixtureSpec, RouterScore

ROUTER_SCORES = tuple(RouterScore)  # the order is the numbering of csrc/cpu
MAX_GROUPS, MAX_GROUP_SCORE = 64, 8  # of csrc/cpu/router.cpp


class MixtureConfig(Structure):
    """`MixtureConfig` of csrc/cpu/model.h."""

    _fields_ = (
        *((name, c_int32) for name in ("num_experts", "first_expert", "num_local_experts")),
        *((name, c_int32) for name in ("experts_per_token", "intermediate_size", "score")),
        *((name, c_int32) for name in ("normalized", "num_groups", "groups_per_token")),
        *((name, c_int32) for name in ("group_score_experts", "shared_intermediate_size")),
        ("shared_gate", c_int32),
        *((name, c_float) for name in ("weight_sum_min", "weight_sum_eps", "weight_scale")),
        *((name, c_float) for name in ("sparsemixer_eps", "swish_beta", "clamp")),
        *((name, c_int32) for name in ("weighs_inputs", "own_norms")),
    )


def mixture_config(mixture: MixtureSpec) -> MixtureConfig:
    """Return a mixture as the core has it."""
    return MixtureConfig(
        num_experts=mixture.num_experts,
        first_expert=mixture.own_experts.start,
        num_local_experts=len(mixture.own_experts),
        experts_per_token=mixture.experts_per_token,
        intermediate_size=mixture.intermediate_size,
        score=ROUTER_SCORES.index(mixture.score),
        normalized=mixture.normalized,
        num_groups=mixture.num_groups,
        groups_per_token=mixture.groups_per_token,
        group_score_experts=mixture.group_score_experts,
        shared_intermediate_size=mixture.shared_intermediate_size,
        shared_gate=mixture.shared_gate,
        weight_sum_min=mixture.weight_sum_min,
        weight_sum_eps=mixture.weight_sum_eps,
        weight_scale=mixture.weight_scale,
        sparsemixer_eps=mixture.sparsemixer_eps,
        swish_beta=mixture.swish_beta,
        clamp=mixture.clamp or 0.0,
        weighs_inputs=mixture.weighs_inputs,
        own_norms=mixture.own_norms,
    )


def why_not(mixture: MixtureSpec) -> str:
    """Return why the core cannot choose experts so; "" if it can."""
    if mixture.weighs_inputs and mixture.expert_bias:
        return "experts with biases, whose inputs are weighted"
    size, rest = divmod(mixture.num_experts, mixture.num_groups)
    if rest or mixture.num_groups > MAX_GROUPS:
        return (
            f"{mixture.num_experts} experts in {mixture.num_groups} groups: "
            f"groups are equal, and at most {MAX_GROUPS}"
        )
    if not 1 <= mixture.experts_per_token <= size * mixture.groups_per_token:
        return (
            f"{mixture.experts_per_token} experts for each token, "
            f"of {mixture.groups_per_token} groups of {size}"
        )
    if not 1 <= mixture.groups_per_token <= mixture.num_groups:
        return f"{mixture.groups_per_token} of {mixture.num_groups} groups for each token"
    if mixture.num_groups > 1 and not 1 <= mixture.group_score_experts <= MAX_GROUP_SCORE:
        return (
            f"{mixture.group_score_experts} experts score a group; it can be 1 to {MAX_GROUP_SCORE}"
        )
    return ""
