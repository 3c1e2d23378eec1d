"""Drafts are made where they pay, by the times and the acceptance that were measured."""

import pytest

from headrace.engine_proc.drafts.draft_policy import (
    AcceptanceRate,
    ChanceTable,
    DraftPolicy,
    StepCosts,
    StepPlan,
)


def costs(*steps: tuple[int, float]) -> StepCosts:
    taught = StepCosts()
    for _ in range(50):
        for num_rows, seconds in steps:
            taught.observe(num_rows, seconds)
    return taught


def policy(model: StepCosts, draft_model: StepCosts | None = None) -> DraftPolicy:
    made = DraftPolicy()
    made.model = model
    if draft_model is not None:
        made.draft_model = draft_model
    return made


def test_costs_between_measured_sizes_lie_on_a_line() -> None:
    taught = costs((1, 0.1), (9, 0.5))
    assert taught.seconds(5) == pytest.approx(0.3, rel=0.05)
    assert taught.seconds(17) == pytest.approx(0.9, rel=0.1)


def test_costs_keep_their_shape_on_a_slower_machine() -> None:
    taught = costs((1, 0.1), (9, 0.5))
    for _ in range(50):
        taught.observe(1, 0.2)
    assert taught.seconds(9) == pytest.approx(1.0, rel=0.1)


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    assert DraftPolicy().num_checked(StepPlan(1, 1), [0.99]) == 0
    assert DraftPolicy().num_drafted(StepPlan(1, 1), [0.99, 0.9], [0.0, 0.0]) == 1


@pytest.mark.parametrize(("row_s", "count"), [(0.0, 4), (0.045, 2), (0.2, 0)])
def test_fewer_drafts_are_checked_the_more_rows_cost(row_s: float, count: int) -> None:
    taught = policy(costs((1, 0.1), (5, 0.1 + 4 * row_s)))
    assert taught.num_checked(StepPlan(1, 1), [0.9, 0.8, 0.5, 0.3]) == count


@pytest.mark.parametrize(("draft_s", "count"), [(0.02, 1), (0.12, 0)])
def test_a_draft_model_that_is_too_slow_drafts_nothing(draft_s: float, count: int) -> None:
    taught = policy(costs((1, 0.1), (5, 0.1)), costs((1, draft_s)))
    assert taught.num_drafted(StepPlan(1, 1), [0.8], [0.0]) == count


def test_time_spent_on_drafts_makes_further_ones_worth_less_time() -> None:
    taught = policy(costs((1, 0.1), (9, 0.1)), costs((1, 0.02)))
    plan = StepPlan(1, 1.0)
    gain, num_drafts = 0.7, 0
    while taught.num_drafted(plan, [gain], [0.0]):
        plan = StepPlan(plan.num_rows + 1, plan.num_tokens + gain, plan.spent_s + 0.02)
        gain, num_drafts = gain * 0.7, num_drafts + 1
    assert 2 <= num_drafts <= 4


def test_drafts_that_are_made_win_where_they_are_likely_enough() -> None:
    taught = policy(costs((1, 0.1), (9, 0.1)), costs((1, 0.02)))
    plan = StepPlan(1, 1)
    assert taught.is_faster(plan, [0.6, 0.36, 0.2], 0.7)
    assert not taught.is_faster(plan, [0.1, 0.01, 0.001], 0.7)


def test_text_far_behind_has_to_be_worth_reading() -> None:
    taught = policy(costs((1, 0.1), (5, 0.1)), costs((1, 0.02)))
    assert taught.num_drafted(StepPlan(1, 1), [0.8], [0.02]) == 1
    assert taught.num_drafted(StepPlan(1, 1), [0.8], [0.2]) == 0
    assert taught.num_drafted(StepPlan(2, 2), [0.9, 0.8], [0.0, 0.2]) == 1


def test_rate_follows_its_sequence_and_teaches_all() -> None:
    shared = AcceptanceRate()
    one = AcceptanceRate(shared)
    for _ in range(40):
        one.learn(4, 0)
    assert one.value < 0.05
    assert one.value < shared.value < AcceptanceRate().value
    assert AcceptanceRate(shared).value == shared.value


def test_drafts_behind_a_wrong_one_teach_nothing() -> None:
    rate, same = AcceptanceRate(), AcceptanceRate()
    rate.learn(9, 2)
    same.learn(3, 2)
    assert rate.value == same.value


def test_chances_learn_what_they_are_worth() -> None:
    table = ChanceTable()
    for _ in range(500):
        table.learn([0.95, 0.05, 0.5], 1)
    assert table[0.99] > 0.95
    assert table[0.1] < 0.1
    assert table[0.5] == ChanceTable()[0.5]
