"""Attention over paged latents: keys and values of all heads are products of one latent.

Queries come multiplied by their heads' key matrices, so all heads meet the same latents. What they
attend to is a sum of latents. A program takes a tile: some tokens of one sequence, with some of
their heads. Splits of keys, and the sharing of tiles, are as in `attention.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.attention import (
    MINUS_INFINITY,
    TAIL,
    Stretches,
    Tiling,
    find_tile,
    finite,
    load_split,
    merge,
    splits_of,
    store_split,
)
from headrace.engine_proc.worker.cuda.kernels.numerics import dot, rounded
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import comes_last, new_turns
from headrace.engine_proc.worker.reference.torch_attention import Reach
from headrace.engine_proc.worker.reference.torch_attention import attend as attend_densely

LATENT_TILING = Tiling(rows=64, keys=32, num_warps=8)  # not measured


def attend_latents(
    q: Tensor,
    turned: Tensor,
    latents: Tensor,
    stretches: Stretches,
    *,
    scale: float,
    kv_scale: float = 1.0,
    tiling: Tiling = LATENT_TILING,
    turns: Tensor | None = None,
) -> Tensor:
    """Attend with every token to its own sequence, itself included.

    Args:
        q: [tokens, heads, rank], what meets latents.
        turned: [tokens, heads, rope_dim], what meets the keys that heads share.
        latents: [pages, page_tokens, 1, rank + rope_dim], those of the batch included.
        kv_scale: what stored numbers are multiplied with.
        turns: `tiling.enough_programs` of `new_turns`; no other kernel may use them meanwhile.
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
    group = min(num_heads, tiling.rows)
    num_groups = triton.cdiv(num_heads, group)
    num_tiles = tiling.num_tiles(num_tokens, len(stretches.num_keys), group)
    num_splits = tiling.num_splits(stretches.max_keys)
    split_bytes = 4 * num_tokens * num_heads * (rank + int(TAIL))
    num_sharing = tiling.num_sharing(num_tiles * num_groups, stretches.max_keys, split_bytes)
    num_rows = num_tokens * num_heads * num_splits if num_sharing > 1 else 0
    if turns is None:
        turns = new_turns(tiling.enough_programs, q.device)
    latent_attention_kernel[(num_tiles, num_groups, num_sharing)](
        out,
        q.new_empty(num_rows, rank + int(TAIL), dtype=torch.float32),
        turns,
        q,
        turned,
        latents,
        stretches.query_starts,
        stretches.num_keys,
        stretches.page_table,
        len(stretches.num_keys),
        stretches.page_table.stride(0),
        num_splits,
        scale * kv_scale,
        kv_scale,
        NUM_HEADS=num_heads,
        RANK=rank,
        BLOCK_RANK=max(16, triton.next_power_of_2(rank)),
        ROPE_DIM=rope_dim,
        BLOCK_ROPE=max(16, triton.next_power_of_2(rope_dim)),
        SPLIT_KEYS=tiling.split_keys,
        GROUP=group,
        PAGE_TOKENS=latents.shape[1],
        BLOCK_ROWS=tiling.rows,
        BLOCK_KEYS=tiling.keys,
        IS_SPLIT=num_sharing > 1,
        num_warps=tiling.num_warps or 4,
        num_stages=tiling.num_stages,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(do_not_specialize=["num_sequences", "num_splits"])
def latent_attention_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    turns: tl.tensor,
    q: tl.tensor,
    turned: tl.tensor,
    latents: tl.tensor,
    query_starts: tl.tensor,
    num_keys: tl.tensor,
    page_table: tl.tensor,
    num_sequences: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
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
    IS_SPLIT: tl.constexpr,
) -> None:
    TILE_TOKENS: tl.constexpr = BLOCK_ROWS // GROUP
    sequence, start, count, first_query = find_tile(query_starts, num_sequences, TILE_TOKENS)
    if first_query >= count:
        return
    first_position = tl.load(num_keys + sequence) - count
    end = first_position + tl.minimum(first_query + TILE_TOKENS, count)
    first_split, last_split, num_sharing = splits_of(0, end, SPLIT_KEYS)
    if tl.program_id(2) >= num_sharing:
        return
    row, dim, rope = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    query, head = first_query + row // GROUP, tl.program_id(1) * GROUP + row % GROUP
    is_row = (row < TILE_TOKENS * GROUP) & (query < count) & (head < NUM_HEADS)
    place = (start + query).to(tl.int64) * NUM_HEADS + head
    is_number = is_row[:, None] & (dim < RANK)[None, :]
    queries = tl.load(q + place[:, None] * RANK + dim[None, :], mask=is_number, other=0.0)
    is_rope = is_row[:, None] & (rope < ROPE_DIM)[None, :]
    rotated = tl.load(turned + place[:, None] * ROPE_DIM + rope[None, :], mask=is_rope, other=0.0)
    partial += place * num_splits * (RANK + TAIL)
    maxima = tl.full([BLOCK_ROWS], MINUS_INFINITY, tl.float32)
    sums = tl.zeros([BLOCK_ROWS], tl.float32)
    mixed = tl.zeros([BLOCK_ROWS, BLOCK_RANK], tl.float32)
    for split in range(first_split + tl.program_id(2), last_split + 1, tl.num_programs(2)):
        more_maxima, more_sums, more_mixed = attend_split(
            queries,
            rotated,
            latents,
            page_table + sequence.to(tl.int64) * table_stride,
            first_position + query,
            split * SPLIT_KEYS,
            tl.minimum((split + 1) * SPLIT_KEYS, end),
            scale,
            RANK,
            ROPE_DIM,
            PAGE_TOKENS,
            BLOCK_KEYS,
        )
        if IS_SPLIT:
            store_split(partial, split, is_row, dim, RANK, more_maxima, more_sums, more_mixed)
        else:
            maxima, sums, mixed = merge(maxima, sums, mixed, more_maxima, more_sums, more_mixed)
    if IS_SPLIT:
        tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if not comes_last(turns, tile, num_sharing):
            return
        for split in range(first_split, last_split + 1):
            more_maxima, more_sums, more_mixed = load_split(partial, split, is_row, dim, RANK)
            maxima, sums, mixed = merge(maxima, sums, mixed, more_maxima, more_sums, more_mixed)
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
