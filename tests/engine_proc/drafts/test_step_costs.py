"""Costs of steps are learned from their times, on a machine whose pace changes."""

import random

import pytest

from headrace.engine_proc.drafts.step_costs import KNOTS, MAX_ROWS, StepCosts


def learned(*steps: tuple[int, float]) -> StepCosts:
    """Return costs that so many rows and seconds have taught, again and again."""
    costs = StepCosts()
    for _ in range(50):
        for num_rows, seconds in steps:
            costs.observe(num_rows, seconds, is_draft=False)
    return costs


def ratio(costs: StepCosts, num_rows: int, base: int) -> float:
    return costs.table(base, is_draft=False)[num_rows]


def test_costs_between_measured_sizes_lie_between() -> None:
    costs = learned((1, 0.1), (8, 0.5))
    assert ratio(costs, 1, 1) == 1.0
    assert ratio(costs, 8, 1) == pytest.approx(5.0, rel=0.03)
    assert 1.5 < ratio(costs, 4, 1) < 4


def test_unknown_sizes_are_taken_to_cost_little_more() -> None:
    costs = learned((8, 0.1))
    assert 1 <= ratio(costs, 12, 8) < 1.1
    assert 1 <= ratio(costs, 32, 8) < ratio(costs, 8 * MAX_ROWS, 8)


def test_costs_keep_their_shape_on_a_slower_machine() -> None:
    costs = StepCosts()
    for pace in (1.0, 3.0, 0.5):
        for num_rows in (1, 8) * 20 + (1,) * 100 + (8,) * 100:
            seconds = pace * (0.1 if num_rows == 1 else 0.5)
            costs.observe(num_rows, seconds, is_draft=False)
        assert ratio(costs, 8, 1) == pytest.approx(5.0, rel=0.06)


def test_interrupted_steps_do_not_count() -> None:
    costs, dice = StepCosts(), random.Random(0)
    for _ in range(400):
        num_rows = dice.choice((1, 4, 8))
        seconds = (1 + 0.1 * num_rows) * dice.lognormvariate(0, 0.1)
        costs.observe(num_rows, seconds * (20 if dice.random() < 0.1 else 1), is_draft=False)
    assert ratio(costs, 4, 1) == pytest.approx(1.4 / 1.1, rel=0.07)
    assert ratio(costs, 8, 1) == pytest.approx(1.8 / 1.1, rel=0.07)


def test_a_step_of_more_rows_never_costs_less() -> None:
    costs, dice = StepCosts(), random.Random(1)
    for _ in range(200):
        costs.observe(dice.randint(1, 64), dice.uniform(0.05, 0.2), is_draft=dice.random() < 0.5)
        for is_draft in (False, True):
            table = costs.table(8, is_draft=is_draft)
            steps = [table[num_rows] for num_rows in range(400)]
            assert steps == sorted(steps)


def test_draft_model_is_compared_with_the_model() -> None:
    costs = StepCosts()
    for _ in range(30):
        costs.observe(4, 0.1, is_draft=False)
        costs.observe(1, 0.01, is_draft=True)
    assert costs.table(4, is_draft=True)[1] == pytest.approx(0.1, rel=0.05)


def test_every_size_has_a_place() -> None:
    assert [KNOTS[0], KNOTS[-1]] == [1, MAX_ROWS]
    costs = StepCosts()
    for num_rows in range(1, MAX_ROWS + 2):
        costs.observe(num_rows, 0.1, is_draft=False)
    assert costs.num_steps(MAX_ROWS) == 1
    assert costs.num_steps(MAX_ROWS + 1) == 0
