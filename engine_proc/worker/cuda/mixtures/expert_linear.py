"""Products of rows with the matrix of an expert of theirs, in one launch for all experts.

A sum is one over all terms, 64 at once, in order. So tiles of all sizes have the same bits, and a
row has them wherever it stands. They are those of `linear` where that takes a sum in one part.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from headrace.engine_proc.worker.cuda.kernels.gated_activation import KINDS
from headrace.engine_proc.worker.cuda.kernels.linear import BLOCK, GROUP_ROWS
from headrace.engine_proc.worker.cuda.kernels.numerics import dot, rounded
from headrace.engine_proc.worker.cuda.mixtures.expert_gate import ExpertGate, join
from headrace.engine_proc.worker.cuda.mixtures.expert_gate import reference as gate_in_torch
from headrace.engine_proc.worker.cuda.mixtures.expert_tiles import ExpertTiles


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: ExpertTiles) -> Tensor:
    """Return `x @ weight[expert].T + bias[expert]` of each pair, summed in fp32 and rounded once.

    Rows of pairs that are not in `tiles` are undefined.

    Args:
        x: [pairs, terms]
        weight: [experts, columns, terms]
        bias: [experts, columns]
    Returns:
        [pairs, columns]
    """
    out = x.new_empty(len(x), weight.shape[1])
    launch(out, x, weight, bias, tiles, tiles.tile.columns, None)
    return out


def gated_expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tiles: ExpertTiles, gate: ExpertGate
) -> Tensor:
    """Return what `gate` makes of `x @ weight[expert].T + bias[expert]` of each pair.

    Args:
        x: [tokens, terms]
        weight: [experts, 2 * numbers, terms], gates first
        bias: [experts, 2 * numbers]
    Returns:
        [pairs, numbers]
    """
    out = x.new_empty(len(tiles.pairs), weight.shape[1] // 2)
    launch(out, x, weight, bias, tiles, tiles.tile.columns // 2, gate)
    return out


def launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: ExpertTiles,
    num_columns: int,
    gate: ExpertGate | None,
) -> None:
    """Compute `out`, in tiles of so many columns."""
    assert x.shape[1] == weight.shape[2]
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    num_pairs, num = out.shape
    tile = tiles.tile
    if num_pairs == 0:
        return
    expert_kernel[(len(tiles.table) * triton.cdiv(num, num_columns),)](
        out,
        x,
        weight,
        weight if bias is None else bias,
        tiles.pairs,
        tiles.table,
        tiles.count,
        x.stride(0),
        NUM=num,
        NUM_TERMS=x.shape[1],
        PAIRS_PER_ROW=1 if gate is None else tiles.pairs_per_token,
        HAS_BIAS=bias is not None,
        IS_GATED=gate is not None,
        KIND=0 if gate is None else KINDS.index(gate.activation),
        CLAMP=0.0 if gate is None else gate.clamp,
        BETA=0.0 if gate is None else gate.beta,
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=num_columns,
        BLOCK=BLOCK,
        GROUP=GROUP_ROWS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )


@triton.jit
def expert_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    pairs: tl.tensor,
    table: tl.tensor,
    num_tiles: tl.tensor,
    x_stride: tl.tensor,
    NUM: tl.constexpr,
    NUM_TERMS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    KIND: tl.constexpr,
    CLAMP: tl.constexpr,
    BETA: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    NUM_COLUMN_TILES: tl.constexpr = (NUM + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    num = tl.load(num_tiles)
    if tl.program_id(0) >= num * NUM_COLUMN_TILES:
        return
    tile, column_tile = find_tile(num, NUM_COLUMN_TILES, GROUP)
    columns = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    expert, pair, is_pair = find_pairs(pairs, table, tile, BLOCK_ROWS)
    is_column = columns < NUM
    MATRIX: tl.constexpr = 2 * NUM if IS_GATED else NUM
    rows = x + (pair // PAIRS_PER_ROW)[:, None] * x_stride
    of_first = weight + (expert * MATRIX + columns)[None, :] * NUM_TERMS
    sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    ups = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, NUM_TERMS, BLOCK):
        terms = first + tl.arange(0, BLOCK)
        is_term = terms < NUM_TERMS
        a = tl.load(rows + terms[None, :], mask=is_pair[:, None] & is_term[None, :], other=0.0)
        is_weight = is_column[None, :] & is_term[:, None]
        b = tl.load(of_first + terms[:, None], mask=is_weight, other=0.0)
        sums = dot(a, b, sums)
        if IS_GATED:
            b = tl.load(of_first + NUM * NUM_TERMS + terms[:, None], mask=is_weight, other=0.0)
            ups = dot(a, b, ups)
    at = bias + expert * MATRIX + columns
    if HAS_BIAS:
        sums += tl.load(at, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        if HAS_BIAS:
            ups += tl.load(at + NUM, mask=is_column, other=0.0).to(tl.float32)[None, :]
        sums = rounded(sums, out.dtype.element_ty).to(tl.float32)
        ups = rounded(ups, out.dtype.element_ty).to(tl.float32)
        sums = join(sums, ups, KIND, CLAMP, BETA)
    tl.store(
        out + pair[:, None] * NUM + columns[None, :],
        rounded(sums, out.dtype.element_ty),
        mask=is_pair[:, None] & is_column[None, :],
    )


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
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, gate: ExpertGate | None = None
) -> Tensor:
    """Do as both, in plain torch; other pairs have zeros.

    Args:
        experts: [tokens, experts per token]; -1 is none that is here.
    """
    of_pairs = experts.flatten()
    rows = x if gate is None else x.repeat_interleave(experts.shape[1], 0)
    out = x.new_zeros(len(of_pairs), weight.shape[1])
    for expert in range(len(weight)):
        own = of_pairs == expert
        offset = None if bias is None else bias[expert].float()
        out[own] = F.linear(rows[own].float(), weight[expert].float(), offset).to(x.dtype)
    return out if gate is None else gate_in_torch(out, gate).masked_fill(of_pairs[:, None] < 0, 0)
