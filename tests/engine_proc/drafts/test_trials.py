"""Trials of drafts come due, and attempts that come to none wait for the next one."""

from headrace.engine_proc.drafts.trials import RETRY_STEPS, TRIAL_STEPS, Trials


def count_bare(trials: Trials, steps: int) -> None:
    for _ in range(steps):
        trials.count(has_drafts=False)


def test_drafts_are_tried_after_many_steps_without() -> None:
    trials = Trials()
    count_bare(trials, TRIAL_STEPS - 1)
    assert not trials.is_due(0)
    count_bare(trials, 1)
    assert trials.is_due(0)


def test_an_attempt_that_comes_to_no_drafts_is_made_again_later() -> None:
    trials = Trials()
    count_bare(trials, TRIAL_STEPS)
    trials.attempt()
    count_bare(trials, RETRY_STEPS - 1)
    assert not trials.is_due(0)
    count_bare(trials, 1)
    assert trials.is_due(0)


def test_an_attempt_with_drafts_begins_the_count_anew() -> None:
    trials = Trials()
    count_bare(trials, TRIAL_STEPS)
    trials.attempt()
    trials.count(has_drafts=True)
    count_bare(trials, TRIAL_STEPS)
    assert trials.is_due(0)
