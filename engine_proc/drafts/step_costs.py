"""Learns what steps cost, of a model and its draft model, from their times. Pure: no clock.

The logarithm of a step's time is that of its cost, and the machine's pace. Other work on it, and
longer texts, change the times of all steps alike. A Kalman filter follows both. So a pace that
changes is not taken for the cost of the sizes that run meanwhile. A time far off counts little. The
filter's noise is learned, too: what a noisy machine tells by chance, a calm one tells for certain.
"""

import math
from bisect import bisect
from collections import Counter

import numpy as np
import numpy.typing as npt

MAX_ROWS = 256  # of a step whose time is noted
TILE_ROWS = 16  # of products: the next row may cost as much as a whole tile
# Sizes whose costs are learned; others lie on a line between them.
# fmt: off
KNOTS = (
    1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 17, 20, 24, 28, 32, 33, 36, 40, 44, 48, 49, 56, 64, 65,
    80, 96, 112, 128, 160, 192, 224, 256,
)
# fmt: on
SLOPE = 0.01  # of the cost of one row, for each further one, before any was measured
# Of logarithms, in squares:
SPREAD = 0.25  # of what a row costs, where there are e times as many
DRAFT_SPREAD = 4.0  # of the draft model's cost
FIRST_NOISE, LEAST_NOISE = 0.01, 2e-4  # of a step's time; what it really is, is learned
NOISE_DECAY = 0.03
PACE_DRIFT = 0.1  # in a step, as a share of the noise
COST_DRIFT = 1e-6
UNKNOWN = 100.0
FAR_OFF = 4.0  # times as much as expected
HOPE = 0.5  # of what a cost may be off, by which it is taken for less

Floats = npt.NDArray[np.float64]


def prior() -> tuple[Floats, Floats]:
    """Return what is expected of costs and pace before any step, and how far that may be off."""
    sizes = np.array(KNOTS, np.float64)
    growth = np.log(sizes) + np.log(np.ceil(sizes / TILE_ROWS))
    mean = np.log(1 + SLOPE * (sizes - 1))
    own = SPREAD * np.minimum.outer(growth, growth)
    count = len(sizes)
    doubt = np.zeros((2 * count + 1, 2 * count + 1))
    doubt[:count, :count] = own
    doubt[count:-1, count:-1] = own + DRAFT_SPREAD
    doubt[-1, -1] = UNKNOWN
    return np.concatenate([mean, mean - 1, [0.0]]), doubt


class CostTable:
    """The costs of steps by their number of rows; those of one size are 1.

    A step of more rows never costs less.
    """

    def __init__(self, costs: list[float]) -> None:
        self._costs = costs  # of `KNOTS`

    def __getitem__(self, num_rows: int) -> float:
        if num_rows > MAX_ROWS:
            return self._costs[-1] * num_rows / MAX_ROWS
        if num_rows == 0:
            return 0.0
        place, share = place_of(num_rows)
        return self._costs[place] + share * (self._costs[place + 1] - self._costs[place])


class StepCosts:
    """What is known of the costs of steps, and of the machine's pace."""

    def __init__(self) -> None:
        self._mean, self._doubt = prior()
        self._num_steps: Counter[tuple[bool, int]] = Counter()
        self._noise = FIRST_NOISE
        self.has_drafted = False  # whether a step of the draft model was measured

    @property
    def are_known(self) -> bool:
        """Whether a step was measured."""
        return bool(self._num_steps)

    def num_steps(self, num_rows: int) -> int:
        """Return how many steps of the model of so many rows were measured."""
        return self._num_steps[False, num_rows]

    def observe(self, num_rows: int, seconds: float, *, is_draft: bool) -> None:
        """Record a step."""
        if num_rows > MAX_ROWS:
            return
        self._num_steps[is_draft, num_rows] += 1
        self.has_drafted |= is_draft
        doubt = self._doubt
        doubt.flat[:: len(doubt) + 1] += COST_DRIFT
        doubt[-1, -1] += PACE_DRIFT * self._noise
        parts = np.zeros(len(doubt))  # what the step tells about, and how much
        place, share = place_of(num_rows)
        place += len(KNOTS) if is_draft else 0
        parts[place], parts[place + 1], parts[-1] = 1 - share, share, 1.0
        gain = doubt @ parts
        known = float(gain @ parts)
        variance = known + self._noise
        surprise = math.log(seconds) - float(self._mean @ parts)
        square = min(surprise * surprise, FAR_OFF * variance)
        self._noise += NOISE_DECAY * (max(square - known, LEAST_NOISE) - self._noise)
        variance += surprise * surprise - square
        self._mean += gain * (surprise / variance)
        self._doubt -= np.outer(gain, gain / variance)

    def table(self, base: int, *, is_draft: bool) -> CostTable:
        """Return the costs of the model, or of its draft model, beside a model's step of `base`.

        A cost that is known badly is taken for a low one, so that it is tried.
        """
        place, share = place_of(min(base, MAX_ROWS))
        nearest = place + round(share)
        first = len(KNOTS) if is_draft else 0
        ours = slice(first, first + len(KNOTS))
        doubts = np.diagonal(self._doubt)
        off = doubts[ours] + doubts[nearest] - 2 * self._doubt[nearest, ours]
        logs = ascending(self._mean[ours])
        least = np.maximum.accumulate(logs - HOPE * np.sqrt(np.maximum(off, 0.0)))
        beside = self._mean[nearest] if is_draft else least[nearest]
        return CostTable(np.exp(least - beside).tolist())


def ascending(values: Floats) -> Floats:
    """Return the mean of the least ascending values that are no less, and the largest no more."""
    highest, lowest = np.maximum.accumulate(values), np.minimum.accumulate(values[::-1])[::-1]
    mean: Floats = (highest + lowest) / 2
    return mean


def place_of(num_rows: int) -> tuple[int, float]:
    """Return the knot before a size, and where the size lies between this and the next one."""
    place = min(bisect(KNOTS, num_rows), len(KNOTS) - 1) - 1
    low, high = KNOTS[place : place + 2]
    return place, (num_rows - low) / (high - low)
