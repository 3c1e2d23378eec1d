"""Attention over paged latents: keys and values of all heads are products of one latent.

Queries come multiplied by their heads' key matrices, so all heads meet the same latents. What they
attend to is a sum of latents. A program takes a tile: some tokens of one sequence, with some of
their heads. Splits of keys, and the sharing of tiles, are as in `paged_attention.py`.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.attention.paged_attention import (
    MINUS_INFINITY,
    finite,
    load_split,
    merge,
    room_of,
    store_split,
)
from headrace.engine_proc.worker.cuda.attention.tile_schedule import (
    COUNT,
    ITEM_NUMBERS,
    NUM_SHARING,
    POSITION,
    SEQUENCE,
    SHARE,
    TOKEN,
    TURN,
    Schedule,
    Stretches,
    TileScheduler,
    Tiling,
    splits_of,
)
from headrace.engine_proc.worker.cuda.kernels.gpu_requirements import has_small_memory, has_tma
from headrace.engine_proc.worker.cuda.kernels.numerics import cdiv, dot, next_power_of_2, rounded
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import comes_last
from headrace.engine_proc.worker.reference.torch_attention import Reach
from headrace.engine_proc.worker.reference.torch_attention import attend as attend_densely

LATENT_TILING = Tiling(rows=64, keys=32, num_warps=8)  # not measured
FEW_ROWS = 32


def attend_latents(
    q: Tensor,
    turned: Tensor,
    latents: Tensor,
    stretches: Stretches,
    *,
    scale: float,
    kv_scale: float = 1.0,
    tiling: Tiling | None = None,
    schedule: Schedule | None = None,
) -> Tensor:
    """Attend with every token to its own sequence, itself included.

    Args:
        q: [tokens, heads, rank], what meets latents.
        turned: [tokens, heads, rope_dim], what meets the keys that heads share.
        latents: [pages, page_tokens, 1, rank + rope_dim], those of the batch included.
        kv_scale: what stored numbers are multiplied with.
        tiling: default: that of the GPU. Other tilings give other bits.
        schedule: of `latent_scheduler`; default: one of its own.
    Returns:
        sums of latents, [tokens, heads, rank]
    """
    num_tokens, num_heads, rank = q.shape
    rope_dim = turned.shape[2]
    assert all(tensor.is_contiguous() for tensor in (q, turned, latents))
    assert stretches.page_table.stride(1) == 1
    assert latents.shape[2:] == (1, rank + rope_dim)
    out = torch.empty_like(q)
    if num_tokens == 0:
        return out
    tiling = tiling or latent_tiling(q.device)
    if schedule is None:
        max_keys = stretches.page_table.shape[1] * latents.shape[1]
        scheduler = latent_scheduler(tiling, num_heads, rank, num_tokens, max_keys, q.device)
        schedule = scheduler.schedule(stretches, num_tokens)
    group, num_groups = groups_of(num_heads, tiling)
    latent_attention_kernel[(len(schedule.items), num_groups)](
        out,
        schedule.partial,
        schedule.turns,
        schedule.items,
        q,
        turned,
        latents,
        stretches.page_table,
        stretches.page_table.stride(0),
        scale * kv_scale,
        kv_scale,
        NUM_HEADS=num_heads,
        RANK=rank,
        BLOCK_RANK=max(16, next_power_of_2(rank)),
        ROPE_DIM=rope_dim,
        BLOCK_ROPE=max(16, next_power_of_2(rope_dim)),
        SPLIT_KEYS=tiling.split_keys,
        GROUP=group,
        PAGE_TOKENS=latents.shape[1],
        BLOCK_ROWS=schedule.rows,
        BLOCK_KEYS=tiling.keys,
        num_warps=tiling.num_warps or 4,
        num_stages=tiling.num_stages,
        enable_fp_fusion=False,
    )
    return out


def latent_tiling(device: torch.device) -> Tiling:
    """Return how attention over latents is tiled.

    Tensor cores of a Hopper or a Blackwell take 64 rows of shared memory. Those of older GPUs take
    registers, 16 rows at once: tiles of 32 fit into these, and into the 99 KiB of graphics cards.
    """
    has_room = has_tma(device) and not has_small_memory(device)
    return LATENT_TILING if has_room else replace(LATENT_TILING, rows=FEW_ROWS)


def groups_of(num_heads: int, tiling: Tiling) -> tuple[int, int]:
    """Return the heads that a tile has of a token, and how many tiles have all of them."""
    group = min(num_heads, tiling.rows)
    return group, cdiv(num_heads, group)


def latent_scheduler(
    tiling: Tiling,
    num_heads: int,
    rank: int,
    num_tokens: int,
    max_keys: int,
    device: torch.device,
) -> TileScheduler:
    """Return what schedules tiles of heads that meet latents; see `TileScheduler`."""
    group, num_groups = groups_of(num_heads, tiling)
    return TileScheduler(
        tiling,
        num_heads=num_heads,
        group=group,
        num_groups=num_groups,
        head_dim=rank,
        num_tokens=num_tokens,
        max_keys=max_keys,
        device=device,
    )


@triton.jit
def latent_attention_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    turns: tl.tensor,
    items: tl.tensor,
    q: tl.tensor,
    turned: tl.tensor,
    latents: tl.tensor,
    page_table: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> None:
    item = items + tl.program_id(0) * ITEM_NUMBERS
    if tl.load(item + COUNT) == 0:
        return
    if tl.load(item + NUM_SHARING) > 1:
        attend_tile(
            out,
            partial,
            turns,
            item,
            q,
            turned,
            latents,
            page_table,
            table_stride,
            scale,
            value_scale,
            NUM_HEADS,
            RANK,
            BLOCK_RANK,
            ROPE_DIM,
            BLOCK_ROPE,
            SPLIT_KEYS,
            GROUP,
            PAGE_TOKENS,
            BLOCK_ROWS,
            BLOCK_KEYS,
            True,
        )
    else:
        attend_tile(
            out,
            partial,
            turns,
            item,
            q,
            turned,
            latents,
            page_table,
            table_stride,
            scale,
            value_scale,
            NUM_HEADS,
            RANK,
            BLOCK_RANK,
            ROPE_DIM,
            BLOCK_ROPE,
            SPLIT_KEYS,
            GROUP,
            PAGE_TOKENS,
            BLOCK_ROWS,
            BLOCK_KEYS,
            False,
        )


@triton.jit
def attend_tile(
    out: tl.tensor,
    partial: tl.tensor,
    turns: tl.tensor,
    item: tl.tensor,
    q: tl.tensor,
    turned: tl.tensor,
    latents: tl.tensor,
    page_table: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    IS_SHARED: tl.constexpr,
) -> None:
    """Attend with an item's tile. Registers have no room for a merge beside stored splits."""
    sequence, count, share = tl.load(item + SEQUENCE), tl.load(item + COUNT), tl.load(item + SHARE)
    first_token, first_position = tl.load(item + TOKEN), tl.load(item + POSITION)
    first_split, last_split, num_sharing = splits_of(
        0, first_position + count, item + NUM_SHARING, SPLIT_KEYS
    )
    row, dim, rope = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    query, head = row // GROUP, tl.program_id(1) * GROUP + row % GROUP
    is_row = (query < count) & (head < NUM_HEADS)
    place = (first_token + query).to(tl.int64) * NUM_HEADS + head
    is_number = is_row[:, None] & (dim < RANK)[None, :]
    queries = tl.load(q + place[:, None] * RANK + dim[None, :], mask=is_number, other=0.0)
    is_rope = is_row[:, None] & (rope < ROPE_DIM)[None, :]
    rotated = tl.load(turned + place[:, None] * ROPE_DIM + rope[None, :], mask=is_rope, other=0.0)
    partial = room_of(partial, item, query, head, first_split, last_split, NUM_HEADS, RANK)
    maxima = tl.full([BLOCK_ROWS], MINUS_INFINITY, tl.float32)
    sums = tl.zeros([BLOCK_ROWS], tl.float32)
    mixed = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
    for split in range(first_split + share, last_split + 1, num_sharing):
        more_maxima, more_sums, more_mixed = attend_split(
            queries,
            rotated,
            latents,
            page_table + sequence.to(tl.int64) * table_stride,
            first_position + query,
            split * SPLIT_KEYS,
            tl.minimum((split + 1) * SPLIT_KEYS, first_position + count),
            scale,
            RANK,
            ROPE_DIM,
            PAGE_TOKENS,
            BLOCK_KEYS,
        )
        if IS_SHARED:
            store_split(partial, split, is_row, dim, RANK, more_maxima, more_sums, more_mixed)
        else:
            maxima, sums, mixed = merge(maxima, sums, mixed, more_maxima, more_sums, more_mixed)
    is_last = share < num_sharing
    if IS_SHARED:
        if is_last:
            turn = tl.load(item + TURN) * tl.num_programs(1) + tl.program_id(1)
            is_last = comes_last(turns, turn, num_sharing)
        for split in range(first_split, tl.where(is_last, last_split + 1, first_split)):
            more_maxima, more_sums, more_mixed = load_split(partial, split, is_row, dim, RANK)
            maxima, sums, mixed = merge(maxima, sums, mixed, more_maxima, more_sums, more_mixed)
    if is_last:
        attended = mixed / tl.where(sums > 0, sums, 1.0)[:, None] * value_scale
        to = out + place[:, None] * RANK + dim[None, :]
        tl.store(to, rounded(attended, out.dtype.element_ty), mask=is_number)


