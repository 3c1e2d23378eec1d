"""Batch-invariant linear layers: every sum has one fixed order, whatever the number of rows.

A library chooses its algorithm by the number of rows, and another algorithm gives other bits. Here
a sum consists of parts whose boundaries depend on the matrix alone. With few rows there are few
tiles, so programs share one (split-K): each computes a part, and the last to finish adds them in
order. With many rows a program computes all parts of a larger tile, in the same order.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.engine_proc.worker.cuda.kernels.gpu_requirements import has_tma
from headrace.engine_proc.worker.cuda.kernels.numerics import INTERPRETED, cdiv, dot, rounded
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import comes_last

BLOCK = 64  # terms that are multiplied at once: the same for all tiles, or bits would differ
ENOUGH_PROGRAMS = 132  # to keep a GPU's memory busy: one for each processor of an H100
PART_BLOCKS = 4  # of a part, at least
TMA_BYTES = 16  # at which the accelerator's rows begin
GROUP_ROWS = 8  # tiles of rows whose programs run together, and read the same columns


@dataclass(frozen=True)
class Tile:
    """The tile of a program, and its launch parameters. Other tiles give the same bits."""

    rows: int
    columns: int
    num_warps: int = 4
    num_stages: int = 4
    has_tma: bool = False  # the tensor memory accelerator loads it, if the matrices allow that


# The least time over a layer's matrices on an H200, and no more memory than an Ada has.
FEW = Tile(64, 64)
SHARED = Tile(64, 64, num_stages=6)  # few programs: each has more on its way
SOME = Tile(128, 128, num_stages=3, has_tma=True)
SOME_SHARED = Tile(64, 64, has_tma=True)
MANY = Tile(128, 128, num_warps=8, has_tma=True)
WIDE = Tile(128, 256, 8, 3, has_tma=True)  # too large where parts have sums of their own
TILE_ROWS = (64, 256)  # the most that are few, and some
FP32 = Tile(64, 64, num_stages=3)  # twice as large in memory, and not for tensor cores
SUMS_TOGETHER = tl.constexpr(4)  # that a thread loads at once: rows of sums have whole ones
MOST_UNROLLED = tl.constexpr(16)  # parts; Triton 3.9 has no registers for the places of more


@cache  # each launch asks
def part_terms(num_columns: int, num_terms: int) -> int:
    """Return how many terms a part of a sum has, but for the last."""
    num_tiles, num_blocks = -(-num_columns // BLOCK), -(-num_terms // BLOCK)
    wanted = -(-ENOUGH_PROGRAMS // num_tiles)
    return BLOCK * max(PART_BLOCKS, -(-num_blocks // wanted))


def tile_of(num_rows: int, num_columns: int, num_terms: int, dtype: torch.dtype) -> Tile:
    """Return the tile that is fastest on an H200. The interpreter has no room for the widest.

    For some rows of a sum in parts, an H200 has measured those of small matrices alone.
    """
    num_parts = cdiv(num_terms, part_terms(num_columns, num_terms))
    if dtype == torch.float32:
        return FP32
    if num_rows <= TILE_ROWS[0]:
        return FEW if num_parts == 1 else SHARED
    if num_rows <= TILE_ROWS[1]:
        return SOME if num_parts == 1 else tile_of_parts(num_columns, num_terms)
    return MANY if num_parts > 1 or INTERPRETED else WIDE


@cache  # each launch asks
def tile_of_parts(num_columns: int, num_terms: int) -> Tile:
    """Return the tile of some rows, whatever their number: one kernel does for all of them.

    It is the large one, if no number has a processor load a tenth more.
    """
    few, most = TILE_ROWS
    is_large = all(
        10 * busiest_bytes(MANY, num_rows, num_columns, num_terms)
        <= 11 * busiest_bytes(SOME_SHARED, num_rows, num_columns, num_terms)
        for num_rows in range(2 * few, most + 1, few)  # others have as many tiles as one of these
    )
    return MANY if is_large else SOME_SHARED


def busiest_bytes(tile: Tile, num_rows: int, num_columns: int, num_terms: int) -> int:
    """Return what goes through the processor that has the most of a product's programs, bytes.

    These are tiles of factors in 16 bits, and sums of parts that are left and added.
    """
    num_part = part_terms(num_columns, num_terms)
    num_parts = cdiv(num_terms, num_part)
    num_tiles = cdiv(num_columns, tile.columns) * cdiv(num_rows, tile.rows)
    num_together = grid_of(num_tiles, num_parts)[1]
    turns = cdiv(num_tiles * num_together, ENOUGH_PROGRAMS)
    terms = num_part if num_together > 1 else num_terms
    factors = turns * terms * (tile.rows + tile.columns) * 2
    sums = (turns + num_parts) * tile.rows * tile.columns * 4 if num_together > 1 else 0
    return factors + sums


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    turns: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`, summed in fp32 and rounded once.

    Args:
        x: [rows, terms]
        weight: [columns, terms]
        bias: [columns]
        turns: ENOUGH_PROGRAMS of `new_turns`; no other kernel may use them meanwhile. Without,
            no tile is shared.
        dtype: of the result; default: that of x.
    """
    num_rows, num_terms = x.shape
    num_columns = len(weight)
    assert weight.shape[1] == num_terms
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    out = x.new_empty(num_rows, num_columns, dtype=dtype)
    if num_rows == 0:
        return out
    num_part = part_terms(num_columns, num_terms)
    num_parts = cdiv(num_terms, num_part)
    tile = tile_of(num_rows, num_columns, num_terms, x.dtype)
    num_tiles = cdiv(num_columns, tile.columns) * cdiv(num_rows, tile.rows)
    grid = grid_of(num_tiles, 1 if turns is None else num_parts)
    has_tma = tile.has_tma and can_use_tma(x, weight)
    linear_kernel[grid](
        out,
        room_for_sums(out, grid),
        out if turns is None else turns,
        descriptor(x, tile.rows) if has_tma else x,
        descriptor(weight, tile.columns) if has_tma else weight,
        weight if bias is None else bias,
        num_rows,
        x.stride(0),
        NUM_COLUMNS=num_columns,
        NUM_TERMS=num_terms,
        PART_TERMS=num_part,
        HAS_BIAS=bias is not None,
        HAS_TMA=has_tma,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK=BLOCK,
        GROUP=GROUP_ROWS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


def grid_of(num_tiles: int, num_parts: int) -> tuple[int, int]:
    """Return the programs of a product. Those of few tiles share each, with a part for each."""
    return num_tiles, num_parts if num_tiles < ENOUGH_PROGRAMS else 1


def room_for_sums(out: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return where programs that share a tile of a product leave their sums."""
    num_rows, num_columns = out.shape
    num_parts, together = grid[1] if grid[1] > 1 else 0, SUMS_TOGETHER.value
    width = cdiv(num_columns, together) * together
    return out.new_empty(num_parts * num_rows, width, dtype=torch.float32)


def can_use_tma(x: Tensor, weight: Tensor) -> bool:
    """Whether the GPU has a tensor memory accelerator that can load both matrices' tiles."""
    is_aligned = all(
        tensor.data_ptr() % TMA_BYTES == 0
        and tensor.stride(0) * tensor.element_size() % TMA_BYTES == 0
        for tensor in (x, weight)
    )
    return is_aligned and has_tma(x.device)


def descriptor(matrix: Tensor, num_rows: int) -> TensorDescriptor:
    """Return what tells the accelerator of a matrix, which it loads in blocks of so many rows."""
    return TensorDescriptor.from_tensor(matrix, [num_rows, BLOCK])


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    out: tl.tensor,
    sums_of_parts: tl.tensor,
    turns: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    PART_TERMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TMA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    NUM_PARTS: tl.constexpr = (NUM_TERMS + PART_TERMS - 1) // PART_TERMS
    row, column = find_tile(num_rows, NUM_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
    rows = (row + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    columns = column + tl.arange(0, BLOCK_COLUMNS)
    if NUM_PARTS == 1:
        sums = multiply(
            x,
            weight,
            row,
            column,
            0,
            NUM_TERMS,
            num_rows,
            x_stride,
            NUM_COLUMNS,
            NUM_TERMS,
            HAS_TMA,
            BLOCK_ROWS,
            BLOCK_COLUMNS,
            BLOCK,
        )
    else:
        sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        first, num_apart = tl.program_id(1) * PART_TERMS, tl.num_programs(1) * PART_TERMS
        for begin in range(first, NUM_TERMS, num_apart):
            end = tl.minimum(begin + PART_TERMS, NUM_TERMS)
            sums += multiply(
                x,
                weight,
                row,
                column,
                begin,
                end,
                num_rows,
                x_stride,
                NUM_COLUMNS,
                NUM_TERMS,
                HAS_TMA,
                BLOCK_ROWS,
                BLOCK_COLUMNS,
                BLOCK,
            )
        if tl.num_programs(1) > 1:
            leave(sums_of_parts, sums, rows, columns, num_rows, NUM_COLUMNS)
            if not comes_last(turns, tl.program_id(0), tl.num_programs(1)):
                return
            sums = add_parts(sums_of_parts, rows, columns, num_rows, NUM_COLUMNS, NUM_PARTS)
    finish(out, sums, bias, rows, columns, num_rows, NUM_COLUMNS, HAS_BIAS)


@triton.jit
def find_tile(
    num_rows: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first row and column of a program's tile. Neighbors have as much in common as can
    be: GROUP tiles of rows and the same columns, then the next columns."""
    NUM_TILES: tl.constexpr = (NUM_COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    tile = tl.program_id(0)
    group = tile // (GROUP * NUM_TILES)
    in_group = tile % (GROUP * NUM_TILES)
    num_together = tl.minimum(tl.cdiv(num_rows, BLOCK_ROWS) - group * GROUP, GROUP)
    row_tile = group * GROUP + in_group % num_together
    return row_tile * BLOCK_ROWS, (in_group // num_together) * BLOCK_COLUMNS


@triton.jit
def multiply(
    x: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    HAS_TMA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Multiply a tile's terms from `begin`, in a block's beginning, to `end`.

    If HAS_TMA, factors are descriptors, which give zeros beyond the ends.
    """
    sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(begin, end, BLOCK):
        if HAS_TMA:
            a, b = x.load([row, first]), weight.load([column, first]).T
        else:
            a = load_block(x, row, first, num_rows, x_stride, NUM_TERMS, BLOCK_ROWS, BLOCK)
            b = load_block(
                weight, column, first, NUM_COLUMNS, NUM_TERMS, NUM_TERMS, BLOCK_COLUMNS, BLOCK
            ).T
        sums = dot(a, b, sums)
    return sums


@triton.jit
def load_block(
    matrix: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    NUM_TERMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return terms from `first` on of rows from `row` on, with zeros beyond the ends."""
    rows, terms = row + tl.arange(0, BLOCK_ROWS), first + tl.arange(0, BLOCK)
    is_term = (terms < NUM_TERMS) | (NUM_TERMS % BLOCK == 0)
    return tl.load(
        matrix + rows.to(tl.int64)[:, None] * stride + terms[None, :],
        mask=(rows < num_rows)[:, None] & is_term[None, :],
        other=0.0,
    )


@triton.jit
def leave(
    sums_of_parts: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    num_rows: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
) -> None:
    """Store a part's sums."""
    WIDTH: tl.constexpr = (NUM_COLUMNS + SUMS_TOGETHER - 1) // SUMS_TOGETHER * SUMS_TOGETHER
    at = (tl.program_id(1) * num_rows + rows)[:, None] * WIDTH + columns[None, :]
    is_number = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    tl.store(sums_of_parts + at, sums, mask=is_number)


@triton.jit
def add_parts(
    sums_of_parts: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    num_rows: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
) -> tl.tensor:
    """Add what programs have left, in order."""
    WIDTH: tl.constexpr = (NUM_COLUMNS + SUMS_TOGETHER - 1) // SUMS_TOGETHER * SUMS_TOGETHER
    is_number = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    at = rows[:, None] * WIDTH + columns[None, :]
    sums = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    place, stride = sums_of_parts + at, num_rows.to(tl.int64) * WIDTH
    if NUM_PARTS <= MOST_UNROLLED:
        for part in tl.static_range(NUM_PARTS):
            sums += tl.load(place + part * stride, mask=is_number, other=0.0, cache_modifier=".cg")
    else:
        for _ in range(NUM_PARTS):
            sums += tl.load(place, mask=is_number, other=0.0, cache_modifier=".cg")
            place += stride
    return sums


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
