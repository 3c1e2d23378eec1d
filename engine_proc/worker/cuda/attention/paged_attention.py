"""Attention over paged keys and values: prompts, pieces of them and single tokens in one launch.

A program takes a tile: some consecutive tokens of one sequence, with the query heads of one KV
head. It takes keys in splits that begin at fixed positions, and merges splits in order. One program
may take all of them, or several share a tile, and the last one done merges (`tile_schedule.py`). So
what a token gets has the same bits whatever its batch mates, its chunk and the launch.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.attention.tile_schedule import (
    COUNT,
    ITEM_NUMBERS,
    NUM_SHARING,
    PLACE,
    POSITION,
    SEQUENCE,
    SHARE,
    TAIL,
    TOKEN,
    TURN,
    Schedule,
    Stretches,
    TileScheduler,
    Tiling,
    first_key,
    splits_of,
)
from headrace.engine_proc.worker.cuda.kernels.gpu_requirements import (
    has_small_memory,
    is_hopper,
)
from headrace.engine_proc.worker.cuda.kernels.numerics import dot, next_power_of_2, rounded, tanh
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import comes_last
from headrace.engine_proc.worker.reference.torch_attention import Reach
from headrace.engine_proc.worker.reference.torch_attention import attend as attend_densely

MINUS_INFINITY = tl.constexpr(float("-inf"))
TILING = Tiling()
WIDE_ROWS, WIDE_DIM = 128, 128
FEW_ROWS = 32
WIDEST_DIM, FEWEST_ROWS, FEW_KEYS = 256, 16, 32


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    stretches: Stretches,
    *,
    scale: float,
    window: int | None = None,
    is_chunked: bool = False,
    last_seen: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    tiling: Tiling = TILING,
    schedule: Schedule | None = None,
) -> Tensor:
    """Attend with every token to its own sequence, itself included.

    Args:
        q: [tokens, heads, head_dim]
        keys, values: [pages, page_tokens, kv_heads, head_dim], those of the batch included.
        window: tokens attended to, the newest included; None is all.
        is_chunked: only those of a token's own chunk of `window` are; chunks begin at position 0.
        last_seen: [tokens], int32, the last position that each sees, which is in the batch, too;
            None is its own. A window has an end on the other side alone.
        softcap: scores become `softcap * tanh(score / softcap)`; None is no cap.
        sinks: [heads], scores of a key that has no value.
        kv_scales: what stored keys and values are multiplied with.
        schedule: of `scheduler_of`, for this window; default: one of its own.
    Returns:
        [tokens, heads, head_dim]
    """
    num_tokens, num_heads, head_dim = q.shape
    page_tokens, num_kv_heads = keys.shape[1:3]
    group = num_heads // num_kv_heads
    assert all(tensor.is_contiguous() for tensor in (q, keys, values))
    assert stretches.page_table.stride(1) == 1
    out = q.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return out
    if schedule is None:
        max_keys = stretches.page_table.shape[1] * page_tokens
        scheduler = scheduler_of(
            tiling, num_heads, num_kv_heads, head_dim, num_tokens, max_keys, q.device
        )
        schedule = scheduler.schedule(stretches, num_tokens, window, is_chunked)
    num_warps = tiling.num_warps or (8 if head_dim > 128 and q.element_size() == 2 else 4)
    attention_kernel[(len(schedule.items), num_kv_heads)](
        out,
        schedule.partial,
        schedule.turns,
        schedule.items,
        q,
        keys,
        values,
        q if sinks is None else sinks,
        schedule.items if last_seen is None else last_seen,
        stretches.page_table,
        stretches.page_table.stride(0),
        scale * kv_scales[0],
        kv_scales[1],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, next_power_of_2(head_dim)),
        SPLIT_KEYS=tiling.split_keys,
        WINDOW=window or 0,
        IS_CHUNKED=is_chunked,
        SEES_AHEAD=last_seen is not None,
        HAS_SINKS=sinks is not None,
        GROUP=group,
        PAGE_TOKENS=page_tokens,
        BLOCK_ROWS=schedule.rows,
        BLOCK_KEYS=tiling.keys,
        SOFTCAP=softcap or 0.0,
        num_warps=num_warps * schedule.rows // tiling.num_rows(group),
        num_stages=tiling.num_stages,
        enable_fp_fusion=False,
    )
    return out


def tiling_of(head_dim: int, dtype: torch.dtype, device: torch.device) -> Tiling:
    """Return how a decoder's attention is tiled.

    A Hopper's tensor cores take 64 rows at once, and four warps have all numbers of a row. So tiles
    of 128 rows and eight warps have the same bits there, and read keys and values half as often.
    Heads of 512 bytes and tiles of 64 rows take 129 KiB of shared memory, and 84 with 32 rows.
    Heads of 512 numbers in 16 bits take 129 KiB with 32 rows and keys, and 81 with 16 rows.
    """
    if head_dim > WIDEST_DIM:
        is_narrow = dtype.itemsize > 2 or has_small_memory(device)
        rows, num_warps = (FEWEST_ROWS, 4) if is_narrow else (FEW_ROWS, 8)
        return replace(TILING, rows=rows, keys=FEW_KEYS, num_warps=num_warps)
    head_bytes = head_dim * dtype.itemsize
    if head_bytes > 2 * WIDE_DIM and has_small_memory(device):
        return replace(TILING, rows=FEW_ROWS)
    is_wide = is_hopper(device) and dtype.itemsize == 2 and head_dim <= WIDE_DIM
    return replace(TILING, wide_rows=WIDE_ROWS) if is_wide else TILING


def scheduler_of(
    tiling: Tiling,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_tokens: int,
    max_keys: int,
    device: torch.device,
) -> TileScheduler:
    """Return what schedules tiles of all query heads of a KV head; see `TileScheduler`."""
    return TileScheduler(
        tiling,
        num_heads=num_heads,
        group=num_heads // num_kv_heads,
        num_groups=num_kv_heads,
        head_dim=head_dim,
        num_tokens=num_tokens,
        max_keys=max_keys,
        device=device,
    )


@triton.jit
def attention_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    turns: tl.tensor,
    items: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sinks: tl.tensor,
    ends_seen: tl.tensor,
    page_table: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    value_scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    SEES_AHEAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> None:
    item = items + tl.program_id(0) * ITEM_NUMBERS
    sequence, count, share = tl.load(item + SEQUENCE), tl.load(item + COUNT), tl.load(item + SHARE)
    first_token, first_position = tl.load(item + TOKEN), tl.load(item + POSITION)
    begin = first_key(first_position, WINDOW, IS_CHUNKED) if WINDOW > 0 else 0
    row, dim = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    query, head = row // GROUP, tl.program_id(1) * GROUP + row % GROUP
    is_row = query < count
    last_seen, end = seen_by(ends_seen + first_token, first_position, query, count, SEES_AHEAD)
    first_split, last_split, num_sharing = splits_of(begin, end, item + NUM_SHARING, SPLIT_KEYS)
    if (count == 0) | (share >= num_sharing):
        return
    is_number = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    place = (first_token + query).to(tl.int64) * NUM_HEADS + head
    queries = tl.load(q + place[:, None] * HEAD_DIM + dim[None, :], mask=is_number, other=0.0)
    partial = room_of(partial, item, query, head, first_split, last_split, NUM_HEADS, HEAD_DIM)
    maxima, sums, mixed = attend_splits(
        queries,
        keys + tl.program_id(1) * HEAD_DIM,
        values + tl.program_id(1) * HEAD_DIM,
        page_table + sequence.to(tl.int64) * table_stride,
        first_position + query,
        last_seen,
        first_split + share,
        last_split,
        num_sharing,
        begin,
        end,
        scale,
        partial,
        is_row,
        (NUM_HEADS // GROUP) * HEAD_DIM,
        HEAD_DIM,
        PAGE_TOKENS,
        SPLIT_KEYS,
        BLOCK_KEYS,
        WINDOW,
        IS_CHUNKED,
        SOFTCAP,
    )
    is_last, num_left = num_sharing == 1, 0
    if num_sharing > 1:
        turn = tl.load(item + TURN) * tl.num_programs(1) + tl.program_id(1)
        is_last = comes_last(turns, turn, num_sharing)
        num_left = last_split - first_split + 1
    if not is_last:
        return
    for split in tl.range(first_split, first_split + num_left, num_stages=3):
        more_maxima, more_sums, more_mixed = load_split(partial, split, is_row, dim, HEAD_DIM)
        maxima, sums, mixed = merge(maxima, sums, mixed, more_maxima, more_sums, more_mixed)
    if HAS_SINKS:
        maxima, sums, mixed = add_sink(maxima, sums, mixed, sinks + head, is_row)
    store_rows(out, place, dim, is_number, sums, mixed, value_scale, HEAD_DIM)


@triton.jit
def seen_by(
    ends_seen: tl.tensor,
    first_position: tl.tensor,
    query: tl.tensor,
    count: tl.tensor,
    SEES_AHEAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the last key that each row of a tile sees, and the end of those that any sees."""
    if SEES_AHEAD:
        last_seen = tl.load(ends_seen + query, mask=query < count, other=first_position)
        return last_seen, tl.max(last_seen, 0) + 1
    else:
        return first_position + query, first_position + count


