"""Histograms of durations, in words of a board slot: written by one process, read by any.

0 …   one count per bucket, the last of what is longer than all bounds
last  sum, ns
"""

from bisect import bisect_left

# Seconds, 1-2-5: two decades below a step, and as far as the longest generation.
BOUNDS_S = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
)
BOUNDS_NS = tuple(round(bound * 1e9) for bound in BOUNDS_S)
NUM_BUCKETS = len(BOUNDS_NS) + 1
HISTOGRAM_WORDS = NUM_BUCKETS + 1


class Histogram:
    """One histogram. Its counts only grow."""

    def __init__(self, words: "memoryview[int]") -> None:
        """Use `HISTOGRAM_WORDS` words."""
        self._words = words

    def observe(self, duration_ns: int) -> None:
        """Count a duration; for the owner of the words alone. Less than nothing is nothing."""
        if duration_ns < 0:
            duration_ns = 0
        self._words[bisect_left(BOUNDS_NS, duration_ns)] += 1
        self._words[NUM_BUCKETS] += duration_ns

    @property
    def counts(self) -> list[int]:
        """How many fell into each bucket, not cumulated."""
        return self._words[:NUM_BUCKETS].tolist()

    @property
    def sum_s(self) -> float:
        """The sum of all durations, seconds."""
        return self._words[NUM_BUCKETS] / 1e9
