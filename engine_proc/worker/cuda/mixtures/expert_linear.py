"""Products of rows with the matrix of an expert of theirs, in one launch for all experts.

A sum is one over all terms, so many at once, in order. So tiles of all sizes have the same bits,
and a row has them wherever it stands. They are those of the expert's matrix alone, in its format,
where that takes a sum in one part.
"""

from dataclasses import dataclass
from enum import IntEnum

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.e4m3_rows import rounded_rows
from headrace.engine_proc.worker.cuda.kernels.four_bits import decode_int4, decode_mxfp4
from headrace.engine_proc.worker.cuda.kernels.gated_activation import KINDS, activate
from headrace.engine_proc.worker.cuda.kernels.gpu_requirements import has_tma
from headrace.engine_proc.worker.cuda.kernels.linear import BLOCK, GROUP_ROWS
from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, dot, rounded
from headrace.engine_proc.worker.cuda.mixtures.expert_activation import ExpertActivation, join
from headrace.engine_proc.worker.cuda.mixtures.expert_activation import (
    reference as activate_in_torch,
)
from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import ExpertTiles

FEW_COLUMNS = 32
FP8_BLOCK = 128  # terms that are multiplied at once in e4m3: all scales are of so many, or more


class ExpertFormat(IntEnum):
    """The format of experts' numbers."""

    DENSE = 0  # as they are multiplied
    FP8 = 1  # e4m3, as rows are then, too
    INT4 = 2
    MXFP4 = 3


FP8 = tl.constexpr(int(ExpertFormat.FP8))
INT4 = tl.constexpr(int(ExpertFormat.INT4))
MXFP4 = tl.constexpr(int(ExpertFormat.MXFP4))
NO_ACTIVATION = tl.constexpr(-1)  # among its kinds
SPREAD_ROWS = tl.constexpr(8)


@dataclass(frozen=True)
class ExpertWeights:
    """The matrices of a layer's experts, one after the other: [experts * columns, ...]."""

    numbers: Tensor  # [..., terms], or of 4 bits [..., terms / 2]
    bias: Tensor | None = None  # [...]
    format: ExpertFormat = ExpertFormat.DENSE
    scales: Tensor | None = None  # [..., groups], fp32; of MXFP4 exponents, uint8
    zeros: Tensor | None = None  # [..., groups], uint8, of INT4
    group_size: int = 1  # terms under a scale


