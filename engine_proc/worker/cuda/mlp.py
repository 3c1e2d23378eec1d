"""MLPs and mixtures of experts of a layer, as far as a worker has them."""

from dataclasses import replace

import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.gated_activation import act_mul
from headrace.engine_proc.worker.cuda.matrices.dense import DenseMatrix
from headrace.engine_proc.worker.cuda.matrices.matrices import DeviceWeights
from headrace.engine_proc.worker.cuda.mixtures.expert_activation import ExpertActivation
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import (
    activated_expert_linear,
    expert_linear,
)
from headrace.engine_proc.worker.cuda.mixtures.expert_sum import add_experts
from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import sort_by_expert
from headrace.engine_proc.worker.cuda.mixtures.router import choose_experts
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, MixtureSpec


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
) -> Tensor:
    """Run the mixture of a layer, [tokens, hidden] -> [tokens, hidden].

    Args:
        kv_rows: [tokens], below 0 for padding, which goes to no expert.
    """
    logits = weights.wide[f"{name}.router"].apply_wide(x)
    bias = weights.tensors.get(f"{name}.router.selection_bias")
    choice = choose_experts(mixture, logits, bias, kv_rows)
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
    has_shared = mixture.shared_intermediate_size > 0
    shared = run_mlp(weights, f"{name}.shared", spec, x) if has_shared else None
    return add_experts(mixture, outputs, choice, shared, logits)
