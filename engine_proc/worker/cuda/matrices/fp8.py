"""A matrix of 8-bit floats (e4m3): rows that meet it are rounded to such floats, too.

Scales are of whole rows, of both factors. The library computes that product in bf16, and its bits
may depend on the number of rows. Or they are of as many terms as a block of the checkpoint has. Our
own kernel does that; the library cannot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.checkpoints.fp8_weight import Fp8Weight
from headrace.engine_proc.worker.checkpoints.weights import Weight
from headrace.engine_proc.worker.cuda.kernels.e4m3_rows import (
    E4M3,
    rounded_reference,
    rounded_rows,
)
from headrace.engine_proc.worker.cuda.kernels.gpu_requirements import has_fp8
from headrace.engine_proc.worker.cuda.kernels.linear import (
    ENOUGH_PROGRAMS,
    GROUP_ROWS,
    add_parts,
    find_tile,
    finish,
    grid_of,
    leave,
    room_for_sums,
)
from headrace.engine_proc.worker.cuda.kernels.linear import part_terms as dense_part_terms
from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, dot
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import comes_last, new_turns
from headrace.engine_proc.worker.cuda.matrices.upload import pieces, send

BLOCK, BLOCK_TERMS = 64, 128  # rows and columns of a tile, and its terms
NUM_STAGES = 4  # of loads: a tile of both factors has 16 KB
LIBRARY_UNIT = 16  # the library needs columns and terms in multiples of this


@dataclass(frozen=True)
class Fp8Matrix:
    """A `Matrix`."""

    weight: Tensor  # [columns, terms], e4m3
    scales: Tensor  # [columns, groups], fp32
    group_size: int  # terms under a scale: all of them, or a multiple of 128
    bias: Tensor | None = None  # [columns]
    turns: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", new_turns(ENOUGH_PROGRAMS, self.weight.device))

    @classmethod
    def of(
        cls, parts: Sequence[Weight], bias: Tensor | None, device: torch.device
    ) -> "Fp8Matrix | None":
        """Load a matrix that is stored in this format; None if it cannot be kept."""
        own = [part for part in parts if isinstance(part, Fp8Weight)]
        num_terms = parts[0].shape[1]
        sizes = {min(num_terms, part.block[1]) for part in own}
        if len(own) < len(parts) or len(sizes) > 1 or not has_fp8(device):
            return None
        size = sizes.pop()
        if size < num_terms and size % BLOCK_TERMS:
            return None
        codes = send(own, lambda piece: piece.codes.lines.copy(), device, torch.uint8)
        scales = send(own, lambda piece: piece.row_scales(), device, torch.float32)
        return cls(codes.view(E4M3), scales, size, bias)

    @classmethod
    def rounded(
        cls, parts: Sequence[Weight], bias: Tensor | None, device: torch.device
    ) -> "Fp8Matrix":
        """Load a matrix and round its rows, each by a scale of its own."""
        num_rows, num_terms = sum(part.shape[0] for part in parts), parts[0].shape[1]
        codes = torch.empty(num_rows, num_terms, device=device, dtype=E4M3)
        scales = torch.empty(num_rows, 1, device=device)
        first = 0
        for piece in pieces(parts):
            own = slice(first, first + piece.shape[0])
            numbers = torch.from_numpy(piece.to_float32()).to(device)
            codes[own], scales[own] = rounded_reference(numbers, num_terms)
            first = own.stop
        return cls(codes, scales, num_terms, bias)

    def apply(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`, [rows, columns]."""
        codes, scales = rounded_rows(x, self.group_size)
        if len(x) == 0 or x.dtype != torch.bfloat16 or not self.is_for_library:
            return product(x, codes, scales, self)
        return torch._scaled_mm(  # torch has no other name for it
            codes,
            self.weight.t(),
            scale_a=scales,
            scale_b=self.scales.t(),
            bias=self.bias,
            out_dtype=torch.bfloat16,
        )

    @property
    def is_for_library(self) -> bool:
        """Whether the library can take it."""
        is_even = all(size % LIBRARY_UNIT == 0 for size in self.weight.shape)
        return is_even and self.scales.shape[1] == 1


def fp8_reference(x: Tensor, matrix: Fp8Matrix) -> Tensor:
    """Do as `apply`, in plain torch."""
    size = matrix.group_size
    codes, scales = rounded_reference(x, size)
    a = codes.float() * scales.repeat_interleave(size, 1)[:, : x.shape[1]]
    b = matrix.weight.float() * matrix.scales.repeat_interleave(size, 1)[:, : x.shape[1]]
    return F.linear(a, b, None if matrix.bias is None else matrix.bias.float()).to(x.dtype)


def part_terms(num_columns: int, num_terms: int) -> int:
    """Return how many terms a part of a sum has: whole blocks, of a scale each."""
    return cdiv(dense_part_terms(num_columns, num_terms), BLOCK_TERMS) * BLOCK_TERMS


