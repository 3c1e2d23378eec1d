"""Histograms, in words of a board slot: written by one process, read by any.

0 …   one count per bucket, the last of what is beyond all bounds
last  the sum, in units of the scale
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from headrace.board import histogram_bounds
from headrace.board.histogram_bounds import Bounds


class Scale:
    """The unit and the bucket bounds of a histogram."""

    def __init__(self, bounds: Bounds, units: int) -> None:
        """`bounds` ascend; observed values are integers, in 1 / `units` of a bound's unit."""
        self.bounds = bounds
        self.units = units
        self.limits = tuple(round(bound * units) for bound in bounds)
        self._places: dict[Bounds, list[int]] = {}

    @property
    def num_buckets(self) -> int:
        """Number of buckets, the one beyond all bounds included."""
        return len(self.bounds) + 1

    def places(self, bounds: Bounds) -> list[int]:
        """Return the places of some of the bounds among all."""
        places = self._places.get(bounds)
        if places is None:
            places = self._places[bounds] = [self.bounds.index(bound) for bound in bounds]
        return places


SECONDS = Scale(
    histogram_bounds.union(
        histogram_bounds.HEADRACE,
        histogram_bounds.VLLM_FIRST_TOKEN,
        histogram_bounds.VLLM_TOKEN,
        histogram_bounds.VLLM_REQUEST,
        histogram_bounds.SGLANG_REQUEST,
        histogram_bounds.SGLANG_TOKEN,
        histogram_bounds.SGLANG_QUEUE,
    ),
    units=10**9,  # ns
)
COUNTS = Scale(
    histogram_bounds.union(
        histogram_bounds.VLLM_TOKENS,
        histogram_bounds.VLLM_STEP,
        histogram_bounds.VLLM_PREEMPTIONS,
        histogram_bounds.VLLM_N,
        histogram_bounds.SGLANG_TOKENS,
    ),
    units=1,
)
HISTOGRAM_WORDS = max(SECONDS.num_buckets, COUNTS.num_buckets) + 1


class Histogram:
    """One histogram. Its counts only grow."""

    def __init__(self, words: "memoryview[int]", scale: Scale = SECONDS) -> None:
        """Use `HISTOGRAM_WORDS` words."""
        self._words = words
        self.scale = scale
        self._limits = scale.limits

    def observe(self, amount: int, times: int = 1) -> None:
        """Count an amount; for the owner of the words alone. Less than nothing is nothing."""
        if amount < 0:
            amount = 0
        words = self._words
        words[bisect_left(self._limits, amount)] += times
        words[-1] += amount * times

    @property
    def counts(self) -> list[int]:
        """Count of each bucket, not cumulative."""
        return self._words[: self.scale.num_buckets].tolist()

    @property
    def sum(self) -> float:
        """The sum of all that was observed, in the unit of the bounds."""
        return self._words[-1] / self.scale.units


class HistogramSum:
    """The sum of some histograms of one scale, at one moment."""

    def __init__(self, histograms: Iterable[Histogram], scale: Scale = SECONDS) -> None:
        parts = list(histograms)
        assert all(histogram.scale is scale for histogram in parts)
        counts = [histogram.counts for histogram in parts]
        summed = counts[0] if len(parts) == 1 else map(sum, zip(*counts, strict=True))
        self.sum = float(sum([histogram.sum for histogram in parts]))
        self._scale = scale
        self._up_to = list(accumulate(summed)) or [0] * scale.num_buckets

    def at_most(self, bounds: Bounds) -> list[int]:
        """Return how many were each bound or less.

        Raises:
            ValueError: one is none of the scale's bounds.
        """
        up_to = self._up_to
        return [up_to[place] for place in self._scale.places(bounds)]

    @property
    def count(self) -> int:
        """Number of observations."""
        return self._up_to[-1]
