"""The activation of experts, with a gate or without."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.gated_activation import activate
from headrace.engine_proc.worker.cuda.kernels.gated_activation import reference as act_mul_in_torch
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation


@dataclass(frozen=True)
class ExpertActivation:
    """`act(gate) * up`, or `act(up)`; with a clamp, gpt-oss's `(up + 1) * gate * sigmoid(beta *
    gate)`."""

    kind: Activation
    is_gated: bool = True
    clamp: float = 0.0  # the largest gate, and the largest up of either sign; 0 is none
    beta: float = 1.0


@triton.jit
def join(
    gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr, CLAMP: tl.constexpr, BETA: tl.constexpr
) -> tl.tensor:
    """Return what an `ExpertActivation` with a gate makes of both, fp32."""
    if CLAMP > 0:
        gate = tl.minimum(gate, CLAMP)
        up = tl.minimum(tl.maximum(up, -CLAMP), CLAMP)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-BETA * gate)))
    else:
        return activate(gate, KIND) * up


def reference(products: Tensor, activation: ExpertActivation) -> Tensor:
    """Do as the kernel, in plain torch, of [rows, 2 * numbers], gates first, or [rows, numbers]."""
    if not activation.clamp:
        return act_mul_in_torch(products, activation.kind, is_gated=activation.is_gated)
    gate, up = products.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=activation.clamp), up.clamp(-activation.clamp, activation.clamp)
    return ((up + 1) * (gate * (activation.beta * gate).sigmoid())).to(products.dtype)
