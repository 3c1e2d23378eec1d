"""Which program of attention takes which tile, and which of its splits. The device decides.

A tile is some consecutive tokens of one sequence; its keys come in splits. A program takes all
splits of its tile in order. Of a sequence with more splits than a quota several programs share each
tile: each takes every n-th split and leaves what it has seen, and the last one done merges. The
quota follows from the lengths of all sequences in the step. So a long one among short ones is
shared, and one among others of its length is not. What a token gets has the same bits either way.

Sequences are shared in the order of the batch while their splits have room. One that alone exceeds
all room takes none; any other one takes its own from those behind it, whether it found it or not.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.engine_proc.worker.cuda.kernels.numerics import INTERPRETED
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import new_turns

TAIL = tl.constexpr(4)  # of what a split leaves: a maximum, a sum, and room, to end at 16 bytes
# Numbers of an item. One without tokens is no work.
SEQUENCE = tl.constexpr(0)
TOKEN = tl.constexpr(1)  # the tile's first, in the batch
COUNT = tl.constexpr(2)  # of its tokens
POSITION = tl.constexpr(3)  # of its first token in the sequence
SHARE = tl.constexpr(4)  # which of the programs that share the tile this is,
NUM_SHARING = tl.constexpr(5)  # of how many
PLACE = tl.constexpr(6)  # where the tile leaves its splits, in numbers of splits of a token
TURN = tl.constexpr(7)  # which of the shared tiles it is
ITEM_NUMBERS = tl.constexpr(8)
BLOCK = 128
ENOUGH_PROGRAMS = 8 if INTERPRETED else 264  # to fill a GPU; the interpreter runs idle ones, too


@dataclass(frozen=True)
class Tiling:
    """The tile and split sizes of attention. Other sizes give other bits."""

    rows: int = 64  # of a tile, a token having one per query head; more where it has more heads
    keys: int = 64  # that are loaded together
    split_keys: int = 256
    enough_programs: int = ENOUGH_PROGRAMS  # as many more than tiles have shares of long ones,
    max_partial_bytes: int = 256 << 20  # if what these leave to be merged is no more than this
    num_warps: int | None = None  # default: by the size of a head
    num_stages: int = 2  # a third is for page numbers, and costs more than it hides
    wide_rows: int | None = None  # of a tile of prompts that fill a GPU so, too

    def num_rows(self, group: int) -> int:
        """Return the rows of a tile, where so many query heads share a KV head."""
        return max(self.rows, 1 << (group - 1).bit_length())

    def rows_for(self, group: int, num_groups: int, num_tokens: int, num_sequences: int) -> int:
        """Return the rows of a step's tiles: the wide ones where prompts have enough of them."""
        rows, wide_tokens = self.num_rows(group), (self.wide_rows or 0) // group
        if self.wide_rows is None or self.wide_rows <= rows:
            return rows
        is_enough = num_tokens // wide_tokens * num_groups >= self.enough_programs
        return self.wide_rows if is_enough and num_tokens >= wide_tokens * num_sequences else rows

    def num_splits(self, max_keys: int) -> int:
        """Return the number of splits for sequences of at most `max_keys` keys."""
        return -(-max_keys // self.split_keys)


@dataclass(frozen=True)
class Stretches:
    """The sequence boundaries of a batch's tokens, on the device. A sequence may be empty.

    A sequence may have tokens and no keys, as padding: they attend to nothing, and get zeros.
    """

    query_starts: Tensor  # [sequences + 1], int32, each sequence's first token in the batch
    num_keys: Tensor  # [sequences], int32, up to its last token in the batch, that one included
    page_table: Tensor  # [sequences, max_pages], int32


@dataclass(frozen=True)
class Schedule:
    """What the programs of a launch compute, and where they meet. One launch at a time may use it.

    Schedules of one `TileScheduler` have all but their items in common.
    """

    items: Tensor  # [programs of each group of heads, ITEM_NUMBERS], int32
    rows: int  # of a tile
    partial: Tensor  # [splits of a token, heads, head_dim + TAIL], fp32
    turns: Tensor  # of `new_turns`


class TileScheduler:
    """Schedules the tiles of a decoder's steps, and has the memory that shared tiles need.

    Args:
        group: query heads in a tile; `num_groups` tiles have all heads of a token.
        num_tokens, max_keys: of a step and of a sequence, at most.
    """

    def __init__(
        self,
        tiling: Tiling,
        *,
        num_heads: int,
        group: int,
        num_groups: int,
        head_dim: int,
        num_tokens: int,
        max_keys: int,
        device: torch.device,
    ) -> None:
        self._tiling, self._group, self._num_groups = tiling, group, num_groups
        most = num_tokens * tiling.num_splits(max_keys)
        num_extra = tiling.enough_programs // num_groups if most > num_tokens else 0
        self._num_extra = max(1, num_extra)  # a single one shares nothing: its quota is all splits
        numbers = num_heads, head_dim + int(TAIL)
        capacity = min(most, tiling.max_partial_bytes // (4 * numbers[0] * numbers[1]))
        self._partial = torch.empty(capacity if num_extra else 0, *numbers, device=device)
        self._turns = new_turns(self._num_extra * num_groups, device)

    def schedule(
        self,
        stretches: Stretches,
        num_tokens: int,
        window: int | None = None,
        is_chunked: bool = False,
    ) -> Schedule:
        """Schedule a step of so many tokens, for layers with a window or none; see `attend`."""
        num_sequences = len(stretches.num_keys)
        rows = self._tiling.rows_for(self._group, self._num_groups, num_tokens, num_sequences)
        tile_tokens = rows // self._group
        num_items = num_tokens // tile_tokens + num_sequences + self._num_extra
        items = stretches.num_keys.new_empty(num_items, int(ITEM_NUMBERS))
        schedule_kernel[(num_sequences,)](
            items,
            stretches.query_starts,
            stretches.num_keys,
            num_sequences,
            num_items,
            self._num_extra,
            len(self._partial),
            TILE_TOKENS=tile_tokens,
            SPLIT_KEYS=self._tiling.split_keys,
            WINDOW=window or 0,
            IS_CHUNKED=is_chunked,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
        return Schedule(items, rows, self._partial, self._turns)


@triton.jit(do_not_specialize=["num_sequences", "num_items", "num_extra", "capacity"])
def schedule_kernel(
    items: tl.tensor,
    query_starts: tl.tensor,
    num_keys: tl.tensor,
    num_sequences: tl.tensor,
    num_items: tl.tensor,
    num_extra: tl.tensor,
    capacity: tl.tensor,
    TILE_TOKENS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a sequence's items; programs beyond the last one's are without work.

    Items are `num_extra` more than tiles at most: a share is a quota of splits, but for the last.
    """
    sequence = tl.program_id(0)
    total = 0
    for first in range(0, num_sequences, BLOCK):
        others = first + tl.arange(0, BLOCK)
        _, count, _, num_splits = stretch_of(
            query_starts, num_keys, others, num_sequences, SPLIT_KEYS, WINDOW, IS_CHUNKED
        )
        total += tl.sum(tl.cdiv(count, TILE_TOKENS) * num_splits, 0)
    quota = tl.maximum(tl.cdiv(total, num_extra), 1)
    first_item, turn, place, num_sharing, num_used, left = 0, 0, 0, 0, 0, 0
    for first in range(0, num_sequences, BLOCK):
        others = first + tl.arange(0, BLOCK)
        _, count, _, num_splits = stretch_of(
            query_starts, num_keys, others, num_sequences, SPLIT_KEYS, WINDOW, IS_CHUNKED
        )
        num_tiles = tl.cdiv(count, TILE_TOKENS)
        leaves = tl.where(num_splits > quota, count * num_splits, 0)
        leaves = tl.where(leaves <= capacity, leaves, 0)
        ends = left + tl.cumsum(leaves, 0)
        is_shared = (leaves > 0) & (ends <= capacity)
        sharing = tl.where(is_shared, tl.cdiv(num_splits, quota), 1)
        is_before, is_own = others < sequence, others == sequence
        first_item += tl.sum(tl.where(is_before, num_tiles * sharing, 0), 0)
        turn += tl.sum(tl.where(is_before & is_shared, num_tiles, 0), 0)
        place += tl.sum(tl.where(is_own, ends - leaves, 0), 0)
        num_sharing += tl.sum(tl.where(is_own, sharing, 0), 0)
        num_used += tl.sum(num_tiles * sharing, 0)
        left += tl.sum(leaves, 0)
    start, count, position, num_splits = stretch_of(
        query_starts, num_keys, sequence, num_sequences, SPLIT_KEYS, WINDOW, IS_CHUNKED
    )
    num_tiles = tl.cdiv(count, TILE_TOKENS)
    for first in range(0, num_tiles * num_sharing, BLOCK):
        number = first + tl.arange(0, BLOCK)
        tile = num_tiles - 1 - number // num_sharing  # the last has the most keys
        begin = tile * TILE_TOKENS
        item = items + (first_item + number) * ITEM_NUMBERS
        is_item = number < num_tiles * num_sharing
        tl.store(item + SEQUENCE, sequence, mask=is_item)
        tl.store(item + TOKEN, start + begin, mask=is_item)
        tl.store(item + COUNT, tl.minimum(count - begin, TILE_TOKENS), mask=is_item)
        tl.store(item + POSITION, position + begin, mask=is_item)
        tl.store(item + SHARE, number % num_sharing, mask=is_item)
        tl.store(item + NUM_SHARING, num_sharing, mask=is_item)
        tl.store(item + PLACE, place + begin * num_splits, mask=is_item)
        tl.store(item + TURN, turn + tile, mask=is_item)
    if sequence == num_sequences - 1:
        for first in range(num_used, num_items, BLOCK):
            number = first + tl.arange(0, BLOCK)
            tl.store(items + number * ITEM_NUMBERS + COUNT, 0, mask=number < num_items)


@triton.jit
def stretch_of(
    query_starts: tl.tensor,
    num_keys: tl.tensor,
    sequence: tl.tensor,
    num_sequences: tl.tensor,
    SPLIT_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return sequences' first token in the batch and count, its position, and splits of keys."""
    is_there = sequence < num_sequences
    start = tl.load(query_starts + sequence, mask=is_there, other=0)
    count = tl.load(query_starts + sequence + 1, mask=is_there, other=0) - start
    keys = tl.load(num_keys + sequence, mask=is_there, other=0)
    position = keys - count
    lowest = first_key(position, WINDOW, IS_CHUNKED) // SPLIT_KEYS if WINDOW > 0 else 0
    return start, count, position, tl.maximum(keys - 1, 0) // SPLIT_KEYS - lowest + 1


@triton.jit
def first_key(position: tl.tensor, WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr) -> tl.tensor:
    """Return the first key that a token sees through a window."""
    if IS_CHUNKED:
        return tl.maximum(position, 0) // WINDOW * WINDOW
    else:
        return tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def splits_of(
    begin: tl.tensor, end: tl.tensor, num_sharing: tl.tensor, SPLIT_KEYS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the first and the last split of a tile's keys, and how many programs have any.

    Args:
        num_sharing: of the tile's item, in memory.
    """
    first, last = begin // SPLIT_KEYS, (end - 1) // SPLIT_KEYS
    return first, last, tl.maximum(tl.minimum(tl.load(num_sharing), last - first + 1), 1)


def first_key_of(position: int, window: int | None, is_chunked: bool) -> int:
    """Do as `first_key`, in plain Python; without a window it is the first of all."""
    if window is None:
        return 0
    return max(position, 0) // window * window if is_chunked else max(position - window + 1, 0)


def reference(
    stretches: Stretches,
    *,
    tile_tokens: int,
    split_keys: int,
    window: int | None,
    num_extra: int,
    capacity: int,
    is_chunked: bool = False,
) -> list[list[int]]:
    """Return the items of `TileScheduler.schedule` that are work, in plain Python."""
    starts, keys = stretches.query_starts.tolist(), stretches.num_keys.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    positions = [ends - count for ends, count in zip(keys, counts, strict=True)]
    lowest = [first_key_of(at, window, is_chunked) // split_keys for at in positions]
    splits = [max(n - 1, 0) // split_keys - low + 1 for n, low in zip(keys, lowest, strict=True)]
    tiles = [-(-count // tile_tokens) for count in counts]
    total = sum(num * of_each for num, of_each in zip(tiles, splits, strict=True))
    quota = max(-(-total // num_extra), 1)
    items: list[list[int]] = []
    turn = left = 0
    for sequence, (start, count, num) in enumerate(zip(starts, counts, splits, strict=False)):
        leaves = count * num if num > quota and count * num <= capacity else 0
        num_sharing = -(-num // quota) if leaves and left + leaves <= capacity else 1
        for tile in reversed(range(tiles[sequence])):
            begin = tile * tile_tokens
            of_tile = [sequence, start + begin, min(count - begin, tile_tokens)]
            of_tile.append(positions[sequence] + begin)
            place = left + begin * num
            items += [
                [*of_tile, share, num_sharing, place, turn + tile] for share in range(num_sharing)
            ]
        turn += tiles[sequence] if num_sharing > 1 else 0
        left += leaves
    return items