@triton.jit
def store_rows(
    out: tl.tensor,
    place: tl.tensor,
    dim: tl.tensor,
    is_number: tl.tensor,
    sums: tl.tensor,
    mixed: tl.tensor,
    value_scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Divide weighted values by the sums of weights, round them once, and store them."""
    attended = mixed / tl.where(sums > 0, sums, 1.0)[:, None] * value_scale
    to = out + place[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to, rounded(attended, out.dtype.element_ty), mask=is_number)


@triton.jit
def room_of(
    partial: tl.tensor,
    item: tl.tensor,
    query: tl.tensor,
    head: tl.tensor,
    first_split: tl.tensor,
    last_split: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """Return where rows of a shared tile leave split 0, if they had one: split s is s times
    HEAD_DIM + TAIL numbers behind it."""
    of_rows = (query * NUM_HEADS + head) * (last_split - first_split + 1) - first_split
    begin = tl.load(item + PLACE).to(tl.int64) * NUM_HEADS
    return partial + (begin + of_rows) * (HEAD_DIM + TAIL)


@triton.jit
def attend_splits(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    last_seen: tl.tensor,
    first_split: tl.tensor,
    last_split: tl.tensor,
    num_sharing: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    partial: tl.tensor,
    is_row: tl.tensor,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to splits as far as they lie in keys `begin` to `end`: to all of them, in their order.

    If programs share the tile, each takes every `num_sharing`-th, and stores what it has seen.
    """
    BLOCK_ROWS: tl.constexpr = queries.shape[0]
    BLOCK_DIM: tl.constexpr = queries.shape[1]
    dim, seen_by_all = tl.arange(0, BLOCK_DIM), tl.min(last_seen, 0) + 1
    maxima = tl.full([BLOCK_ROWS], MINUS_INFINITY, tl.float32)
    sums = tl.zeros([BLOCK_ROWS], tl.float32)
    mixed = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for split in range(first_split, last_split + 1, num_sharing):
        more_maxima, more_sums, more_mixed = attend_split(
            queries,
            keys,
            values,
            table,
            positions,
            last_seen,
            tl.maximum(split * SPLIT_KEYS, begin // BLOCK_KEYS * BLOCK_KEYS),
            tl.minimum((split + 1) * SPLIT_KEYS, end),
            seen_by_all,
            scale,
            TOKEN_STRIDE,
            HEAD_DIM,
            PAGE_TOKENS,
            BLOCK_ROWS,
            BLOCK_KEYS,
            BLOCK_DIM,
            WINDOW,
            IS_CHUNKED,
            SOFTCAP,
        )
        if num_sharing > 1:
            store_split(partial, split, is_row, dim, HEAD_DIM, more_maxima, more_sums, more_mixed)
        else:
            maxima, sums, mixed = merge(maxima, sums, mixed, more_maxima, more_sums, more_mixed)
    return maxima, sums, mixed


@triton.jit
def attend_split(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    last_seen: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    seen_by_all: tl.tensor,
    scale: tl.tensor,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to keys `begin` to `end`: return highest scores, sums of weights, weighted values.

    Every row sees the keys below `seen_by_all`, if there is no window.

    Keys of which a row sees none leave its numbers as they are, bit by bit.
    """
    maxima = tl.full([BLOCK_ROWS], MINUS_INFINITY, tl.float32)
    sums = tl.zeros([BLOCK_ROWS], tl.float32)
    mixed = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    whole = begin  # blocks below it lie in front of all rows
    if WINDOW == 0:
        whole += tl.maximum(tl.minimum(seen_by_all, end) - begin, 0) // BLOCK_KEYS * BLOCK_KEYS
    for has_masks in tl.static_range(2):
        for first in range(whole if has_masks else begin, end if has_masks else whole, BLOCK_KEYS):
            maxima, sums, mixed = attend_block(
                queries,
                keys,
                values,
                table,
                positions,
                last_seen,
                first,
                end,
                scale,
                maxima,
                sums,
                mixed,
                TOKEN_STRIDE,
                HEAD_DIM,
                PAGE_TOKENS,
                BLOCK_KEYS,
                BLOCK_DIM,
                WINDOW,
                IS_CHUNKED,
                SOFTCAP,
                has_masks == 0,
            )
    return maxima, sums, mixed


@triton.jit
def attend_block(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    last_seen: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    mixed: tl.tensor,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_SEEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to a block of keys from `first` on; if IS_SEEN, every row sees all of them."""
    dim, key = tl.arange(0, BLOCK_DIM), first + tl.arange(0, BLOCK_KEYS)
    is_dim = dim < HEAD_DIM
    is_key = (key < end) | IS_SEEN
    page = tl.load(table + key // PAGE_TOKENS, mask=is_key, other=0).to(tl.int64)
    at = (page * PAGE_TOKENS + key % PAGE_TOKENS) * TOKEN_STRIDE
    of_keys = tl.load(
        keys + at[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
    ).to(queries.dtype)
    nothing = tl.zeros([queries.shape[0], BLOCK_KEYS], tl.float32)
    scores = dot(queries, of_keys, nothing) * scale
    if SOFTCAP > 0:
        scores = tanh(scores / SOFTCAP) * SOFTCAP
    if not IS_SEEN:
        is_seen = (last_seen[:, None] - key[None, :] >= 0) & is_key[None, :]
        if IS_CHUNKED:
            is_seen = is_seen & (key[None, :] >= first_key(positions, WINDOW, True)[:, None])
        elif WINDOW > 0:
            is_seen = is_seen & (positions[:, None] - key[None, :] < WINDOW)
        scores = tl.where(is_seen, scores, MINUS_INFINITY)
    highest = tl.maximum(maxima, tl.max(scores, 1))
    base = finite(highest)
    weights = tl.exp(scores - base[:, None])
    decay = tl.exp(maxima - base)
    sums = sums * decay + tl.sum(weights, 1)
    of_values = tl.load(
        values + at[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
    ).to(queries.dtype)
    mixed = dot(rounded(weights, queries.dtype), of_values, mixed * decay[:, None])
    return highest, sums, mixed


@triton.jit
def store_split(
    partial: tl.tensor,
    split: tl.tensor,
    is_row: tl.tensor,
    dim: tl.tensor,
    HEAD_DIM: tl.constexpr,
    maxima: tl.tensor,
    sums: tl.tensor,
    mixed: tl.tensor,
) -> None:
    """Store a split's partial result, for the program that merges."""
    at = partial + split * (HEAD_DIM + TAIL)
    is_number = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(at[:, None] + dim[None, :], mixed, mask=is_number)
    tl.store(at + HEAD_DIM, maxima, mask=is_row)
    tl.store(at + HEAD_DIM + 1, sums, mask=is_row)


@triton.jit
def load_split(
    partial: tl.tensor,
    split: tl.tensor,
    is_row: tl.tensor,
    dim: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return what a split has seen, from the cache that all processors share."""
    at = partial + split * (HEAD_DIM + TAIL)
    is_number = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    mixed = tl.load(at[:, None] + dim[None, :], mask=is_number, other=0.0, cache_modifier=".cg")
    maxima = tl.load(at + HEAD_DIM, mask=is_row, other=MINUS_INFINITY, cache_modifier=".cg")
    sums = tl.load(at + HEAD_DIM + 1, mask=is_row, other=0.0, cache_modifier=".cg")
    return maxima, sums, mixed


@triton.jit
def merge(
    maxima: tl.tensor,
    sums: tl.tensor,
    mixed: tl.tensor,
    more_maxima: tl.tensor,
    more_sums: tl.tensor,
    more_mixed: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to what two splits have seen, in their order."""
    highest = tl.maximum(maxima, more_maxima)
    base = finite(highest)
    decay, more_decay = tl.exp(maxima - base), tl.exp(more_maxima - base)
    sums = sums * decay + more_sums * more_decay
    mixed = mixed * decay[:, None] + more_mixed * more_decay[:, None]
    return highest, sums, mixed


@triton.jit
def add_sink(
    maxima: tl.tensor, sums: tl.tensor, mixed: tl.tensor, sinks: tl.tensor, is_row: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to a key that has a score for each row, and no value."""
    sink = tl.load(sinks, mask=is_row, other=0.0).to(tl.float32)
    highest = tl.maximum(maxima, sink)
    base = finite(highest)
    decay = tl.exp(maxima - base)
    return highest, sums * decay + tl.exp(sink - base), mixed * decay[:, None]


@triton.jit
def finite(maxima: tl.tensor) -> tl.tensor:
    """Return 0 for the maximum of no scores, so that differences from it are no NaN."""
    return tl.where(maxima == MINUS_INFINITY, 0.0, maxima)


def reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    stretches: Stretches,
    *,
    scale: float,
    window: int | None = None,
    is_chunked: bool = False,
    last_seen: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Do as `attend`, in plain torch and fp32, sequence by sequence."""
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    reach = Reach(before=None if window is None else window - 1)
    if is_chunked:
        reach = Reach(chunk=window)
    starts = stretches.query_starts.tolist()
    for sequence, num_keys in enumerate(stretches.num_keys.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if rows.start == rows.stop:
            continue
        pages = stretches.page_table[sequence].long()
        pages = pages[: -(-num_keys // keys.shape[1])]
        out[rows] = attend_densely(
            q[rows].float(),
            keys[pages].flatten(0, 1)[:num_keys].float() * kv_scales[0],
            values[pages].flatten(0, 1)[:num_keys].float() * kv_scales[1],
            torch.arange(num_keys - (rows.stop - rows.start), num_keys, device=q.device),
            scale=scale,
            reach=reach,
            last_seen=None if last_seen is None else last_seen[rows],
            softcap=softcap,
            sinks=sinks,
        )
    return out.to(q.dtype)
