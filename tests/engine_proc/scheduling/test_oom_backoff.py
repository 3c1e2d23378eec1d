"""Steps are halved until there is memory for them, and grow again."""

import pytest

from headrace.engine_proc.scheduling.oom_backoff import HOLD_STEPS, MAX_HOLD_STEPS, OomBackoff


def work(limit: OomBackoff, num_steps: int) -> int | None:
    for _ in range(num_steps):
        limit.worked()
    return limit.num_tokens


def test_without_failures_there_is_no_limit() -> None:
    limit = OomBackoff()
    assert work(limit, 2 * HOLD_STEPS) is None


def test_each_failure_halves_and_many_steps_double() -> None:
    limit = OomBackoff()
    limit.failed(100)
    assert limit.num_tokens == 50
    limit.failed(50)
    assert limit.num_tokens == 25
    hold = 2 * HOLD_STEPS
    assert [work(limit, n) for n in (hold - 1, 1, hold)] == [25, 50, None]


def test_one_token_is_the_least() -> None:
    limit = OomBackoff()
    for _ in range(3):
        limit.failed(3)
    assert limit.num_tokens == 1


@pytest.mark.parametrize("num_tokens", [40, 400])
def test_what_could_not_be_cut_does_not_raise_the_limit(num_tokens: int) -> None:
    limit = OomBackoff()
    limit.failed(100)
    limit.failed(num_tokens)
    assert limit.num_tokens == min(num_tokens, 50) // 2


def test_what_fails_again_and_again_is_tried_ever_less() -> None:
    limit = OomBackoff()
    limit.failed(100)
    steps = []
    for _ in range(8):
        limit.failed(64)
        steps.append(0)
        while limit.num_tokens is not None and limit.num_tokens < 50:
            limit.worked()
            steps[-1] += 1
    assert steps[:3] == [2 * HOLD_STEPS, 4 * HOLD_STEPS, 8 * HOLD_STEPS]
    assert steps[-1] == MAX_HOLD_STEPS
