"""A histogram counts each duration once, in the first bucket whose bound it does not pass."""

import pytest

from headrace.histogram import BOUNDS_NS, HISTOGRAM_WORDS, NUM_BUCKETS, Histogram


def histogram() -> Histogram:
    return Histogram(memoryview(bytearray(HISTOGRAM_WORDS * 8)).cast("Q"))


def test_a_new_histogram_is_empty() -> None:
    made = histogram()
    assert made.counts == [0] * NUM_BUCKETS
    assert made.sum_s == 0


@pytest.mark.parametrize(
    ("duration_ns", "bucket"),
    [
        (-5, 0),
        (0, 0),
        (BOUNDS_NS[0], 0),
        (BOUNDS_NS[0] + 1, 1),
        (BOUNDS_NS[-1], NUM_BUCKETS - 2),
        (BOUNDS_NS[-1] + 1, NUM_BUCKETS - 1),
    ],
)
def test_bounds_are_part_of_their_bucket(duration_ns: int, bucket: int) -> None:
    made = histogram()
    made.observe(duration_ns)
    assert [i for i, count in enumerate(made.counts) if count] == [bucket]
    assert made.sum_s == pytest.approx(max(duration_ns, 0) / 1e9)


def test_sums_and_counts_grow() -> None:
    made = histogram()
    for _ in range(3):
        made.observe(1_500_000_000)
    assert sum(made.counts) == 3
    assert made.sum_s == pytest.approx(4.5)
