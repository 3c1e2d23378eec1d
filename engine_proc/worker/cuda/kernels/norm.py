"""Norms of rows, the residual sum before them included: one pass over memory.

A program has whole rows, so that no row's bits depend on another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import (
    Scaling,
    cdiv,
    moments,
    next_power_of_2,
    rounded,
    scaled,
)

BLOCK_NUMBERS = 1024  # of a program, if a row does not have more


def norm(
    x: Tensor,
    weight: Tensor,
    *,
    scaling: Scaling,
    eps: float,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the norm of each row, in fp32, rounded once.

    Args:
        x: [rows, numbers], rows may lie apart.
        weight, bias: [numbers], fp32.
        out: where to write it; may be `x`.
    """
    out = torch.empty_like(x) if out is None else out
    launch(x, x, weight, out, scaling=scaling, eps=eps, bias=bias, multiplier=None)
    return out


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    scaling: Scaling,
    eps: float,
    bias: Tensor | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """Add `x * multiplier` to the residual, in place, and return the norm of that.

    Args:
        x, residual: [rows, numbers], of one type; what is normed is the rounded sum.
        weight, bias: [numbers], fp32.
    """
    out = torch.empty_like(x)
    launch(x, residual, weight, out, scaling=scaling, eps=eps, bias=bias, multiplier=multiplier)
    return out


def launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    scaling: Scaling,
    eps: float,
    bias: Tensor | None,
    multiplier: float | None,
) -> None:
    """Launch the kernel."""
    num_rows, num = x.shape
    assert bias is None or (bias.shape, bias.dtype) == (weight.shape, weight.dtype)
    assert x.stride(1) == residual.stride(1) == out.stride(1) == weight.stride(0) == 1
    assert weight.shape == (num,)
    assert weight.dtype == torch.float32
    if num_rows == 0:
        return
    block = next_power_of_2(num)
    block_rows = max(1, BLOCK_NUMBERS // block)
    norm_kernel[(cdiv(num_rows, block_rows),)](
        out,
        residual,
        x,
        weight,
        weight if bias is None else bias,
        out.stride(0),
        residual.stride(0),
        x.stride(0),
        eps,
        1.0 if multiplier is None else multiplier,
        num_rows,
        NUM=num,
        BLOCK=block,
        BLOCK_ROWS=block_rows,
        SCALING=int(scaling),
        HAS_RESIDUAL=multiplier is not None,
        HAS_BIAS=bias is not None,
        num_warps=4 if num <= 4096 else 8,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    out: tl.tensor,
    residual: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out_stride: tl.tensor,
    residual_stride: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    multiplier: tl.tensor,
    num_rows: tl.tensor,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SCALING: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)
    at = column[None, :]
    is_number = (row < num_rows) & (at < NUM)
    numbers = tl.load(x + row * x_stride + at, mask=is_number, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + at
        numbers = numbers * multiplier + tl.load(place, mask=is_number, other=0.0).to(tl.float32)
        total = rounded(numbers, residual.dtype.element_ty)
        tl.store(place, total, mask=is_number)
        numbers = total.to(tl.float32)
    mean, scale = moments(numbers, is_number, NUM, eps, SCALING)
    factors = tl.load(weight + column, mask=column < NUM, other=0.0)
    normed = scaled(numbers, mean, scale, factors, SCALING)
    if HAS_BIAS:
        normed += tl.load(bias + column, mask=column < NUM, other=0.0)[None, :]
    tl.store(out + row * out_stride + at, rounded(normed, out.dtype.element_ty), mask=is_number)


def square_sums(x: Tensor) -> Tensor:
    """Return the sum of the squares of each row, [rows], fp32.

    Args:
        x: [rows, numbers], rows may lie apart.
    """
    num_rows, num = x.shape
    assert x.stride(1) == 1
    sums = x.new_empty(num_rows, dtype=torch.float32)
    if num_rows:
        block = next_power_of_2(num)
        squares_kernel[(num_rows,)](
            sums, x, x.stride(0), NUM=num, BLOCK=block, num_warps=4, enable_fp_fusion=False
        )
    return sums


@triton.jit
def squares_kernel(
    sums: tl.tensor,
    x: tl.tensor,
    x_stride: tl.tensor,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    numbers = tl.load(x + row * x_stride + at, mask=at < NUM, other=0.0).to(tl.float32)
    tl.store(sums + row, tl.sum(numbers * numbers, 0))


def reference(
    x: Tensor, weight: Tensor, *, scaling: Scaling, eps: float, bias: Tensor | None = None
) -> Tensor:
    """Do as `norm`, in plain torch."""
    numbers = x.float()
    if scaling in (Scaling.LAYER, Scaling.LAYER_ONE_PLUS):
        numbers = numbers - numbers.mean(-1, keepdim=True)
    factors = weight + 1 if scaling in (Scaling.RMS_ONE_PLUS, Scaling.LAYER_ONE_PLUS) else weight
    normed = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + eps) * factors
    return (normed if bias is None else normed + bias).to(x.dtype)


def reference_sum(x: Tensor, residual: Tensor, multiplier: float) -> Tensor:
    """Return the residual that `add_norm` leaves, in plain torch."""
    return (residual.float() + x.float() * multiplier).to(residual.dtype)