@triton.jit
def attend_split(
    queries: tl.tensor,
    rotated: tl.tensor,
    latents: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to keys `begin` to `end`: return highest scores, sums of weights, weighted latents.

    Keys of which a row sees none leave its numbers as they are, bit by bit.
    """
    dim, rope = tl.arange(0, queries.shape[1]), tl.arange(0, rotated.shape[1])
    is_dim, is_rope = (dim < RANK)[None, :], (rope < ROPE_DIM)[None, :]
    maxima = tl.full([queries.shape[0]], MINUS_INFINITY, tl.float32)
    sums = tl.zeros([queries.shape[0]], tl.float32)
    mixed = tl.zeros(queries.shape, tl.float32)
    nothing = tl.zeros([queries.shape[0], BLOCK_KEYS], tl.float32)
    for first in range(begin, end, BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        is_key = key < end
        page = tl.load(table + key // PAGE_TOKENS, mask=is_key, other=0).to(tl.int64)
        of_keys = latents + ((page * PAGE_TOKENS + key % PAGE_TOKENS) * (RANK + ROPE_DIM))[:, None]
        own = tl.load(of_keys + dim[None, :], mask=is_key[:, None] & is_dim, other=0.0)
        shared = tl.load(of_keys + RANK + rope[None, :], mask=is_key[:, None] & is_rope, other=0.0)
        own, shared = own.to(queries.dtype), shared.to(queries.dtype)
        scores = dot(rotated, tl.trans(shared), dot(queries, tl.trans(own), nothing)) * scale
        is_seen = (positions[:, None] >= key[None, :]) & is_key[None, :]
        scores = tl.where(is_seen, scores, MINUS_INFINITY)
        highest = tl.maximum(maxima, tl.max(scores, 1))
        base = finite(highest)
        weights, decay = tl.exp(scores - base[:, None]), tl.exp(maxima - base)
        sums = sums * decay + tl.sum(weights, 1)
        mixed = dot(rounded(weights, queries.dtype), own, mixed * decay[:, None])
        maxima = highest
    return maxima, sums, mixed


def reference(
    q: Tensor,
    turned: Tensor,
    latents: Tensor,
    stretches: Stretches,
    *,
    scale: float,
    kv_scale: float = 1.0,
) -> Tensor:
    """Do as `attend_latents`, in plain torch and fp32, sequence by sequence."""
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    queries, rank = torch.cat([q, turned], 2).float(), q.shape[2]
    starts = stretches.query_starts.tolist()
    for sequence, num_keys in enumerate(stretches.num_keys.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if rows.start == rows.stop:
            continue
        pages = stretches.page_table[sequence, : -(-num_keys // latents.shape[1])].long()
        known = latents[pages].flatten(0, 1)[:num_keys].float() * kv_scale
        out[rows] = attend_densely(
            queries[rows],
            known,
            known[..., :rank],
            torch.arange(num_keys - (rows.stop - rows.start), num_keys, device=q.device),
            scale=scale,
            reach=Reach(),
        )
    return out.to(q.dtype)
