"""Linear layers whose rows do not depend on each other: every sum is taken in one fixed order.

A library's product chooses its way by the number of rows, and rows by other ways have other bits.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.numbers import dot, rounded

BLOCK = 64  # rows, columns and terms of a tile: the same for all shapes, or bits would differ


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, summed in fp32 and rounded once.

    Args:
        x: [rows, terms]
        weight: [columns, terms]
        bias: [columns]
    """
    num_rows, num_terms = x.shape
    num_columns = len(weight)
    assert weight.shape[1] == num_terms
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = x.new_empty(num_rows, num_columns)
    if num_rows:
        grid = (triton.cdiv(num_columns, BLOCK), triton.cdiv(num_rows, BLOCK))
        linear_kernel[grid](
            out,
            x,
            weight,
            weight if bias is None else bias,
            num_rows,
            x.stride(0),
            NUM_COLUMNS=num_columns,
            NUM_TERMS=num_terms,
            HAS_BIAS=bias is not None,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_column, is_row = columns < NUM_COLUMNS, rows < num_rows
    sums = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, NUM_TERMS, BLOCK):
        terms = first + tl.arange(0, BLOCK)
        is_term = terms < NUM_TERMS
        a = tl.load(
            x + rows[:, None] * x_stride + terms[None, :],
            mask=is_row[:, None] & is_term[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + columns.to(tl.int64)[None, :] * NUM_TERMS + terms[:, None],
            mask=is_column[None, :] & is_term[:, None],
            other=0.0,
        )
        sums = dot(a, b, sums)
    finish(out, sums, bias, rows, columns, num_rows, NUM_COLUMNS, HAS_BIAS)


@triton.jit
def finish(
    out: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    num_rows: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Add the bias to a product's tile, round it once, and store it."""
    is_column = columns < NUM_COLUMNS
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + rows[:, None] * NUM_COLUMNS + columns[None, :],
        rounded(sums, out.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & is_column[None, :],
    )


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do as `linear`, in plain torch."""
    wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(x.dtype)
