"""Chooses how many drafts pay, from measured acceptance and step times. Pure: no clock.

A step of the model takes longer the more rows it has, and a draft model takes time for each draft.
One more draft pays where it gains more tokens per second than the step without it has.
"""

from bisect import bisect
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate

FIRST_RATE = 0.7  # of acceptance, before any draft was checked
RATE_DECAY = 0.1  # what the newest draft counts for a sequence,
SHARED_DECAY = 0.01  # and for those that come
CLASS_DECAY = 0.03  # and for drafts of its chance
TIME_DECAY = 0.2  # what the newest step counts
DRIFT = 0.02  # of the time of one row, by steps of several
FIRST_SLOPE = 0.05  # of a row's time in a step of several, before any was measured
MAX_ROWS = 256  # of a step whose time is noted
NUM_CLASSES = 8  # of drafts, by their chance


class StepCosts:
    """The times of steps by their number of rows, as multiples of the time of one row.

    The machine may become slower for a while, and texts longer: the multiples stay.
    """

    def __init__(self) -> None:
        self._unit_s = 0.0  # the time of one row
        self._rows = [1]  # that were measured, ascending
        self._multiples = [1.0]

    @property
    def are_known(self) -> bool:
        """Whether a step was measured."""
        return self._unit_s > 0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Record a step."""
        if num_rows > MAX_ROWS:
            return
        multiple = self._multiple(num_rows)
        unit_s = seconds / multiple
        weight = TIME_DECAY if num_rows == 1 else DRIFT
        self._unit_s += (weight if self._unit_s else 1) * (unit_s - self._unit_s)
        if num_rows == 1:
            return
        place = bisect(self._rows, num_rows)
        if self._rows[place - 1] != num_rows:
            self._rows.insert(place, num_rows)
            self._multiples.insert(place, seconds / self._unit_s)
        else:
            self._multiples[place - 1] += TIME_DECAY * (seconds / self._unit_s - multiple)

    def seconds(self, num_rows: int) -> float:
        """Return what a step takes. Sizes that were not measured lie on a line between others."""
        return self._unit_s * self._multiple(num_rows) if num_rows else 0.0

    def _multiple(self, num_rows: int) -> float:
        place = bisect(self._rows, num_rows)
        low, before = self._rows[place - 1], self._multiples[place - 1]
        if place < len(self._rows):
            share = (num_rows - low) / (self._rows[place] - low)
            return before + share * (self._multiples[place] - before)
        slope = FIRST_SLOPE if low == 1 else max(0.0, (before - 1) / (low - 1))
        return before + slope * (num_rows - low)


class AcceptanceRate:
    """The share of a sequence's drafts that are accepted where those before them were.

    Args:
        shared: of all sequences: what this one begins with, and learns for others. None has none.
    """

    def __init__(
        self, shared: "AcceptanceRate | None" = None, first_value: float = FIRST_RATE
    ) -> None:
        self._shared = shared
        self._decay = SHARED_DECAY if shared is None else RATE_DECAY
        self.value: float = first_value if shared is None else shared.value

    def learn(self, num_drafts: int, num_right: int) -> None:
        """Record drafts that were checked in one step. Behind a wrong one nothing was learned."""
        for is_right in [1.0] * num_right + [0.0] * (num_right < num_drafts):
            self.value += self._decay * (is_right - self.value)
        if self._shared is not None:
            self._shared.learn(num_drafts, num_right)


class ChanceTable:
    """How often a draft is accepted, by the probability that the draft model gave it.

    Args:
        least: the share of the least likely ones, before any was checked.
    """

    def __init__(self, least: float = 0.3) -> None:
        step = (1 - least) / NUM_CLASSES
        self._rates = [least + step * (place + 0.5) for place in range(NUM_CLASSES)]

    def __getitem__(self, chance: float) -> float:
        return self._rates[self._class(chance)]

    def learn(self, chances: Items[float], num_right: int) -> None:
        """Record drafts that were checked in one step. Behind a wrong one nothing was learned."""
        for place, chance in enumerate(chances[: num_right + 1]):
            index = self._class(chance)
            self._rates[index] += CLASS_DECAY * ((place < num_right) - self._rates[index])

    def _class(self, chance: float) -> int:
        return min(NUM_CLASSES - 1, int(chance * NUM_CLASSES))


@dataclass(slots=True)
class StepPlan:
    """A step of the model that is being put together.

    Attributes:
        num_rows: with its drafts.
        num_tokens: that it is expected to give.
        spent_s: on its drafts.
    """

    num_rows: int
    num_tokens: float
    spent_s: float = 0.0


class DraftPolicy:
    """Weighs drafts against the time that they take."""

    def __init__(self) -> None:
        self.model = StepCosts()
        self.draft_model = StepCosts()

    def num_checked(self, plan: StepPlan, gains: Items[float]) -> int:
        """Return how many drafts of a sequence pay that are made: they take rows.

        Args:
            gains: the tokens that each is expected to give, descending.
        """
        return self._best(plan, gains, [0.0] * len(gains))[0]

    def is_faster(self, plan: StepPlan, gains: Items[float], rate: float) -> bool:
        """Whether a sequence's drafts that are made give more tokens per second than new ones.

        Args:
            gains: as in `num_checked`.
            rate: the share of the draft model's drafts that are accepted.
        """
        if not self.draft_model.are_known:
            return False
        places = range(1, len(gains) + 1)
        others = [rate**place for place in places]
        costs = [place * self.draft_model.seconds(1) for place in places]
        made = self._best(plan, gains, [0.0] * len(gains))
        return made[1] >= self._best(plan, others, costs)[1]

    def num_drafted(self, plan: StepPlan, gains: Items[float], further_s: Items[float]) -> int:
        """Return for how many sequences another draft pays, in one step of the draft model.

        Until its costs are known one sequence drafts, which tells them.

        Args:
            gains: the tokens that a draft of each is expected to give, descending.
            further_s: what each takes beside that step.
        """
        if not self.draft_model.are_known:
            return min(1, len(gains))
        further = accumulate(further_s)
        costs = [own + self.draft_model.seconds(i) for i, own in enumerate(further, 1)]
        return self._best(plan, gains, costs)[0]

    def _best(self, plan: StepPlan, gains: Items[float], costs: Items[float]) -> tuple[int, float]:
        """Return how many of the first drafts make most tokens per second, and how many these are.

        Args:
            costs: what so many of them take, beside their rows.
        """
        if not self.model.are_known:
            return 0, 0.0
        num_tokens = plan.num_tokens
        best, best_rate = 0, num_tokens / (self.model.seconds(plan.num_rows) + plan.spent_s)
        for count, (gain, cost) in enumerate(zip(gains, costs, strict=True), 1):
            num_tokens += gain
            seconds = self.model.seconds(plan.num_rows + count) + plan.spent_s + cost
            if num_tokens / seconds > best_rate:
                best, best_rate = count, num_tokens / seconds
        return best, best_rate
