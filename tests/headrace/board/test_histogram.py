"""A histogram counts each amount once, in the first bucket whose bound it does not pass."""

import pytest

from headrace.board.histogram import (
    COUNTS,
    HISTOGRAM_WORDS,
    SECONDS,
    Histogram,
    HistogramSum,
    Scale,
)

LIMITS = SECONDS.limits


def histogram(scale: Scale = SECONDS) -> Histogram:
    return Histogram(memoryview(bytearray(HISTOGRAM_WORDS * 8)).cast("Q"), scale)


@pytest.mark.parametrize("scale", [SECONDS, COUNTS])
def test_a_new_histogram_is_empty(scale: Scale) -> None:
    made = histogram(scale)
    assert made.counts == [0] * scale.num_buckets
    assert made.sum == 0


@pytest.mark.parametrize(
    ("duration_ns", "bucket"),
    [
        (-5, 0),
        (0, 0),
        (1, 1),
        (LIMITS[1], 1),
        (LIMITS[1] + 1, 2),
        (LIMITS[-1], SECONDS.num_buckets - 2),
        (LIMITS[-1] + 1, SECONDS.num_buckets - 1),
    ],
)
def test_bounds_are_part_of_their_bucket(duration_ns: int, bucket: int) -> None:
    made = histogram()
    made.observe(duration_ns)
    assert [i for i, count in enumerate(made.counts) if count] == [bucket]
    assert made.sum == pytest.approx(max(duration_ns, 0) / 1e9)


def test_sums_and_counts_grow() -> None:
    made = histogram()
    for _ in range(3):
        made.observe(1_500_000_000)
    made.observe(500_000_000, times=2)
    assert sum(made.counts) == 5
    assert made.sum == pytest.approx(5.5)


def test_spread_sums_histograms_with_any_of_their_bounds() -> None:
    first, second = histogram(COUNTS), histogram(COUNTS)
    for amount in (1, 2, 3, 500):
        first.observe(amount)
    second.observe(64, times=10)
    spread = HistogramSum([first, second], COUNTS)
    assert [spread.at_most(bound) for bound in (1, 2, 50, 64, 500)] == [1, 2, 3, 13, 14]
    assert (spread.count, spread.sum) == (14, 506 + 640)
    with pytest.raises(AssertionError):
        spread.at_most(63)
