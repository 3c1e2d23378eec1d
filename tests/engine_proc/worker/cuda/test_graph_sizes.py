"""Which graph a step takes is told by its sizes alone."""

import pytest

from headrace.engine_proc.worker.cuda.graph_sizes import DECODES, Buckets, Sizes, buckets_of

ALL = buckets_of(max_sequences=256, max_tokens=2048, num_drafts=4)


@pytest.mark.parametrize(
    ("step", "taken"),
    [
        # Decodes: the next size.
        ((1, 1, 1), (1, 1, 1)),
        ((3, 3, 3), (4, 4, 4)),
        ((5, 5, 5), (8, 8, 8)),
        ((64, 64, 64), (64, 64, 64)),
        ((65, 65, 65), (72, 72, 72)),
        ((256, 256, 256), (256, 256, 256)),
        # Pieces of prompts: few rows, in which the vocabulary's matrix is spared.
        ((30, 1, 1), (32, 8, 8)),
        ((30, 1, 0), (32, 8, 8)),
        ((100, 9, 9), (128, 64, 64)),
        ((130, 100, 100), (136, 136, 136)),  # rather than 192 tokens and 256 rows
        ((300, 100, 99), (320, 256, 256)),
        ((512, 8, 8), (512, 8, 8)),
        # Guesses: every token has a row.
        ((5, 1, 5), (5, 1, 5)),
        ((10, 2, 10), (10, 2, 10)),
        ((14, 3, 14), (16, 16, 16)),  # not all sequences have as many; 20 tokens are more
        ((300, 64, 300), (320, 64, 320)),
        ((100, 60, 100), (104, 104, 104)),
        # Nothing is large enough.
        ((513, 1, 1), None),
        ((400, 10, 400), (400, 80, 400)),
        ((500, 110, 500), None),
        ((300, 257, 257), None),
    ],
)
def test_a_step_takes_the_cheapest_graph_that_does_it(
    step: tuple[int, int, int], taken: tuple[int, int, int] | None
) -> None:
    assert ALL.choose(Sizes(*step)) == (None if taken is None else Sizes(*taken))


def test_more_sequences_have_graphs_too() -> None:
    buckets = buckets_of(max_sequences=400, max_tokens=2048)
    assert buckets.choose(Sizes(300, 300, 300)) == Sizes(320, 320, 320)
    assert buckets.choose(Sizes(400, 400, 400)) == Sizes(400, 400, 400)


def test_the_largest_come_first() -> None:
    costs = [sizes.cost for sizes in ALL]
    assert costs == sorted(costs, reverse=True)
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize(
    ("max_sequences", "max_tokens", "capture_sizes", "expected"),
    [
        (1, 8, (), {(1, 1, 1)}),
        (3, 8, (), {(1, 1, 1), (2, 2, 2), (3, 3, 3)}),
        (6, 20, (), {(1, 1, 1), (2, 2, 2), (4, 4, 4), (6, 6, 6), (16, 6, 6)}),
        (6, 20, (2, 9), {(2, 2, 2), (6, 6, 6), (9, 6, 6)}),
        (64, 64, (4,), {(4, 4, 4)}),
        (64, 64, (12,), {(12, 12, 12), (12, 8, 8)}),
    ],
)
def test_no_graph_is_for_steps_that_cannot_be(
    max_sequences: int,
    max_tokens: int,
    capture_sizes: tuple[int, ...],
    expected: set[tuple[int, int, int]],
) -> None:
    buckets = buckets_of(max_sequences, max_tokens, capture_sizes)
    assert set(buckets) == {Sizes(*sizes) for sizes in expected}


def test_graphs_for_drafts_exist_only_with_drafts() -> None:
    buckets = buckets_of(max_sequences=512, max_tokens=512)
    decodes = {Sizes(size, size, size) for size in DECODES}
    mixed = set(buckets) - decodes
    assert decodes < set(buckets)
    assert all(sizes.num_rows == sizes.num_sequences < sizes.num_tokens for sizes in mixed)


def test_without_graphs_there_is_nothing_to_take() -> None:
    assert Buckets(()).choose(Sizes(1, 1, 1)) is None
