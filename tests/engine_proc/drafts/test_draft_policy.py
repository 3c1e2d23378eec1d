"""Drafts are made where they pay, by the times and the acceptance that were measured."""

import pytest

from headrace.engine_proc.drafts.draft_policy import (
    AcceptanceRate,
    ChanceTable,
    DraftPolicy,
    growths_of,
)


def policy(*steps: tuple[int, float], drafts: tuple[tuple[int, float], ...] = ()) -> DraftPolicy:
    """Return one that has seen steps of some rows and seconds, of the model and the draft model."""
    taught = DraftPolicy()
    for _ in range(50):
        for is_draft, kinds in ((False, steps), (True, drafts)):
            for num_rows, seconds in kinds:
                taught.costs.observe(num_rows, seconds, is_draft=is_draft)
    return taught


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    assert DraftPolicy().num_checked(DraftPolicy().plan(1), [0.7]) == 0
    assert DraftPolicy().num_drafted(DraftPolicy().plan(1), [[0.7], [0.6]], [0.0, 0.0]) == 1


@pytest.mark.parametrize(("row_s", "count"), [(0.0, 4), (0.045, 2), (0.2, 0)])
def test_fewer_drafts_are_checked_the_more_rows_cost(row_s: float, count: int) -> None:
    taught = policy((1, 0.1), (5, 0.1 + 4 * row_s))
    assert taught.num_checked(taught.plan(1), growths_of([0.9, 0.8, 0.3, 0.1])) == count


@pytest.mark.parametrize(("row_s", "pays"), [(0.0, True), (0.002, True), (0.03, False)])
def test_sure_drafts_pay_where_rows_cost_little(row_s: float, pays: bool) -> None:
    taught = policy((8, 0.1), (16, 0.1 + 8 * row_s))
    assert taught.could_pay(taught.plan(8)) == pays


def test_sure_drafts_pay_up_to_the_end_of_a_tile() -> None:
    taught = policy((8, 0.1), (9, 0.21), (16, 0.21))
    assert taught.could_pay(taught.plan(8)) is False
    taught = policy((8, 0.1), (9, 0.14), (16, 0.14))
    assert taught.num_checked(taught.plan(8), [0.6]) == 0, "it pays for the whole tile alone"
    assert taught.num_checked(taught.plan(8), [0.6] * 8) == 8


@pytest.mark.parametrize(("draft_s", "count"), [(0.02, 1), (0.12, 0)])
def test_a_draft_model_that_is_too_slow_drafts_nothing(draft_s: float, count: int) -> None:
    taught = policy((1, 0.1), (5, 0.1), drafts=((1, draft_s),))
    assert taught.num_drafted(taught.plan(1), [growths_of([0.8])], [0.0]) == count


def test_time_spent_on_drafts_makes_further_ones_worth_less_time() -> None:
    taught = policy((1, 0.1), (9, 0.1), drafts=((1, 0.02),))
    plan, gains = taught.plan(1), [0.7]
    while taught.num_drafted(plan, [growths_of(gains)[-1:]], [0.0]):
        plan.num_rows += 1
        plan.spent += plan.draft_costs[1]
        gains.append(gains[-1] * 0.7)
    assert 3 <= len(gains) <= 5


def test_drafts_that_are_made_win_where_they_are_likely_enough() -> None:
    taught = policy((1, 0.1), (9, 0.1), drafts=((1, 0.02),))
    plan = taught.plan(1)
    assert taught.is_faster(plan, growths_of([0.6, 0.36, 0.2]), 0.7)
    assert not taught.is_faster(plan, growths_of([0.1, 0.01, 0.001]), 0.7)


def test_text_far_behind_has_to_be_worth_reading() -> None:
    taught = policy((1, 0.1), (5, 0.1), drafts=((1, 0.02),))
    one = taught.plan(1).draft_costs[1]
    assert taught.num_drafted(taught.plan(1), [[0.6]], [one]) == 1
    assert taught.num_drafted(taught.plan(1), [[0.6]], [10 * one]) == 0
    assert taught.num_drafted(taught.plan(2), [[0.7], [0.6]], [0.0, 10 * one]) == 1


def test_draft_that_costs_a_tile_pays_with_those_behind_it() -> None:
    rows = [(number, 0.1) for number in range(1, 7)] + [(number, 0.15) for number in range(7, 17)]
    taught = policy(*rows, drafts=((1, 0.005),))
    plan = taught.plan(1)
    plan.num_rows = 6
    next_ones = growths_of([0.95**place for place in range(1, 16)])[5:]
    assert taught.num_drafted(plan, [next_ones[:1]], [0.0]) == 0
    assert taught.num_drafted(plan, [next_ones], [0.0]) == 1


def test_a_draft_is_worth_less_to_a_sequence_that_has_some() -> None:
    first, second, third = growths_of([1.0, 1.0, 1.0])
    assert first > second > third > 0


def test_rate_follows_its_sequence_and_teaches_all() -> None:
    shared = AcceptanceRate()
    one = AcceptanceRate(shared)
    for _ in range(40):
        one.learn(4, 0)
    assert one.value < 0.1
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
