"""MLPs and mixtures of experts of a layer, as far as a worker has them."""

from dataclasses import replace

import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.gated_activation import act_mul
from headrace.engine_proc.worker.cuda.kernels.norm import norm
from headrace.engine_proc.worker.cuda.kernels.numerics import Scaling
from headrace.engine_proc.worker.cuda.matrices.dense import DenseMatrix
from headrace.engine_proc.worker.cuda.matrices.matrices import DeviceWeights
from headrace.engine_proc.worker.cuda.mixtures.expert_activation import ExpertActivation
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import (
    activated_expert_linear,
    expert_linear,
)
from headrace.engine_proc.worker.cuda.mixtures.expert_scales import scale_weights
from headrace.engine_proc.worker.cuda.mixtures.expert_sum import add_experts
from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import sort_by_expert
from headrace.engine_proc.worker.cuda.mixtures.router import choose_experts
from headrace.engine_proc.worker.cuda.residuals.cut_gates import cut_gates
from headrace.engine_proc.worker.cuda.residuals.normed_sum import normed_sum
from headrace.engine_proc.worker.cuda.sharded_ops import ShardedOps
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, MixtureSpec


def run_feed_forward(
    weights: DeviceWeights,
    index: int,
    spec: DecoderSpec,
    ops: ShardedOps,
    x: Tensor,
    residual: Tensor,
    kv_rows: Tensor,
) -> Tensor:
    """Run the MLP or the mixture of a layer, of all workers, [tokens, hidden] -> [tokens, hidden].

    Args:
        residual: read by mixtures with norms of their own, where x is its norm.
        kv_rows: [tokens], below 0 for padding, which goes to no expert.
    """
    name, layer = f"layers.{index}", spec.layers[index]
    mixture = layer.mixture
    if mixture is not None and mixture.own_norms:
        return run_mixture_beside(weights, name, mixture, spec, ops, x, residual, kv_rows)
    if mixture is not None:
        own = run_mixture(weights, name, mixture, spec, x, kv_rows)
    elif layer.gate_cut is not None:
        total = None if ops.peers is None else ops.sum
        gates = weights.matrices[f"{name}.gate_up"].apply(x)
        inner = cut_gates(gates, spec.activation, layer.gate_cut, ops.mlp_sizes[index], total)
        own = weights.matrices[f"{name}.down"].apply(inner)
    else:
        own = run_mlp(weights, name, spec, x)
    if spec.mlp_multiplier != 1:
        own = own * spec.mlp_multiplier
    return ops.sum(own)


def run_mlp(weights: DeviceWeights, name: str, spec: DecoderSpec, x: Tensor) -> Tensor:
    """Run the MLP of this name, [tokens, hidden] -> [tokens, hidden]."""
    gate_up = weights.matrices[f"{name}.gate_up"]
    is_plain = spec.gated_mlp and spec.gate_multiplier == 1
    if is_plain and isinstance(gate_up, DenseMatrix):
        inner = gate_up.apply_gated(x, spec.activation)
    else:
        inner = act_mul(
            gate_up.apply(x),
            spec.activation,
            multiplier=spec.gate_multiplier,
            is_gated=spec.gated_mlp,
            xielu=weights.tensors.get(f"{name}.xielu"),
        )
    return weights.matrices[f"{name}.down"].apply(inner)


def run_mixture(
    weights: DeviceWeights,
    name: str,
    mixture: MixtureSpec,
    spec: DecoderSpec,
    x: Tensor,
    kv_rows: Tensor,
    routed: Tensor | None = None,
) -> Tensor:
    """Run the mixture of a layer, [tokens, hidden] -> [tokens, hidden].

    Args:
        kv_rows: [tokens], below 0 for padding, which goes to no expert.
        routed: what the router reads, if not x.
    """
    logits = weights.wide[f"{name}.router"].apply_wide(x if routed is None else routed)
    bias = weights.tensors.get(f"{name}.router.selection_bias")
    choice = choose_experts(mixture, logits, bias, kv_rows)
    if mixture.expert_scales:
        choice = scale_weights(choice, weights.tensors[f"{name}.router.scales"])
    tiles = sort_by_expert(mixture, choice, x.dtype)
    activation = ExpertActivation(
        spec.activation, spec.gated_mlp, mixture.clamp or 0.0, mixture.swish_beta
    )
    gate_up, rows, row_tiles = weights.experts[f"{name}.experts.gate_up"], x, tiles
    if mixture.weighs_inputs:
        rows = (x[:, None] * choice.weights[:, :, None]).to(x.dtype).flatten(0, 1)
        row_tiles = replace(tiles, pairs_per_token=1)  # each pair has a row of its own
        choice = replace(choice, weights=torch.ones_like(choice.weights))
    inner = activated_expert_linear(rows, gate_up, row_tiles, activation)
    outputs = expert_linear(inner, weights.experts[f"{name}.experts.down"], tiles)
    has_shared = mixture.shared_intermediate_size > 0 and not mixture.own_norms
    shared = run_mlp(weights, f"{name}.shared", spec, x) if has_shared else None
    return add_experts(mixture, outputs, choice, shared, logits)


def run_mixture_beside(
    weights: DeviceWeights,
    name: str,
    mixture: MixtureSpec,
    spec: DecoderSpec,
    ops: ShardedOps,
    x: Tensor,
    residual: Tensor,
    kv_rows: Tensor,
) -> Tensor:
    """Run Gemma 4's mixture: the norms of what experts give, and of what the MLP gives, are added.

    Args:
        x: the norm of the residual that the shared MLP reads; router and experts have their own.
    """
    scaling, eps = Scaling.of(spec.norm), spec.norm_eps

    def normed(which: str) -> Tensor:
        return norm(residual, weights.tensors[f"{name}.{which}"], scaling=scaling, eps=eps)

    shared = x.new_zeros(x.shape)
    if mixture.shared_intermediate_size:  # a worker may have none of it
        shared = run_mlp(weights, f"{name}.shared", spec, x)
    shared = ops.sum(shared)
    routed, seen = normed("router.norm"), normed("expert_norm")
    experts = ops.sum(run_mixture(weights, name, mixture, spec, seen, kv_rows, routed))
    return normed_sum(
        (experts, weights.tensors[f"{name}.expert_post_norm"]),
        (shared, weights.tensors[f"{name}.shared_post_norm"]),
        scaling=scaling,
        eps=eps,
    )
