"""The gate of experts."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.gated_activation import activate
from headrace.engine_proc.worker.cuda.kernels.gated_activation import reference as act_mul_in_torch
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation


@dataclass(frozen=True)
class ExpertGate:
    """`act(gate) * up`; with a clamp, gpt-oss's `(up + 1) * gate * sigmoid(beta * gate)`."""

    activation: Activation
    clamp: float = 0.0  # the largest gate, and the largest up of either sign; 0 is none
    beta: float = 1.0


@triton.jit
def join(
    gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr, CLAMP: tl.constexpr, BETA: tl.constexpr
) -> tl.tensor:
    """Return what a `ExpertGate` makes of both, fp32."""
    if CLAMP > 0:
        gate = tl.minimum(gate, CLAMP)
        up = tl.minimum(tl.maximum(up, -CLAMP), CLAMP)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-BETA * gate)))
    else:
        return activate(gate, KIND) * up


def reference(gate_up: Tensor, gate: ExpertGate) -> Tensor:
    """Do as `join`, in plain torch, of [rows, 2 * numbers], gates first."""
    if not gate.clamp:
        return act_mul_in_torch(gate_up, gate.activation)
    x, up = gate_up.float().chunk(2, dim=-1)
    x, up = x.clamp(max=gate.clamp), up.clamp(-gate.clamp, gate.clamp)
    return ((up + 1) * (x * (gate.beta * x).sigmoid())).to(gate_up.dtype)
