"""What adapters (LoRA) add to products of rows, each row with the factors of its own adapter.

`shrink` multiplies rows with `a`, `expand` multiplies what comes of it with `b` and adds that to a
product. Adapters lie in slots, and slots of rows are read on the device: a graph serves any mix. A
program takes some rows and the adapters among them by turns. So factors are read once for each
tile of rows that has theirs, and neighbors of one adapter share them. Every sum has one order,
which depends on the matrix alone: batch mates change no bits of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, dot, next_power_of_2, rounded

BLOCK = 64  # terms or ranks that are multiplied at once, columns of a tile
PART_TERMS = 512  # of a sum: programs share a row's terms
TILE_ROWS = 16
NO_SLOT = tl.constexpr(-1)
BEYOND = tl.constexpr(1 << 30)  # all slots


def num_parts(num_terms: int) -> int:
    """Return how many sums `shrink` leaves of a row."""
    return -(-num_terms // PART_TERMS)


def shrink(x: Tensor, a: Tensor, slots: Tensor) -> Tensor:
    """Return the parts of `x @ a[slot].T`, in fp32. Rows without an adapter are undefined.

    Args:
        x: [rows, terms]
        a: [slots, ranks, terms]
        slots: [rows], int32, -1 is none
    Returns:
        [parts, rows, ranks]
    """
    num_rows, num_terms = x.shape
    num_ranks = a.shape[1]
    assert a.shape[2] == num_terms
    assert x.stride(1) == 1
    assert a.is_contiguous()
    out = x.new_empty(num_parts(num_terms), num_rows, num_ranks, dtype=torch.float32)
    if num_rows:
        grid = (cdiv(num_rows, TILE_ROWS), cdiv(num_ranks, BLOCK), len(out))
        shrink_kernel[grid](
            out,
            x,
            a,
            slots,
            num_rows,
            x.stride(0),
            NUM_RANKS=num_ranks,
            NUM_TERMS=num_terms,
            PART_TERMS=PART_TERMS,
            BLOCK_ROWS=TILE_ROWS,
            BLOCK_COLUMNS=BLOCK,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return out


def expand(
    out: Tensor, shrunk: Tensor, b: Tensor, gains: Tensor, bias: Tensor | None, slots: Tensor
) -> None:
    """Add to a product `out`: with p, the product before its bias, p + s + gain * (p + s).

    There s is `shrunk @ b[slot].T`. Sums are fp32 and rounded once. Rows without an adapter keep
    their bits.

    Args:
        out: [rows, columns], may be columns of more
        shrunk: [parts, rows, ranks], may be ranks of more
        b: [slots, columns, ranks]
        gains: [slots, columns], fp32: what DoRA multiplies with, less 1
        bias: [columns], that `out` has in it
        slots: [rows], int32, -1 is none
    """
    num_rows, num_columns = out.shape
    num_ranks = b.shape[2]
    assert shrunk.shape[1:] == (num_rows, num_ranks)
    assert out.stride(1) == shrunk.stride(2) == 1
    assert b.is_contiguous() and gains.is_contiguous()
    if num_rows:
        expand_kernel[(cdiv(num_rows, TILE_ROWS), cdiv(num_columns, BLOCK))](
            out,
            shrunk,
            b,
            gains,
            gains if bias is None else bias,
            slots,
            num_rows,
            out.stride(0),
            shrunk.stride(0),
            shrunk.stride(1),
            NUM_COLUMNS=num_columns,
            NUM_RANKS=num_ranks,
            NUM_PARTS=len(shrunk),
            HAS_BIAS=bias is not None,
            BLOCK_ROWS=TILE_ROWS,
            BLOCK_COLUMNS=BLOCK,
            BLOCK_RANKS=min(BLOCK, max(16, next_power_of_2(num_ranks))),
            enable_fp_fusion=False,
        )


@triton.jit
def next_slot(slots: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """Return the lowest slot of a tile's rows above another one; BEYOND where there is none."""
    return tl.min(tl.where(slots > slot, slots, BEYOND), 0)


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    out: tl.tensor,
    x: tl.tensor,
    a: tl.tensor,
    slots: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    NUM_RANKS: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    PART_TERMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    ranks = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    part = tl.program_id(2)
    is_row, is_rank = rows < num_rows, ranks < NUM_RANKS
    own = tl.load(slots + rows, mask=is_row, other=NO_SLOT)
    begin, end = part * PART_TERMS, tl.minimum(part * PART_TERMS + PART_TERMS, NUM_TERMS)
    slot = next_slot(own, NO_SLOT)
    while slot < BEYOND:
        is_own = own == slot
        first_rank = slot.to(tl.int64) * NUM_RANKS
        sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for first in range(begin, end, BLOCK):
            terms = first + tl.arange(0, BLOCK)
            is_term = terms < end
            some = tl.load(
                x + rows.to(tl.int64)[:, None] * x_stride + terms[None, :],
                mask=is_own[:, None] & is_term[None, :],
                other=0.0,
            )
            factors = tl.load(
                a + (first_rank + ranks)[None, :] * NUM_TERMS + terms[:, None],
                mask=is_rank[None, :] & is_term[:, None],
                other=0.0,
            )
            sums = dot(some, factors, sums)
        at = (part * num_rows + rows).to(tl.int64)[:, None] * NUM_RANKS + ranks[None, :]
        tl.store(out + at, sums, mask=is_own[:, None] & is_rank[None, :])
        slot = next_slot(own, slot)


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    out: tl.tensor,
    shrunk: tl.tensor,
    b: tl.tensor,
    gains: tl.tensor,
    bias: tl.tensor,
    slots: tl.tensor,
    num_rows: tl.tensor,
    out_stride: tl.tensor,
    part_stride: tl.tensor,
    row_stride: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
) -> None:
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_row, is_column = rows < num_rows, columns < NUM_COLUMNS
    own = tl.load(slots + rows, mask=is_row, other=NO_SLOT)
    slot = next_slot(own, NO_SLOT)
    at = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    offset = tl.zeros([BLOCK_COLUMNS], tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    while slot < BEYOND:
        is_own = own == slot
        first_column = slot.to(tl.int64) * NUM_COLUMNS
        added = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for first in range(0, NUM_RANKS, BLOCK_RANKS):
            ranks = first + tl.arange(0, BLOCK_RANKS)
            is_rank = ranks < NUM_RANKS
            x = tl.zeros([BLOCK_ROWS, BLOCK_RANKS], tl.float32)
            for part in tl.static_range(NUM_PARTS):
                some = shrunk + part * part_stride + rows.to(tl.int64)[:, None] * row_stride
                is_some = is_own[:, None] & is_rank[None, :]
                x += tl.load(some + ranks[None, :], mask=is_some, other=0.0)
            factors = tl.load(
                b + (first_column + columns)[None, :] * NUM_RANKS + ranks[:, None],
                mask=is_column[None, :] & is_rank[:, None],
                other=0.0,
            )
            added = dot(rounded(x, b.dtype.element_ty), factors, added)
        is_number = is_own[:, None] & is_column[None, :]
        sums = tl.load(at, mask=is_number, other=0.0).to(tl.float32) + added
        gain = tl.load(gains + first_column + columns, mask=is_column, other=0.0)
        sums += gain[None, :] * (sums - offset[None, :])
        tl.store(at, rounded(sums, out.dtype.element_ty), mask=is_number)
        slot = next_slot(own, slot)


def reference(
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    gains: Tensor,
    bias: Tensor | None,
    slots: Tensor,
) -> Tensor:
    """Return what both make of `out`, in plain torch."""
    result = out.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        shrunk = (a[slot].float() @ x[row].float()).to(b.dtype).float()
        sums = out[row].float() + b[slot].float() @ shrunk
        sums += gains[slot] * (sums if bias is None else sums - bias.float())
        result[row] = sums.to(out.dtype)
    return result
