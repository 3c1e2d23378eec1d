"""Sorts pairs of a token and one of its experts by expert, and cuts them into tiles.

A product by expert has programs for each tile. So weights of an expert are read once for each tile
of its pairs, and not at all where no token chose it. Only the device knows how many tiles there
are; launches are bounded by the most that there can be.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.linear import FP32, Tile
from headrace.engine_proc.worker.cuda.kernels.numerics import next_power_of_2
from headrace.engine_proc.worker.cuda.mixtures.router import ExpertChoice
from headrace.engine_proc.worker.models.specs.decoder_spec import MixtureSpec

FEW = Tile(64, 64)
MANY = Tile(128, 128, num_warps=8)
BLOCK_PAIRS, BLOCK_COUNTS = 1024, 16


@dataclass(frozen=True)
class ExpertTiles:
    """The rows of products by expert. A pair is token * experts per token + slot."""

    pairs: Tensor  # [pairs], int32, by expert, in order
    table: Tensor  # [most tiles, 3], int32: the expert, among those here, its first pair, their end
    count: Tensor  # [1], int32, of tiles
    pairs_per_token: int
    num_experts: int  # that are here
    tile: Tile


def tile_of(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tile:
    """Return the tile for as many pairs; all tiles give the same bits."""
    if dtype == torch.float32:
        return FP32
    return FEW if num_pairs <= FEW.rows * num_experts else MANY


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Return how many tiles there are at most: each expert may have a tile with room left."""
    num_chosen = min(num_pairs, num_experts)
    return num_chosen + (num_pairs - num_chosen) // rows


def sort_by_expert(mixture: MixtureSpec, choice: ExpertChoice, dtype: torch.dtype) -> ExpertTiles:
    """Return the tiles of the experts whose weights are here, for products of a type."""
    num_pairs, num_local = choice.num_pairs, len(mixture.own_experts)
    tile = tile_of(num_pairs, mixture.num_experts, dtype)
    num_tiles = most_tiles(num_pairs, num_local, tile.rows)
    tiles = ExpertTiles(
        pairs=choice.experts.new_empty(num_pairs),
        table=choice.experts.new_empty(num_tiles, 3),
        count=choice.experts.new_empty(1),
        pairs_per_token=mixture.experts_per_token,
        num_experts=num_local,
        tile=tile,
    )
    if num_pairs:
        sort_kernel[(num_local,)](
            tiles.pairs,
            tiles.table,
            tiles.count,
            choice.experts,
            choice.counts,
            num_pairs,
            len(choice.counts),
            mixture.own_experts.start,
            NUM_EXPERTS=mixture.num_experts,
            ROWS=tile.rows,
            BLOCK_EXPERTS=next_power_of_2(mixture.num_experts),
            BLOCK_COUNTS=BLOCK_COUNTS,
            BLOCK_PAIRS=BLOCK_PAIRS,
            num_warps=4,
        )
    return tiles


def tiles_of_heads(
    num_tokens: int, num_heads: int, dtype: torch.dtype, device: torch.device
) -> ExpertTiles:
    """Return the tiles of pairs of a token and a head, each head with a matrix of its own."""
    num_pairs = num_tokens * num_heads
    tile = tile_of(num_pairs, num_heads, dtype)
    int32: dict[str, Any] = {"device": device, "dtype": torch.int32}
    heads = torch.arange(num_heads, **int32)[:, None]
    firsts = torch.arange(0, num_tokens, tile.rows, **int32)[None, :]
    ends = (firsts + tile.rows).clamp(max=num_tokens)
    columns = (heads + 0 * firsts, heads * num_tokens + firsts, heads * num_tokens + ends)
    table = torch.stack(columns, 2).flatten(0, 1)
    return ExpertTiles(
        pairs=torch.arange(num_pairs, **int32).view(num_tokens, num_heads).T.flatten(),
        table=table,
        count=torch.full((1,), len(table), **int32),
        pairs_per_token=num_heads,
        num_experts=num_heads,
        tile=tile,
    )


@triton.jit(do_not_specialize=["num_pairs", "num_counts", "first_expert"])
def sort_kernel(
    pairs: tl.tensor,
    table: tl.tensor,
    count: tl.tensor,
    experts: tl.tensor,
    counts: tl.tensor,
    num_pairs: tl.tensor,
    num_counts: tl.tensor,
    first_expert: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_COUNTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
) -> None:
    local = tl.program_id(0)
    expert, other = first_expert + local, tl.arange(0, BLOCK_EXPERTS)
    is_here = (other >= first_expert) & (other < first_expert + tl.num_programs(0))
    totals = tl.zeros([BLOCK_EXPERTS], tl.int32)
    for first in range(0, num_counts, BLOCK_COUNTS):
        row = (first + tl.arange(0, BLOCK_COUNTS)).to(tl.int64)[:, None]
        mask = (row < num_counts) & is_here[None, :]
        totals += tl.sum(tl.load(counts + row * NUM_EXPERTS + other, mask=mask, other=0), 0)
    num_tiles = (totals + ROWS - 1) // ROWS
    if local == 0:
        tl.store(count, tl.sum(num_tiles, 0))
    place = tl.sum(tl.where(other < expert, totals, 0), 0)
    end = place + tl.sum(tl.where(other == expert, totals, 0), 0)
    if place == end:
        return
    line = table + 3 * tl.sum(tl.where(other < expert, num_tiles, 0), 0)
    for first in range(place, end, ROWS):
        tl.store(line, local)
        tl.store(line + 1, first)
        tl.store(line + 2, tl.minimum(first + ROWS, end))
        line += 3
    for first in range(0, num_pairs, BLOCK_PAIRS):
        pair = first + tl.arange(0, BLOCK_PAIRS)
        is_own = tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert
        rank = tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pairs + place + rank, pair, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
