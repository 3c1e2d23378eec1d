"""A matrix of 4 bits, decoded as it is multiplied; for many rows before, and once.

Both ways multiply the same tiles in the same order, so a row has the same bits by either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.checkpoints.int4_packings import Codes
from headrace.engine_proc.worker.checkpoints.int4_weight import Int4Weight
from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.cuda.kernels.four_bits import decode_int4
from headrace.engine_proc.worker.cuda.kernels.linear import (
    BLOCK,
    ENOUGH_PROGRAMS,
    GROUP_ROWS,
    add_parts,
    find_tile,
    finish,
    grid_of,
    leave,
    linear,
    part_terms,
    room_for_sums,
)
from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, dot, rounded
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import comes_last, new_turns
from headrace.engine_proc.worker.cuda.matrices.upload import send

HALF_BLOCK = 32  # groups are of as many terms, or of whole blocks
MANY_ROWS = 256  # from which a matrix is decoded once; not measured


@dataclass(frozen=True)
class Int4Matrix:
    """A `Matrix`: a number is `(code - zero) * scale` of its group, rounded to x's type."""

    codes: Tensor  # [columns, terms / 2], uint8, of two adjacent terms the first in the lower bits
    zeros: Tensor  # [columns, groups], uint8
    scales: Tensor  # [columns, groups], fp32
    group_size: int  # adjacent terms under a scale
    order: Tensor | None = None  # [terms], int64, which number of a row each term is taken from
    bias: Tensor | None = None  # [columns]
    many_rows: int = MANY_ROWS
    turns: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", new_turns(ENOUGH_PROGRAMS, self.codes.device))

    @classmethod
    def of(
        cls, parts: Sequence[Weight], bias: Tensor | None, device: torch.device
    ) -> "Int4Matrix | None":
        """Load a matrix that is stored in 4 bits; None if it cannot be kept."""
        own = [part for part in parts if isinstance(part, Int4Weight)]
        num_terms = parts[0].shape[1]
        sizes = {min(num_terms, part.matrix.group_size) for part in own}
        if len(own) < len(parts) or len(sizes) > 1:
            return None
        size, groups = sizes.pop(), own[0].groups
        order = np.argsort(groups, kind="stable")
        is_even = np.array_equal(groups[order], np.arange(num_terms) // size)
        is_shared = all(np.array_equal(part.groups, groups) for part in own)
        if not (is_even and is_shared and can_hold(num_terms, size)):
            return None
        is_ordered = np.array_equal(order, np.arange(num_terms))
        return cls(
            codes=send(own, lambda piece: paired(piece.codes()[:, order]), device, torch.uint8),
            zeros=send(own, lambda piece: piece.zeros(), device, torch.uint8),
            scales=send(own, lambda piece: piece.scales(), device, torch.float32),
            group_size=size,
            order=None if is_ordered else torch.from_numpy(order).to(device),
            bias=bias,
        )

    def apply(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`, [rows, columns]."""
        if self.order is not None:
            x = x.index_select(1, self.order)
        if len(x) >= self.many_rows:
            return linear(x, self.decoded(x.dtype), self.bias, self.turns)
        num_rows, num_terms = x.shape
        num_columns = len(self.codes)
        assert x.stride(1) == 1
        out = x.new_empty(num_rows, num_columns)
        if num_rows == 0:
            return out
        num_part = part_terms(num_columns, num_terms)
        num_tiles = cdiv(num_columns, BLOCK) * cdiv(num_rows, BLOCK)
        grid = grid_of(num_tiles, cdiv(num_terms, num_part))
        int4_kernel[grid](
            out,
            room_for_sums(out, grid),
            self.turns,
            x,
            self.codes,
            self.zeros,
            self.scales,
            out if self.bias is None else self.bias,
            num_rows,
            x.stride(0),
            NUM_COLUMNS=num_columns,
            NUM_TERMS=num_terms,
            PART_TERMS=num_part,
            GROUP=self.group_size,
            HAS_BIAS=self.bias is not None,
            BLOCK=BLOCK,
            GROUP_ROWS=GROUP_ROWS,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return out

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return its numbers, [columns, terms], terms in their order."""
        num_columns, num_terms = len(self.codes), 2 * self.codes.shape[1]
        out = torch.empty(num_columns, num_terms, device=self.codes.device, dtype=dtype)
        decode_kernel[(cdiv(num_columns, BLOCK), cdiv(num_terms, BLOCK))](
            out,
            self.codes,
            self.zeros,
            self.scales,
            NUM_COLUMNS=num_columns,
            NUM_TERMS=num_terms,
            GROUP=self.group_size,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return out


def paired(codes: Codes) -> Codes:
    """Pack codes, [rows, columns] -> [rows, columns / 2]."""
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))


def can_hold(num_terms: int, group_size: int) -> bool:
    """Whether groups of this size can be decoded in tiles."""
    is_whole = group_size >= num_terms or group_size == HALF_BLOCK or group_size % BLOCK == 0
    return num_terms % 2 == 0 and is_whole


def int4_reference(matrix: Int4Matrix, dtype: torch.dtype) -> Tensor:
    """Do as `decoded`, in plain torch."""
    codes = torch.stack([matrix.codes & 15, matrix.codes >> 4], 2).flatten(1)
    group_of = torch.arange(codes.shape[1], device=codes.device) // matrix.group_size
    steps = codes.float() - matrix.zeros[:, group_of].float()
    return (steps * matrix.scales[:, group_of]).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def int4_kernel(
    out: tl.tensor,
    sums_of_parts: tl.tensor,
    turns: tl.tensor,
    x: tl.tensor,
    codes: tl.tensor,
    zeros: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    PART_TERMS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
) -> None:
    NUM_PARTS: tl.constexpr = (NUM_TERMS + PART_TERMS - 1) // PART_TERMS
    row, column = find_tile(num_rows, NUM_COLUMNS, BLOCK, BLOCK, GROUP_ROWS)
    rows = (row + tl.arange(0, BLOCK)).to(tl.int64)
    columns = column + tl.arange(0, BLOCK)
    wide, is_column = columns.to(tl.int64), columns < NUM_COLUMNS
    sums = tl.zeros([BLOCK, BLOCK], tl.float32)
    for begin in range(tl.program_id(1) * PART_TERMS, NUM_TERMS, tl.num_programs(1) * PART_TERMS):
        part = tl.zeros([BLOCK, BLOCK], tl.float32)
        for first in range(begin, tl.minimum(begin + PART_TERMS, NUM_TERMS), BLOCK):
            terms = first + tl.arange(0, BLOCK)
            a = tl.load(
                x + rows[:, None] * x_stride + terms[None, :],
                mask=(rows < num_rows)[:, None] & (terms < NUM_TERMS)[None, :],
                other=0.0,
            )
            b = decode_int4(codes, zeros, scales, wide, is_column, first, NUM_TERMS, GROUP, BLOCK)
            part = dot(a, tl.trans(rounded(b, a.dtype)), part)
        sums += part
    if tl.num_programs(1) > 1:
        leave(sums_of_parts, sums, rows, columns, num_rows, NUM_COLUMNS)
        if not comes_last(turns, tl.program_id(0), tl.num_programs(1)):
            return
        sums = add_parts(sums_of_parts, rows, columns, num_rows, NUM_COLUMNS, NUM_PARTS)
    finish(out, sums, bias, rows, columns, num_rows, NUM_COLUMNS, HAS_BIAS)


@triton.jit
def decode_kernel(
    out: tl.tensor,
    codes: tl.tensor,
    zeros: tl.tensor,
    scales: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    columns = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_column = columns < NUM_COLUMNS
    first = tl.program_id(1) * BLOCK
    terms = first + tl.arange(0, BLOCK)
    numbers = decode_int4(codes, zeros, scales, columns, is_column, first, NUM_TERMS, GROUP, BLOCK)
    tl.store(
        out + columns[:, None] * NUM_TERMS + terms[None, :],
        rounded(numbers, out.dtype.element_ty),
        mask=is_column[:, None] & (terms < NUM_TERMS)[None, :],
    )
