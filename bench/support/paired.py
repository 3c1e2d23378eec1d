"""What one thing costs beside its absence, from pairs of measurements that lie close in time."""

import statistics
from collections.abc import Callable, Sequence
from math import comb

CONFIDENCE = 0.95
MIN_PAIRS = 6


def measure_pairs(
    num_pairs: int, without: Callable[[], float], within: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Measure in pairs, and return the samples of each side.

    The order changes with each pair (A B, B A), so that a drift of the machine falls on both.
    """
    first: list[float] = []
    second: list[float] = []
    for number in range(num_pairs):
        if number % 2:
            second.append(within())
            first.append(without())
        else:
            first.append(without())
            second.append(within())
    return first, second


def median_ratio(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of second / first over pairs, and the ends of its 95 % interval.

    The interval is that of order statistics: it assumes no distribution, but pairs that do not
    depend on each other. It takes `MIN_PAIRS` at least.
    """
    ratios = sorted(b / a for a, b in zip(first, second, strict=True))
    return statistics.median(ratios), *interval(ratios)


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the median's interval."""
    count = len(ordered)
    outside, rank = 0.0, 0  # the chance that so few lie below the median
    while 2 * (outside + comb(count, rank) / 2**count) < 1 - CONFIDENCE:
        outside += comb(count, rank) / 2**count
        rank += 1
    assert rank, f"{count} pairs have no interval; it takes {MIN_PAIRS}"
    return ordered[rank - 1], ordered[count - rank]
