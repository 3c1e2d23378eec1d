"""The MLP's gate, `act(gate) * up`, where both come from one product; or `act(up)` alone."""

from enum import StrEnum

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, rounded, tanh
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation

BLOCK = 1024
KINDS: tuple[StrEnum, ...] = (
    Activation.SILU,
    Activation.GELU,
    Activation.GELU_TANH,
    Activation.RELU2,
    Activation.XIELU,
)
SILU = tl.constexpr(KINDS.index(Activation.SILU))
GELU = tl.constexpr(KINDS.index(Activation.GELU))
RELU2 = tl.constexpr(KINDS.index(Activation.RELU2))
XIELU = tl.constexpr(KINDS.index(Activation.XIELU))


def act_mul(
    gate_up: Tensor,
    activation: Activation,
    *,
    multiplier: float = 1.0,
    is_gated: bool = True,
    xielu: Tensor | None = None,
) -> Tensor:
    """Return `act(multiplier * gate) * up`, computed in fp32 and rounded once.

    Args:
        gate_up: [rows, 2 * numbers], gates first; if not gated [rows, numbers], which are activated
            alone.
        xielu: of `xielu_numbers`, with that activation.
    Returns:
        [rows, numbers]
    """
    assert (activation == Activation.XIELU) == (xielu is not None)
    assert gate_up.is_contiguous()
    num_rows, num = gate_up.shape[0], gate_up.shape[1] // (1 + is_gated)
    out = gate_up.new_empty(num_rows, num)
    if num_rows:
        grid = (num_rows, cdiv(num, BLOCK))
        gate_kernel[grid](
            out,
            gate_up,
            gate_up if xielu is None else xielu,
            multiplier,
            NUM=num,
            IS_GATED=is_gated,
            BLOCK=BLOCK,
            KIND=KINDS.index(activation),
            enable_fp_fusion=False,
        )
    return out


@triton.jit
def gate_kernel(
    out: tl.tensor,
    gate_up: tl.tensor,
    xielu: tl.tensor,
    multiplier: tl.tensor,
    NUM: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_number = at < NUM
    place = gate_up + row * ((1 + IS_GATED) * NUM) + at
    gate = tl.load(place, mask=is_number, other=0.0).to(tl.float32)
    if KIND == XIELU:
        active = xielu_of(gate * multiplier, xielu)
    else:
        active = activate(gate * multiplier, KIND)
    if IS_GATED:
        active *= tl.load(place + NUM, mask=is_number, other=0.0).to(tl.float32)
    tl.store(out + row * NUM + at, rounded(active, out.dtype.element_ty), mask=is_number)


@triton.jit
def activate(gate: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return `act(gate)`, of fp32."""
    if KIND == SILU:
        gate = gate / (1.0 + tl.exp(-gate))
    elif KIND == RELU2:
        gate = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    elif KIND == GELU:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = 0.5 * gate * (1.0 + tanh(inner))
    return gate


@triton.jit
def xielu_of(x: tl.tensor, numbers: tl.tensor) -> tl.tensor:
    """Return Apertus' activation, of fp32."""
    above = tl.load(numbers) * x * x
    below = tl.load(numbers + 1) * (tl.exp(tl.minimum(x, tl.load(numbers + 3))) - 1.0 - x)
    return tl.where(x > 0, above, below) + tl.load(numbers + 2) * x


def xielu_numbers(stored: Tensor) -> Tensor:
    """Return what kernels read of xIELU's numbers, [4], fp32: factors above 0 and below, beta, eps.

    Args:
        stored: alphas before their softplus, beta, eps.
    """
    alpha_p, alpha_n, beta, eps = stored.float().unbind()
    return torch.stack((F.softplus(alpha_p), beta + F.softplus(alpha_n), beta, eps))


def reference(
    gate_up: Tensor,
    activation: Activation,
    *,
    multiplier: float = 1.0,
    is_gated: bool = True,
    xielu: Tensor | None = None,
) -> Tensor:
    """Do as `act_mul`, in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1) if is_gated else (gate_up.float(), None)
    gate = gate * multiplier
    match activation:
        case Activation.SILU:
            gate = F.silu(gate)
        case Activation.GELU:
            gate = F.gelu(gate)
        case Activation.GELU_TANH:
            gate = F.gelu(gate, approximate="tanh")
        case Activation.RELU2:
            gate = F.relu(gate).square()
        case Activation.XIELU:
            assert xielu is not None
            above, below, beta, eps = xielu
            below = below * (torch.expm1(gate.minimum(eps)) - gate)
            gate = torch.where(gate > 0, above * gate * gate, below) + beta * gate
    return (gate if up is None else gate * up).to(gate_up.dtype)
