"""Adds the norms of one or two rows to others, and multiplies the sum: one pass over memory.

A program has whole rows, so that no row's bits depend on another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.norm import reference as norm_in_torch
from headrace.engine_proc.worker.cuda.kernels.numerics import (
    Scaling,
    cdiv,
    moments,
    next_power_of_2,
    rounded,
    scaled,
)

BLOCK_NUMBERS = 1024  # of a program, if a row does not have more

Normed = tuple[Tensor, Tensor]  # rows, and the weights of their norm, [numbers], fp32


def normed_sum(
    x: Normed,
    y: Normed | None = None,
    *,
    scaling: Scaling,
    eps: float,
    residual: Tensor | None = None,
    plain: Tensor | None = None,
    multiplier: float = 1.0,
    factor: Tensor | None = None,
) -> Tensor:
    """Return `(residual + norm(x) + norm(y) + plain) * multiplier * factor`, rounded once.

    Args:
        x, y: rows are contiguous, [rows, numbers].
        residual: what is not None has the sum in its place.
        plain: likewise contiguous, added as it is.
        factor: [1], fp32.
    """
    rows, weight = x
    others, other_weight = x if y is None else y
    out = torch.empty_like(rows) if residual is None else residual
    num_rows, num = rows.shape
    assert all(own.is_contiguous() for own in (rows, others, out))
    assert plain is None or plain.is_contiguous()
    if num_rows == 0:
        return out
    block = next_power_of_2(num)
    block_rows = max(1, BLOCK_NUMBERS // block)
    normed_sum_kernel[(cdiv(num_rows, block_rows),)](
        out,
        rows,
        weight,
        others,
        other_weight,
        out if plain is None else plain,
        weight if factor is None else factor,
        eps,
        multiplier,
        num_rows,
        NUM=num,
        BLOCK=block,
        BLOCK_ROWS=block_rows,
        SCALING=int(scaling),
        HAS_RESIDUAL=residual is not None,
        HAS_OTHER=y is not None,
        HAS_PLAIN=plain is not None,
        HAS_FACTOR=factor is not None,
        num_warps=4 if num <= 4096 else 8,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def normed_sum_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    other: tl.tensor,
    other_weight: tl.tensor,
    plain: tl.tensor,
    factor: tl.tensor,
    eps: tl.tensor,
    multiplier: tl.tensor,
    num_rows: tl.tensor,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SCALING: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    HAS_PLAIN: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)
    at = row * NUM + column[None, :]
    is_number = (row < num_rows) & (column < NUM)[None, :]
    total = normed_row(x + at, weight + column, column < NUM, is_number, eps, NUM, SCALING)
    if HAS_RESIDUAL:
        total += tl.load(out + at, mask=is_number, other=0.0).to(tl.float32)
    if HAS_OTHER:
        total += normed_row(
            other + at, other_weight + column, column < NUM, is_number, eps, NUM, SCALING
        )
    if HAS_PLAIN:
        total += tl.load(plain + at, mask=is_number, other=0.0).to(tl.float32)
    total *= multiplier
    if HAS_FACTOR:
        total *= tl.load(factor)
    tl.store(out + at, rounded(total, out.dtype.element_ty), mask=is_number)


@triton.jit
def normed_row(
    place: tl.tensor,
    weight: tl.tensor,
    is_column: tl.tensor,
    is_number: tl.tensor,
    eps: tl.tensor,
    NUM: tl.constexpr,
    SCALING: tl.constexpr,
) -> tl.tensor:
    """Return the norms of rows, fp32; beyond a row's end, 0."""
    numbers = tl.load(place, mask=is_number, other=0.0).to(tl.float32)
    mean, scale = moments(numbers, is_number, NUM, eps, SCALING)
    return scaled(numbers, mean, scale, tl.load(weight, mask=is_column, other=0.0), SCALING)


def reference(
    x: Normed,
    y: Normed | None = None,
    *,
    scaling: Scaling,
    eps: float,
    residual: Tensor | None = None,
    plain: Tensor | None = None,
    multiplier: float = 1.0,
    factor: Tensor | None = None,
) -> Tensor:
    """Do as `normed_sum`, in plain torch; the residual stays as it is."""
    terms = [
        norm_in_torch(rows.float(), weight, scaling=scaling, eps=eps)
        for rows, weight in ([x] if y is None else [x, y])
    ]
    terms += [own.float() for own in (residual, plain) if own is not None]
    total = torch.stack(terms).sum(0) * multiplier
    return (total if factor is None else total * factor).to(x[0].dtype)
