"""Chooses how many drafts pay, from measured acceptance and the costs of steps. Pure: no clock.

A step of the model takes longer the more rows it has, and a draft model takes time for each draft.
That slows all sequences, and each draft quickens one. Drafts are chosen so that the product of all
sequences' rates is largest (proportional fairness: Kelly, 1997). One sequence alone gets most
tokens per second so; among many, none is slowed for little.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate

from headrace.engine_proc.drafts.step_costs import CostTable, StepCosts

FIRST_RATE = 0.7  # of acceptance, before any draft was checked
RATE_DECAY = 0.05  # what the newest draft counts for a sequence,
SHARED_DECAY = 0.01  # and for those that come
CLASS_DECAY = 0.01  # and for drafts of its chance, at the least:
FIRST_WEIGHT = 10  # drafts that what is assumed counts as
NUM_CLASSES = 8  # of drafts, by their chance
DEMAND = 1.05  # what drafts have to gain, as a multiple of what they cost: both are estimates


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
        self._num_learned = 0

    def learn(self, num_drafts: int, num_right: int) -> None:
        """Record drafts that were checked in one step. Behind a wrong one nothing was learned."""
        for is_right in [1.0] * num_right + [0.0] * (num_right < num_drafts):
            self.learn_chance(is_right)

    def learn_chance(self, chance: float) -> None:
        """Record a draft that is right as often as that, as one that was not worth a check."""
        self._num_learned += 1
        weight = max(self._decay, 1 / (FIRST_WEIGHT + self._num_learned))
        self.value += weight * (chance - self.value)
        if self._shared is not None:
            self._shared.learn_chance(chance)


class ChanceTable:
    """How often a draft is accepted, by the probability that the draft model gave it.

    Args:
        least: the share of the least likely ones, before any was checked.
    """

    def __init__(self, least: float = 0.3) -> None:
        step = (1 - least) / NUM_CLASSES
        self._num_learned = [0] * NUM_CLASSES
        self._rates = [least + step * (place + 0.5) for place in range(NUM_CLASSES)]

    def __getitem__(self, chance: float) -> float:
        return self._rates[self._class(chance)]

    def learn(self, chances: Items[float], num_right: int) -> None:
        """Record drafts that were checked in one step. Behind a wrong one nothing was learned."""
        for place, chance in enumerate(chances[: num_right + 1]):
            index = self._class(chance)
            self._num_learned[index] += 1
            weight = max(CLASS_DECAY, 1 / (FIRST_WEIGHT + self._num_learned[index]))
            self._rates[index] += weight * ((place < num_right) - self._rates[index])

    def _class(self, chance: float) -> int:
        return min(NUM_CLASSES - 1, int(chance * NUM_CLASSES))


@dataclass(slots=True)
class StepPlan:
    """A step of the model that is being put together. A step without drafts costs 1.

    Prompts beside are left out: their time makes no draft cheaper.

    Attributes:
        num_rows: with its drafts.
        num_sequences: that get tokens.
        costs: of the model's steps, by rows,
        draft_costs: and of the draft model's.
        spent: on its drafts.
        demand: as `DEMAND`.
    """

    num_rows: int
    num_sequences: int
    costs: CostTable
    draft_costs: CostTable
    spent: float = 0.0
    demand: float = DEMAND


class DraftPolicy:
    """Weighs drafts against the time that they take.

    A draft's growth is the logarithm of what it multiplies its sequence's rate by.
    """

    def __init__(self) -> None:
        self.costs = StepCosts()

    def plan(self, num_sequences: int) -> StepPlan:
        """Begin a step. Until a draft model was measured it is taken to be as slow as the model."""
        own = drafts = self.costs.table(num_sequences, is_draft=False)
        if self.costs.has_drafted:
            drafts = self.costs.table(num_sequences, is_draft=True)
        return StepPlan(num_sequences, num_sequences, own, drafts)

    def could_pay(self, plan: StepPlan) -> bool:
        """Whether drafts would pay that are certain to be right, and cost nothing to make."""
        counts = doubled(plan.num_sequences)
        return any(self._score(plan, count * math.log(2), count, 0.0) > 0 for count in counts)

    def num_checked(self, plan: StepPlan, growths: Items[float]) -> int:
        """Return how many drafts pay that are made: they take rows.

        Args:
            growths: of each, in the order in which they are taken.
        """
        return self._best(plan, growths, [0.0] * len(growths))[0]

    def is_faster(self, plan: StepPlan, growths: Items[float], rate: float) -> bool:
        """Whether a sequence's drafts that are made are worth more than new ones.

        Args:
            growths: as in `num_checked`.
            rate: the share of the draft model's drafts that are accepted.
        """
        if not self.costs.has_drafted:
            return False
        places = range(1, len(growths) + 1)
        others = growths_of(rate**place for place in places)
        costs = [place * plan.draft_costs[1] for place in places]
        made = self._best(plan, growths, [0.0] * len(growths))
        return made[1] >= self._best(plan, others, costs)[1]

    def num_drafted(
        self, plan: StepPlan, growths: Items[Items[float]], further: Items[float]
    ) -> int:
        """Return for how many sequences another draft pays, in one step of the draft model.

        Where it does not pay alone, as at the end of a tile of rows, it may with those behind it.
        Until the draft model's costs are known one sequence drafts, which tells them.

        Args:
            growths: of the next drafts of each, in the order of the first ones, descending.
            further: what each costs beside that step.
        """
        if not self.costs.has_drafted:
            return min(1, len(growths))
        sums = list(accumulate(further))
        costs = [own + plan.draft_costs[count] for count, own in enumerate(sums, 1)]
        count = self._best(plan, [own[0] for own in growths], costs)[0]
        return count or self._num_drafted_together(plan, growths, sums)

    def _num_drafted_together(
        self, plan: StepPlan, growths: Items[Items[float]], further: Items[float]
    ) -> int:
        """Return for how many sequences several drafts pay, each of a step of the draft model."""
        best, best_score = 0, 0.0
        for count in doubled(len(growths)):
            depths = zip(*growths[:count], strict=False)
            sums = accumulate(sum(own) for own in depths)
            for num_steps, growth in enumerate(sums, 1):
                cost = further[count - 1] + num_steps * plan.draft_costs[count]
                score = self._score(plan, growth, count * num_steps, cost)
                if score > best_score:
                    best, best_score = count, score
        return best

    def _best(
        self, plan: StepPlan, growths: Items[float], costs: Items[float]
    ) -> tuple[int, float]:
        """Return how many of the first drafts are worth most, and what they are worth.

        Args:
            costs: of so many of them, beside their rows.
        """
        best, best_score = 0, 0.0
        if not self.costs.are_known:
            return best, best_score
        sums = accumulate(growths)
        for count, (growth, cost) in enumerate(zip(sums, costs, strict=True), 1):
            score = self._score(plan, growth, count, cost)
            if score > best_score:
                best, best_score = count, score
        return best, best_score

    def _score(self, plan: StepPlan, growth: float, count: int, cost: float) -> float:
        """Return the growth of all sequences' rates by drafts, less what these have to gain."""
        before = plan.costs[plan.num_rows] + plan.spent
        after = plan.costs[plan.num_rows + count] + plan.spent + cost
        return growth - plan.demand * plan.num_sequences * math.log(after / before)


def doubled(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, and `most` as the last."""
    return [*(1 << place for place in range((most - 1).bit_length())), most] if most else []


def growths_of(gains: Iterable[float]) -> list[float]:
    """Return the growths of a sequence's drafts.

    Args:
        gains: the tokens that each is expected to give.
    """
    expected, growths = 1.0, []
    for gain in gains:
        growths.append(math.log1p(gain / expected))
        expected += gain
    return growths
