"""Gates of heads, with a norm of each group of numbers before or behind: one pass over memory.

A program has whole groups, so that no group's bits depend on another.
"""

from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, next_power_of_2, rounded

BLOCK_NUMBERS = 1024  # of a program, if a group does not have more


class GateOrder(IntEnum):
    """Where a norm is."""

    NO_NORM = 0
    NORM_FIRST = 1  # act(gate) * norm(x)
    GATE_FIRST = 2  # norm(act(gate) * x)


NO_NORM = tl.constexpr(int(GateOrder.NO_NORM))
GATE_FIRST = tl.constexpr(int(GateOrder.GATE_FIRST))


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    order: GateOrder,
    *,
    group_size: int,
    eps: float = 0.0,
    multiplier: float = 1.0,
    is_sigmoid: bool = False,
) -> Tensor:
    """Return gated and normed groups, computed in fp32 and rounded once to the type of the gate.

    Args:
        x: [tokens, numbers]
        gate: [tokens, numbers], rows may lie apart.
        weight: [group_size] of each group, or [numbers], fp32.
        multiplier: of the gate, before the activation.
        is_sigmoid: sigmoid(gate) in place of silu(gate).
    """
    num_tokens, num = x.shape
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    assert num % group_size == 0
    assert (weight is None) == (order == GateOrder.NO_NORM)
    out = gate.new_empty(num_tokens, num)
    block, num_groups = next_power_of_2(group_size), num // group_size
    block_rows = max(1, BLOCK_NUMBERS // block)
    if num_tokens:
        gated_norm_kernel[(cdiv(num_tokens * num_groups, block_rows),)](
            out,
            x,
            gate,
            x if weight is None else weight,
            gate.stride(0),
            eps,
            multiplier,
            num_tokens,
            NUM_GROUPS=num_groups,
            SIZE=group_size,
            BLOCK=block,
            BLOCK_ROWS=block_rows,
            ORDER=int(order),
            IS_SIGMOID=is_sigmoid,
            HAS_OWN_WEIGHTS=weight is not None and len(weight) > group_size,
            num_warps=4 if group_size <= 4096 else 8,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def gated_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    multiplier: tl.tensor,
    num_tokens: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ORDER: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_OWN_WEIGHTS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    token, group = row // NUM_GROUPS, row % NUM_GROUPS
    is_number = (token < num_tokens) & (column < SIZE)
    numbers = tl.load(x + row * SIZE + column, mask=is_number, other=0.0).to(tl.float32)
    place = gate + token * gate_stride + group * SIZE + column
    gates = tl.load(place, mask=is_number, other=0.0).to(tl.float32) * multiplier
    factors = 1.0 / (1.0 + tl.exp(-gates))
    if not IS_SIGMOID:
        factors = gates * factors
    if ORDER == GATE_FIRST:
        numbers *= factors
    if ORDER != NO_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 1) / SIZE + eps)
        of_group = weight + column
        if HAS_OWN_WEIGHTS:
            of_group += group * SIZE
        numbers = numbers * scale[:, None] * tl.load(of_group, mask=is_number, other=0.0)
    if ORDER != GATE_FIRST:
        numbers *= factors
    tl.store(out + row * SIZE + column, rounded(numbers, out.dtype.element_ty), mask=is_number)


def reference(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    order: GateOrder,
    *,
    group_size: int,
    eps: float = 0.0,
    multiplier: float = 1.0,
    is_sigmoid: bool = False,
) -> Tensor:
    """Do as `gated_norm`, in plain torch."""
    gates = gate.float() * multiplier
    factors = torch.sigmoid(gates) if is_sigmoid else F.silu(gates)

    def normed(numbers: Tensor) -> Tensor:
        assert weight is not None
        groups = numbers.view(len(x), -1, group_size)
        scaled = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
        return (scaled * weight.view(-1, group_size)).flatten(1)

    numbers = x.float()
    if order == GateOrder.NO_NORM:
        numbers = numbers * factors
    elif order == GateOrder.NORM_FIRST:
        numbers = normed(numbers) * factors
    else:
        numbers = normed(numbers * factors)
    return numbers.to(gate.dtype)
