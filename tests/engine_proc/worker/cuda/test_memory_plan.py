"""Pages are what is left of the GPU's share, and never more than what is free."""

import re
from array import array
from functools import partial

import numpy as np
import pytest

from headrace.engine_proc.worker.cuda.device_memory import measure
from headrace.engine_proc.worker.cuda.largest_step import largest_step, token_counts
from headrace.engine_proc.worker.cuda.memory_plan import (
    GRAPH_BYTES,
    SPARE_BYTES,
    Figures,
    check_bytes,
    check_split,
    graph_bytes,
    split_room,
)
from headrace.engine_proc.worker.execution.cache_split import CacheSplit
from headrace.engine_proc.worker.execution.cpu_sampler import ROW
from headrace.engine_proc.worker.execution.runner import batch_of
from headrace.errors import ConfigError

GIB = 1 << 30


check = partial(check_split, state_bytes=0, page_tokens=32, max_model_len=4096, max_num_seqs=256)


def figures(**gib: float) -> Figures:
    """Return those of a GPU of 100 GiB, where a worker has 20, 5 of them libraries' and a step's"""
    usual = {"total": 100, "free_before": 99, "free": 77, "held": 20, "peak": 23, "graphs": 1}
    return Figures(**{name: int(size * GIB) for name, size in (usual | gib).items()})


@pytest.mark.parametrize(
    ("gib", "share", "room"),
    [
        ({}, 0.9, 90 - 20 - 2 - 3 - 1),
        ({}, 0.5, 50 - 26),
        ({}, 1.0, 77 - 3 - 1 - SPARE_BYTES / GIB),  # what the context took is not free
        ({}, 0.2, 0),
        # Half the GPU is another process's, which does not reduce our share, ...
        ({"free_before": 50, "free": 28}, 0.4, 40 - 26),
        # ... but no share exceeds the free memory.
        ({"free_before": 50, "free": 28}, 0.9, 28 - 4 - SPARE_BYTES / GIB),
        # Another gave back 30 meanwhile, or took 10, which counts as ours.
        ({"free_before": 50, "free": 58}, 0.9, 58 - 4 - SPARE_BYTES / GIB),
        ({"free": 67}, 0.9, 90 - 20 - 12 - 3 - 1),
        # A tower that was there before counts in the share, and what it has is not free.
        ({"free_before": 93, "free": 71, "tower": 6}, 0.9, 90 - 26 - 6),
        ({"free_before": 93, "free": 71, "tower": 6}, 1.0, 71 - 4 - SPARE_BYTES / GIB),
    ],
)
def test_room_is_what_the_share_leaves_and_what_is_free(
    gib: dict[str, float], share: float, room: float
) -> None:
    assert figures(**gib).room(share) == pytest.approx(room * GIB, abs=1)


@pytest.mark.parametrize(
    ("gib", "share", "way"),
    [
        ({}, 0.2, "raise --gpu-memory-utilization 0.2, lower --max-model-len 4096"),
        ({"free_before": 24, "free": 1}, 0.9, "end the others, lower --max-model-len 4096"),
        ({"total": 24, "free_before": 23.5, "free": 1}, 0.9, "lower --max-model-len 4096 or "),
    ],
)
def test_too_little_room_is_said_with_what_to_change(
    gib: dict[str, float], share: float, way: str
) -> None:
    said = figures(**gib)
    with pytest.raises(ConfigError, match=re.escape(way)) as error:
        check(said, share, CacheSplit(127, 0))
    assert "room for keys and values of 4064 tokens, less than one sequence" in str(error.value)
    assert "weights 20.0, the largest step 3.0" in str(error.value)
    assert "\n" not in str(error.value)
    assert "tower" not in str(error.value)
    check(said, share, CacheSplit(128, 0))


def test_a_tower_is_named_among_what_takes_the_memory() -> None:
    said = figures(free_before=20, free=1, tower=75)
    with pytest.raises(ConfigError, match=r"the vision tower 75\.0, other processes 5\.0"):
        check(said, 0.9, CacheSplit(1, 0))


