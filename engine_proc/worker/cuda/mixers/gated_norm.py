"""Gates of heads, with a norm of each group of numbers before or behind: one pass over memory.

A program has whole groups, so that no group's bits depend on another. A norm over numbers of
several workers takes two kernels. The first sums the squares that are here; workers add them up.
"""

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class CutNorms:
    """Norms of which a worker has some numbers, and other workers the rest."""

    first: int  # of the numbers of all workers, that comes first here
    num_groups: int  # of all workers
    sum: Callable[[Tensor], Tensor]  # over the workers


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
    cut: CutNorms | None = None,
) -> Tensor:
    """Return gated and normed groups, computed in fp32 and rounded once to the type of the gate.

    Args:
        x: [tokens, numbers]
        gate: [tokens, numbers], rows may lie apart.
        weight: [group_size] of each group, or [numbers], fp32.
        multiplier: of the gate, before the activation.
        is_sigmoid: sigmoid(gate) in place of silu(gate).
        cut: None is whole groups.
    """
    num_tokens, num = x.shape
    first = 0 if cut is None else cut.first % group_size  # of the first group that is here
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    assert cut is not None or num % group_size == 0
    assert (weight is None) == (order == GateOrder.NO_NORM)
    out = gate.new_empty(num_tokens, num)
    if num_tokens == 0:
        return out
    num_groups, block = cdiv(first + num, group_size), next_power_of_2(min(group_size, num))
    block_rows = max(1, BLOCK_NUMBERS // block)
    grid = (cdiv(num_tokens * num_groups, block_rows),)
    options = {
        "NUM": num,
        "NUM_GROUPS": num_groups,
        "SIZE": group_size,
        "FIRST": first,
        "IS_CUT": cut is not None,
        "BLOCK": block,
        "BLOCK_ROWS": block_rows,
        "ORDER": int(order),
        "IS_SIGMOID": is_sigmoid,
        "num_warps": 4 if block <= 4096 else 8,
        "enable_fp_fusion": False,
    }
    squares = x
    if cut is not None:
        own_groups = slice(cut.first // group_size, None)
        squares = x.new_zeros(num_tokens, cut.num_groups, dtype=torch.float32)
        own, strides = squares[:, own_groups], (squares.stride(0), gate.stride(0))
        gated_squares_kernel[grid](own, x, gate, *strides, multiplier, num_tokens, **options)
        squares = cut.sum(squares)[:, own_groups]
    gated_norm_kernel[grid](
        out,
        x,
        gate,
        x if weight is None else weight,
        squares,
        squares.stride(0),
        gate.stride(0),
        eps,
        multiplier,
        num_tokens,
        HAS_OWN_WEIGHTS=weight is not None and len(weight) == num,
        **options,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def gated_squares_kernel(
    squares: tl.tensor,
    x: tl.tensor,
    gate: tl.tensor,
    squares_stride: tl.tensor,
    gate_stride: tl.tensor,
    multiplier: tl.tensor,
    num_tokens: tl.tensor,
    NUM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    IS_CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ORDER: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
) -> None:
    token, group = find_rows(NUM_GROUPS, BLOCK_ROWS)
    begin, end = find_numbers(group, SIZE, FIRST, NUM, IS_CUT)
    at = begin + tl.arange(0, BLOCK)[None, :]
    is_number = (token < num_tokens) & (at < end)
    numbers = tl.load(x + token * NUM + at, mask=is_number, other=0.0).to(tl.float32)
    if ORDER == GATE_FIRST:
        place = gate + token * gate_stride + at
        numbers *= load_factors(place, is_number, multiplier, IS_SIGMOID)
    sums = tl.sum(numbers * numbers, 1)[:, None]
    tl.store(squares + token * squares_stride + group, sums, mask=token < num_tokens)


@triton.jit(do_not_specialize=["num_tokens"])
def gated_norm_kernel(
    out: tl.tensor,
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    squares: tl.tensor,
    squares_stride: tl.tensor,
    gate_stride: tl.tensor,
    eps: tl.tensor,
    multiplier: tl.tensor,
    num_tokens: tl.tensor,
    NUM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    IS_CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ORDER: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_OWN_WEIGHTS: tl.constexpr,
) -> None:
    token, group = find_rows(NUM_GROUPS, BLOCK_ROWS)
    begin, end = find_numbers(group, SIZE, FIRST, NUM, IS_CUT)
    column = tl.arange(0, BLOCK)[None, :]
    at = begin + column
    is_number = (token < num_tokens) & (at < end)
    numbers = tl.load(x + token * NUM + at, mask=is_number, other=0.0).to(tl.float32)
    place = gate + token * gate_stride + at
    factors = load_factors(place, is_number, multiplier, IS_SIGMOID)
    if ORDER == GATE_FIRST:
        numbers *= factors
    if ORDER != NO_NORM:
        if IS_CUT:
            place = squares + token * squares_stride + group
            sums = tl.load(place, mask=token < num_tokens, other=0.0)
        else:
            sums = tl.sum(numbers * numbers, 1)[:, None]
        of_group = weight + (at if HAS_OWN_WEIGHTS else column)
        scale = 1.0 / tl.sqrt(sums / SIZE + eps)
        numbers = numbers * scale * tl.load(of_group, mask=is_number, other=0.0)
    if ORDER != GATE_FIRST:
        numbers *= factors
    tl.store(out + token * NUM + at, rounded(numbers, out.dtype.element_ty), mask=is_number)


@triton.jit
def find_rows(NUM_GROUPS: tl.constexpr, BLOCK_ROWS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the tokens of a program's groups, and which of a token's groups they are."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    return row // NUM_GROUPS, row % NUM_GROUPS


@triton.jit
def find_numbers(
    group: tl.tensor,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    NUM: tl.constexpr,
    IS_CUT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return where the numbers of groups begin and end, of those that are here."""
    begin = group * SIZE
    end = begin + SIZE
    if IS_CUT:
        begin, end = tl.maximum(begin - FIRST, 0), tl.minimum(end - FIRST, NUM)
    return begin, end


@triton.jit
def load_factors(
    place: tl.tensor, is_number: tl.tensor, multiplier: tl.tensor, IS_SIGMOID: tl.constexpr
) -> tl.tensor:
    """Return what gates multiply with, fp32."""
    gates = tl.load(place, mask=is_number, other=0.0).to(tl.float32) * multiplier
    factors = 1.0 / (1.0 + tl.exp(-gates))
    if not IS_SIGMOID:
        factors = gates * factors
    return factors


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
    """Do as `gated_norm`, in plain torch, of whole groups."""
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
