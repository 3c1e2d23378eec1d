"""The MLP's gate, `act(gate) * up`, where both come from one product."""

from enum import StrEnum

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, rounded, tanh
from headrace.engine_proc.worker.models.specs.decoder_spec import Activation

BLOCK = 1024
KINDS: tuple[StrEnum, ...] = (Activation.SILU, Activation.GELU, Activation.GELU_TANH)
SILU = tl.constexpr(KINDS.index(Activation.SILU))
GELU = tl.constexpr(KINDS.index(Activation.GELU))


def act_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Return `act(gate) * up`, computed in fp32 and rounded once.

    Args:
        gate_up: [rows, 2 * numbers], gates first.
    Returns:
        [rows, numbers]
    """
    assert gate_up.is_contiguous()
    num_rows, num = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, num)
    if num_rows:
        grid = (num_rows, cdiv(num, BLOCK))
        gate_kernel[grid](
            out, gate_up, NUM=num, BLOCK=BLOCK, KIND=KINDS.index(activation), enable_fp_fusion=False
        )
    return out


@triton.jit
def gate_kernel(
    out: tl.tensor,
    gate_up: tl.tensor,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_number = at < NUM
    place = gate_up + row * (2 * NUM) + at
    gate = tl.load(place, mask=is_number, other=0.0).to(tl.float32)
    up = tl.load(place + NUM, mask=is_number, other=0.0).to(tl.float32)
    tl.store(
        out + row * NUM + at,
        rounded(activate(gate, KIND) * up, out.dtype.element_ty),
        mask=is_number,
    )


@triton.jit
def activate(gate: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return `act(gate)`, of fp32."""
    if KIND == SILU:
        gate = gate / (1.0 + tl.exp(-gate))
    elif KIND == GELU:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = 0.5 * gate * (1.0 + tanh(inner))
    return gate


def reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """Do as `act_mul`, in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    match activation:
        case Activation.SILU:
            gate = F.silu(gate)
        case Activation.GELU:
            gate = F.gelu(gate)
        case Activation.GELU_TANH:
            gate = F.gelu(gate, approximate="tanh")
    return torch.mul(gate, up).to(gate_up.dtype)