def test_states_are_named_among_what_takes_the_memory() -> None:
    lacks = (
        r"keys and values of 32 tokens, .* states 16\.0.*: raise --gpu-memory-utilization 0\.6, "
        "lower --max-num-seqs 256, lower --max-model-len 4096"
    )
    with pytest.raises(ConfigError, match=lacks):
        check(figures(), 0.6, CacheSplit(1, 512), state_bytes=GIB // 32)


def test_room_for_no_sequence_s_states_is_said_as_such() -> None:
    lacks = (
        r"room for 4\.00 GiB of cache, and states of one sequence need 8\.00; .*: "
        r"raise --gpu-memory-utilization 0\.3, lower --max-num-batched-tokens, raise --tp$"
    )
    with pytest.raises(ConfigError, match=lacks):
        check(figures(), 0.3, CacheSplit(0, 0), state_bytes=2 * GIB)


def test_bytes_that_a_flag_asks_for_must_be_free() -> None:
    check_bytes(GIB, GIB)
    with pytest.raises(ConfigError, match=r"asks for 2\.0 GiB of this GPU, and 1\.0 are free"):
        check_bytes(2 * GIB, GIB)


def test_graphs_share_the_pool_of_the_largest() -> None:
    assert graph_bytes(800, 100, [1, 25, 50]) == 400 + 3 * GRAPH_BYTES
    assert graph_bytes(800, 100, []) == 0


class Card:
    """A GPU of 100 bytes, on which a step takes 30, and the first also leaves 5 for good."""

    def __init__(self) -> None:
        self.num_held = self.peak = 40
        self.others = 10

    def free_and_total(self) -> tuple[int, int]:
        return 100 - self.others - self.num_held, 100

    def held(self) -> int:
        return self.num_held

    def peak_held(self) -> int:
        return self.peak

    def trim(self) -> None:
        self.num_held = self.peak = 40

    def step(self) -> None:
        self.others = 15
        self.num_held = self.peak = 70


def test_the_largest_step_is_looked_at_when_it_has_run_before() -> None:
    assert measure(Card(), 90, Card().step, 8, []).peak == 40
    card = Card()
    seen = measure(card, 90, card.step, 8, [4])
    assert seen == Figures(
        total=100, free_before=90, free=45, held=40, peak=70, graphs=15 + GRAPH_BYTES
    )
    assert (seen.step, seen.libraries, seen.others) == (30, 5, 10)


def test_a_step_without_room_is_said_with_what_to_change() -> None:
    def fail(error: RuntimeError) -> None:
        raise error

    lacking = RuntimeError("CUDA error: out of memory")
    with pytest.raises(ConfigError, match="a step of 8 tokens: lower --max-num-batched-tokens"):
        measure(Card(), 90, lambda: fail(lacking), 8, [])
    with pytest.raises(RuntimeError, match="illegal"):
        measure(Card(), 90, lambda: fail(RuntimeError("an illegal memory access")), 8, [])


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        ((4, 8, 100), [5, 1, 1, 1]),
        ((4, 8, 3), [3, 3, 1, 1]),
        ((4, 100, 3), [3, 3, 3, 3]),
        ((1, 1, 9), [1]),
        ((9, 4, 9), [1, 1, 1, 1]),
    ],
)
def test_largest_step_has_the_most_rows_and_tokens(
    limits: tuple[int, int, int], counts: list[int]
) -> None:
    assert token_counts(*limits) == counts
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    options = dict(zip(names, limits, strict=True))
    step = largest_step(**options, page_tokens=16)
    batch = batch_of(step, step.logit_rows)
    assert len(batch.token_ids) == len(batch.positions) == sum(counts)
    assert batch.sequences.tolist() == [i for i, count in enumerate(counts) for _ in range(count)]
    assert batch.positions[batch.logit_rows].tolist() == [limits[2] - 1] * len(counts)
    assert batch.page_table.shape == (len(counts), -(-limits[2] // 16))
    assert len(np.frombuffer(step.rows, ROW)) == len(counts)
    vectors = largest_step(**options, page_tokens=16, embeds=True)
    assert len(array("i", vectors.pooled_rows)) == len(counts)
    assert not vectors.rows


def test_states_have_a_part_of_the_room_or_nothing_fits() -> None:
    assert split_room(800, page_bytes=10, state_bytes=0, max_num_seqs=4) == (80, 0)
    assert split_room(800, page_bytes=10, state_bytes=50, max_num_seqs=4) == (40, 8)
    assert split_room(1600, page_bytes=10, state_bytes=50, max_num_seqs=4) == (100, 3 * 4)
    assert split_room(190, page_bytes=10, state_bytes=50, max_num_seqs=4) == (0, 0)