def expert_linear(x: Tensor, weights: ExpertWeights, tiles: ExpertTiles) -> Tensor:
    """Return `x @ weight[expert].T + bias[expert]` of each pair, summed in fp32 and rounded once.

    Rows of pairs that are not in `tiles` are undefined.

    Args:
        x: [pairs, terms]
    Returns:
        [pairs, columns]
    """
    out = x.new_empty(len(x), len(weights.numbers) // tiles.num_experts)
    launch(out, x, weights, tiles, tiles.tile.columns, None)
    return out


def activated_expert_linear(
    x: Tensor, weights: ExpertWeights, tiles: ExpertTiles, activation: ExpertActivation
) -> Tensor:
    """Return what `activation` makes of `x @ weight[expert].T + bias[expert]` of each pair.

    Args:
        x: [tokens, terms]
        weights: with a gate of 2 * numbers columns, gates first; else of [numbers].
    Returns:
        [pairs, numbers]; 0 for pairs that are not in `tiles`, where rows are rounded to e4m3 next.
    """
    num = len(weights.numbers) // tiles.num_experts // (1 + activation.is_gated)
    new = x.new_zeros if weights.format == ExpertFormat.FP8 else x.new_empty
    out = new((len(tiles.pairs), num))
    num_columns = tiles.tile.columns // (1 + activation.is_gated)
    if weights.format == ExpertFormat.MXFP4 and not has_tma(x.device):
        num_columns = min(num_columns, FEW_COLUMNS)  # registers have no room for more before Hopper
    launch(out, x, weights, tiles, num_columns, activation)
    return out


def launch(
    out: Tensor,
    x: Tensor,
    weights: ExpertWeights,
    tiles: ExpertTiles,
    num_columns: int,
    activation: ExpertActivation | None,
) -> None:
    """Compute `out`, in tiles of so many columns. With an activation, rows of `x` are tokens."""
    num_pairs, num = out.shape
    num_terms, tile = x.shape[1], tiles.tile
    is_fp8 = weights.format == ExpertFormat.FP8
    is_packed = weights.format in (ExpertFormat.INT4, ExpertFormat.MXFP4)
    assert weights.numbers.shape[1] == (num_terms // 2 if is_packed else num_terms)
    assert x.stride(1) == 1
    assert weights.numbers.is_contiguous()
    if num_pairs == 0:
        return
    x, x_scales = rounded_rows(x, weights.group_size) if is_fp8 else (x, None)
    expert_kernel[(len(tiles.table) * cdiv(num, num_columns),)](
        out,
        x,
        x if x_scales is None else x_scales,
        weights.numbers,
        weights.numbers if weights.scales is None else weights.scales,
        weights.numbers if weights.zeros is None else weights.zeros,
        weights.numbers if weights.bias is None else weights.bias,
        tiles.pairs,
        tiles.table,
        tiles.count,
        x.stride(0),
        FORMAT=int(weights.format),
        NUM=num,
        NUM_TERMS=num_terms,
        GROUP=weights.group_size,
        PAIRS_PER_ROW=1 if activation is None else tiles.pairs_per_token,
        HAS_BIAS=weights.bias is not None,
        IS_GATED=activation is not None and activation.is_gated,
        KIND=NO_ACTIVATION.value if activation is None else KINDS.index(activation.kind),
        CLAMP=0.0 if activation is None else activation.clamp,
        BETA=0.0 if activation is None else activation.beta,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=num_columns,
        BLOCK=FP8_BLOCK if is_fp8 else BLOCK,
        GROUP_TILES=GROUP_ROWS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )


@triton.jit
def expert_kernel(
    out: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    pairs: tl.tensor,
    table: tl.tensor,
    num_tiles: tl.tensor,
    x_stride: tl.tensor,
    FORMAT: tl.constexpr,
    NUM: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    KIND: tl.constexpr,
    CLAMP: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP_TILES: tl.constexpr,
) -> None:
    NUM_COLUMN_TILES: tl.constexpr = (NUM + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    num = tl.load(num_tiles)
    if tl.program_id(0) >= num * NUM_COLUMN_TILES:
        return
    tile, column_tile = find_tile(num, NUM_COLUMN_TILES, GROUP_TILES)
    columns = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    expert, pair, is_pair = find_pairs(pairs, table, tile, BLOCK_ROWS)
    is_column = columns < NUM
    at = expert * (2 * NUM if IS_GATED else NUM) + tl.minimum(columns, NUM - 1)
    ups_at = at + NUM
    x += (pair // PAIRS_PER_ROW * x_stride)[:, None]
    x_scales += pair // PAIRS_PER_ROW * ((NUM_TERMS + GROUP - 1) // GROUP)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    ups = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, NUM_TERMS, BLOCK):
        terms = first + tl.arange(0, BLOCK)[None, :]
        a = tl.load(x + terms, mask=is_pair[:, None] & (terms < NUM_TERMS), other=0.0)
        if FORMAT == FP8 and out.dtype.element_ty == tl.float32:  # see `fp8_kernel`
            a = a.to(tl.bfloat16)
        sums = add_block(
            sums, a, x_scales, weight, scales, zeros, at, first, FORMAT, NUM_TERMS, GROUP
        )
        if IS_GATED:
            ups = add_block(
                ups, a, x_scales, weight, scales, zeros, ups_at, first, FORMAT, NUM_TERMS, GROUP
            )
    if HAS_BIAS:
        sums += tl.load(bias + at).to(tl.float32)[None, :]
    if KIND != NO_ACTIVATION:
        sums = rounded(sums, out.dtype.element_ty).to(tl.float32)
    if IS_GATED:
        if HAS_BIAS:
            ups += tl.load(bias + ups_at).to(tl.float32)[None, :]
        ups = rounded(ups, out.dtype.element_ty).to(tl.float32)
        sums = join(sums, ups, KIND, CLAMP, BETA)
    elif KIND != NO_ACTIVATION:
        sums = activate(sums, KIND)
    tl.store(
        out + pair[:, None] * NUM + columns[None, :],
        rounded(sums, out.dtype.element_ty),
        mask=is_pair[:, None] & is_column[None, :],
    )


@triton.jit
def add_block(
    sums: tl.tensor,
    a: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    at: tl.tensor,
    first: tl.tensor,
    FORMAT: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Add the products of some terms, from `first` on, of rows with the matrices' rows `at`."""
    BLOCK: tl.constexpr = a.shape[1]
    if FORMAT == INT4:
        b = decode_int4(weight, zeros, scales, at, at >= 0, first, NUM_TERMS, GROUP, BLOCK)
        return dot(a, tl.trans(rounded(b, a.dtype)), sums)
    elif FORMAT == MXFP4:
        b = decode_mxfp4(weight, scales, at, at >= 0, first, NUM_TERMS, GROUP, BLOCK)
        return dot(a, tl.trans(rounded(b, a.dtype)), sums)
    else:
        terms = first + tl.arange(0, BLOCK)[:, None]
        b = tl.load(weight + at[None, :] * NUM_TERMS + terms, mask=terms < NUM_TERMS, other=0.0)
        if FORMAT != FP8:
            return dot(a, b, sums)
        else:
            NUM_GROUPS: tl.constexpr = (NUM_TERMS + GROUP - 1) // GROUP
            group = first // GROUP
            of_rows = tl.load(x_scales + group)
            of_columns = load_once(scales + at * NUM_GROUPS + group, at >= 0)
            part = dot(a, b.to(a.dtype), tl.zeros(sums.shape, tl.float32))
            return sums + part * of_rows[:, None] * of_columns[None, :]


@triton.jit
def load_once(place: tl.tensor, is_number: tl.tensor) -> tl.tensor:
    """Load a number for each column, as the only row of a tile.

    Triton would have each thread load all that it needs of fewer numbers than there are threads. On
    Blackwell registers have no room for that.
    """
    is_loaded = (tl.arange(0, SPREAD_ROWS) == 0)[:, None] & is_number[None, :]
    return tl.sum(tl.load(place[None, :], mask=is_loaded, other=0.0), 0)


@triton.jit
def find_tile(
    num_tiles: tl.tensor, NUM_COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return a program's tile of pairs and its tile of columns. Neighbors have as much in common as
    can be: GROUP tiles of pairs and the same columns, then the next columns."""
    group = tl.program_id(0) // (GROUP * NUM_COLUMN_TILES)
    in_group = tl.program_id(0) % (GROUP * NUM_COLUMN_TILES)
    num_together = tl.minimum(num_tiles - group * GROUP, GROUP)
    return group * GROUP + in_group % num_together, in_group // num_together


@triton.jit
def find_pairs(
    pairs: tl.tensor, table: tl.tensor, tile: tl.tensor, BLOCK_ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the expert of a tile, its pairs, and which of them there are."""
    line = table + 3 * tile
    place = tl.load(line + 1) + tl.arange(0, BLOCK_ROWS)
    is_pair = place < tl.load(line + 2)
    pair = tl.load(pairs + place, mask=is_pair, other=0).to(tl.int64)
    return tl.load(line).to(tl.int64), pair, is_pair


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    experts: Tensor,
    activation: ExpertActivation | None = None,
) -> Tensor:
    """Do as both, in plain torch; other pairs have zeros.

    Args:
        experts: [tokens, experts per token]; -1 is none that is here.
    """
    of_pairs = experts.flatten()
    rows = x if activation is None else x.repeat_interleave(experts.shape[1], 0)
    out = x.new_zeros(len(of_pairs), weight.shape[1])
    for expert in range(len(weight)):
        own = of_pairs == expert
        offset = None if bias is None else bias[expert].float()
        out[own] = F.linear(rows[own].float(), weight[expert].float(), offset).to(x.dtype)
    if activation is None:
        return out
    return activate_in_torch(out, activation).masked_fill(of_pairs[:, None] < 0, 0)