def product(x: Tensor, codes: Tensor, scales: Tensor, matrix: Fp8Matrix) -> Tensor:
    """Multiply what `rounded_rows` has made of `x`, each sum in one fixed order."""
    num_rows, num_terms = codes.shape
    num_columns = len(matrix.weight)
    assert matrix.weight.is_contiguous()
    assert matrix.group_size >= num_terms or matrix.group_size % BLOCK_TERMS == 0
    out = x.new_empty(num_rows, num_columns)
    if num_rows == 0:
        return out
    num_part = part_terms(num_columns, num_terms)
    num_tiles = cdiv(num_columns, BLOCK) * cdiv(num_rows, BLOCK)
    grid = grid_of(num_tiles, cdiv(num_terms, num_part))
    fp8_kernel[grid](
        out,
        room_for_sums(out, grid),
        matrix.turns,
        codes,
        scales,
        matrix.weight,
        matrix.scales,
        out if matrix.bias is None else matrix.bias,
        num_rows,
        NUM_COLUMNS=num_columns,
        NUM_TERMS=num_terms,
        PART_TERMS=num_part,
        GROUP=matrix.group_size,
        HAS_BIAS=matrix.bias is not None,
        IS_WIDE=x.dtype == torch.float32,
        BLOCK=BLOCK,
        BLOCK_TERMS=BLOCK_TERMS,
        GROUP_ROWS=GROUP_ROWS,
        num_warps=4,
        num_stages=NUM_STAGES,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def fp8_kernel(
    out: tl.tensor,
    sums_of_parts: tl.tensor,
    turns: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    num_rows: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    PART_TERMS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
) -> None:
    """Multiply in e4m3; if IS_WIDE, in bf16, which has all numbers of e4m3. Hopper's tensor cores
    sum products of e4m3 with some 14 bits (DeepSeek-V3's report, 3.3.2)."""
    NUM_PARTS: tl.constexpr = (NUM_TERMS + PART_TERMS - 1) // PART_TERMS
    row, column = find_tile(num_rows, NUM_COLUMNS, BLOCK, BLOCK, GROUP_ROWS)
    rows = (row + tl.arange(0, BLOCK)).to(tl.int64)
    columns = (column + tl.arange(0, BLOCK)).to(tl.int64)
    sums = tl.zeros([BLOCK, BLOCK], tl.float32)
    for begin in range(tl.program_id(1) * PART_TERMS, NUM_TERMS, tl.num_programs(1) * PART_TERMS):
        part = tl.zeros([BLOCK, BLOCK], tl.float32)
        for first in range(begin, tl.minimum(begin + PART_TERMS, NUM_TERMS), BLOCK_TERMS):
            part = add_block(
                part,
                x,
                x_scales,
                weight,
                scales,
                rows,
                columns,
                first,
                num_rows,
                NUM_COLUMNS,
                NUM_TERMS,
                GROUP,
                IS_WIDE,
                BLOCK_TERMS,
            )
        sums += part
    if tl.num_programs(1) > 1:
        leave(sums_of_parts, sums, rows, columns, num_rows, NUM_COLUMNS)
        if not comes_last(turns, tl.program_id(0), tl.num_programs(1)):
            return
        sums = add_parts(sums_of_parts, rows, columns, num_rows, NUM_COLUMNS, NUM_PARTS)
    finish(out, sums, bias, rows, columns, num_rows, NUM_COLUMNS, HAS_BIAS)


@triton.jit
def add_block(
    sums: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WIDE: tl.constexpr,
    BLOCK_TERMS: tl.constexpr,
) -> tl.tensor:
    """Add the products of a block of terms, which have one scale in each row and column."""
    NUM_GROUPS: tl.constexpr = (NUM_TERMS + GROUP - 1) // GROUP
    is_column, is_row = columns < NUM_COLUMNS, rows < num_rows
    terms = first + tl.arange(0, BLOCK_TERMS)
    is_term = terms < NUM_TERMS
    a = tl.load(
        x + rows[:, None] * NUM_TERMS + terms[None, :],
        mask=is_row[:, None] & is_term[None, :],
        other=0.0,
    )
    b = tl.load(
        weight + columns[None, :] * NUM_TERMS + terms[:, None],
        mask=is_column[None, :] & is_term[:, None],
        other=0.0,
    )
    if IS_WIDE:
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    group = first // GROUP
    row_scales = tl.load(x_scales + rows * NUM_GROUPS + group, mask=is_row, other=0.0)
    column_scales = tl.load(scales + columns * NUM_GROUPS + group, mask=is_column, other=0.0)
    part = dot(a, b, tl.zeros(sums.shape, tl.float32))
    return sums + part * row_scales[:, None] * column_scales[None, :]
