"""Long sequences are shared by programs, whatever the others of a step; the rest is not."""

from collections import Counter
from math import ceil

import pytest
import torch
from gpu_tests import first_of

from headrace.engine_proc.worker.cuda.attention import tile_schedule
from headrace.engine_proc.worker.cuda.attention.tile_schedule import (
    COUNT,
    NUM_SHARING,
    Schedule,
    Stretches,
    TileScheduler,
    Tiling,
    reference,
)

FEW_HEADS = {"num_heads": 4, "group": 2, "num_groups": 2, "head_dim": 16}
# Tokens and keys of sequences: a prompt, tokens, nothing, a piece of a prompt, padding.
MIXED = [(20, 20), (1, 500), (0, 9), (1, 33), (11, 300), (1, 1), (5, 0)]


def stretches_of(parts: list[tuple[int, int]], device: torch.device) -> Stretches:
    counts, keys = (torch.tensor(column) for column in zip(*parts, strict=True))
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)])
    table = torch.zeros(len(parts), 1).int().to(device)
    return Stretches(starts.int().to(device), keys.int().to(device), table)


def schedule(
    parts: list[tuple[int, int]],
    tiling: Tiling,
    device: torch.device,
    window: int | None = None,
    is_chunked: bool = False,
    **heads: int,
) -> Schedule:
    num_tokens, max_keys = sum(count for count, _ in parts), max(keys for _, keys in parts)
    scheduler = TileScheduler(
        tiling, num_tokens=num_tokens, max_keys=max_keys, device=device, **heads
    )
    return scheduler.schedule(stretches_of(parts, device), num_tokens, window, is_chunked)


def work(schedule: Schedule) -> list[list[int]]:
    """Return the items that are no idle programs'."""
    return [item for item in schedule.items.tolist() if item[int(COUNT)]]


def on_hopper(parts: list[tuple[int, int]]) -> list[list[int]]:
    """Return the items of Llama 3 8B, which has 8 KV heads, on one GPU."""
    return reference(
        stretches_of(parts, torch.device("cpu")),
        tile_tokens=16,
        split_keys=256,
        window=None,
        num_extra=264 // 8,
        capacity=Tiling().max_partial_bytes // (4 * 32 * 132),
    )


def sharing_of(parts: list[tuple[int, int]]) -> list[bool]:
    """Return whether programs share the tiles of each sequence, on a Hopper."""
    shared = {item[0] for item in on_hopper(parts) if item[int(NUM_SHARING)] > 1}
    return [sequence in shared for sequence in range(len(parts))]


def longest(items: list[list[int]]) -> int:
    """Return the splits of 256 keys that a program takes one after the other, at most."""
    ends, sharing = zip(
        *[(at + num, shares) for _, _, num, at, _, shares, _, _ in items], strict=True
    )
    return max(ceil(ceil(end / 256) / shares) for end, shares in zip(ends, sharing, strict=True))


@pytest.mark.parametrize(
    ("window", "is_chunked"), first_of(2, [(None, False), (70, True), (70, False)])
)
@pytest.mark.parametrize("max_partial_bytes", [1 << 20, 4 * 4 * 20 * 40, 0])
@pytest.mark.parametrize("enough_programs", first_of(2, [12, 0, 100]))
def test_items_are_those_of_plain_python(
    window: int | None,
    is_chunked: bool,
    max_partial_bytes: int,
    enough_programs: int,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    monkeypatch.setattr(tile_schedule, "BLOCK", 4)  # fewer than there are of anything
    tiling = Tiling(16, 16, 32, enough_programs, max_partial_bytes)
    found = schedule(MIXED, tiling, device, window, is_chunked, **FEW_HEADS)
    assert work(found) == reference(
        stretches_of(MIXED, device),
        tile_tokens=8,
        split_keys=32,
        window=window,
        is_chunked=is_chunked,
        num_extra=max(1, enough_programs // 2),
        capacity=len(found.partial),
    )
    if enough_programs == 12 and max_partial_bytes == 1 << 20 and not is_chunked:
        assert max(item[int(NUM_SHARING)] for item in work(found)) > 1


def test_a_long_sequence_among_short_ones_is_shared() -> None:
    """Of 64 sequences one has 128 splits: one program took all of them in a row."""
    items = on_hopper([(1, 200)] * 40 + [(1, 32768)] + [(1, 200)] * 23)
    assert longest(items) == 6
    assert len(items) == 63 + 22


def test_sequences_of_one_length_are_not_shared() -> None:
    assert len(on_hopper([(1, 4096)] * 64)) == 64
    alone = on_hopper([(1, 4096)])
    assert len(alone) == 16
    assert longest(alone) == 1


def test_a_prompt_beside_a_long_sequence_leaves_it_room() -> None:
    """A prompt's splits have no room. Its tiles are many, and as long as the sequence's share."""
    items = on_hopper([(512, 512), (1, 131072)])
    assert {item[int(NUM_SHARING)] for item in items if item[0] == 0} == {1}
    assert longest(items) <= 18


@pytest.mark.parametrize(("count", "before"), [(16, 131072), (32, 65536), (64, 32768)])
def test_a_few_tokens_behind_a_long_prefix_are_shared(count: int, before: int) -> None:
    assert sharing_of([(count, count + before)]) == [True]


def test_a_sequence_without_room_takes_that_of_others() -> None:
    """The second has no room for its splits; the third would have, and comes behind it."""
    prefix = (16, 16 + 131072)
    assert sharing_of([prefix, prefix, (1, 131072)]) == [True, False, False]
    assert sharing_of([(1, 131072), prefix, prefix]) == [True, True, False]


def test_no_two_programs_leave_splits_in_one_place(device: torch.device) -> None:
    parts = [(3, 300), (1, 90), (9, 500), (1, 700)]
    found = schedule(parts, Tiling(16, 16, 32, 400), device, **FEW_HEADS)
    taken: Counter[int] = Counter()
    for _, _, count, position, share, sharing, place, _ in work(found):
        if sharing > 1 and share == 0:
            num = count * (-(-(position + count) // 32))
            taken.update(range(place, place + num))
    assert set(taken.values()) == {1}
    assert max(taken) < len(found.partial)
    turns = {(item[0], item[7]) for item in work(found) if item[int(NUM_SHARING)] > 1}
    assert len({turn for _, turn in turns}) == len(turns)
    assert max(turn for _, turn in turns) * 2 < len(found.turns)
