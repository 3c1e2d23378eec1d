"""The board tells how fast an engine computes prompts."""

import pytest

from headrace.board.board import Board, Seat, Slot
from headrace.board.fields import EngineField
from headrace.engine_proc.request_io.prefill_rate import MAX_AGE_S, MIN_TOKENS, PrefillRate


@pytest.fixture
def slot() -> Slot:
    return Board.create([Seat("engine", 0)]).slot("engine")


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def rate(slot: Slot, now: list[float]) -> PrefillRate:
    return PrefillRate(slot, lambda: now[0])


def test_nothing_is_told_before_a_prompt_is_computed(slot: Slot, rate: PrefillRate) -> None:
    assert slot[EngineField.PREFILL_RATE] == 0
    rate.observe(MIN_TOKENS - 1, 10.0)
    assert slot[EngineField.PREFILL_RATE] == 0, "a short one is no measure"
    rate.observe(1000, 0.5)
    assert slot[EngineField.PREFILL_RATE] == 2000


def test_large_steps_count_most(slot: Slot, rate: PrefillRate) -> None:
    rate.observe(8000, 1.0)
    for _ in range(10):
        rate.observe(MIN_TOKENS, 0.128)
    assert slot[EngineField.PREFILL_RATE] > 6000, "theirs is 2000"


def test_a_change_of_pace_is_told_after_some_steps(slot: Slot, rate: PrefillRate) -> None:
    for _ in range(50):
        rate.observe(1000, 1.0)
    for _ in range(50):
        rate.observe(1000, 4.0)
    assert slot[EngineField.PREFILL_RATE] == pytest.approx(250, rel=0.1)


def test_steps_that_take_no_time_tell_nothing(slot: Slot, rate: PrefillRate) -> None:
    rate.observe(1000, 0.0)
    assert slot[EngineField.PREFILL_RATE] == 0


def test_an_old_rate_is_forgotten(slot: Slot, rate: PrefillRate, now: list[float]) -> None:
    rate.observe(1000, 100.0)
    now[0] += MAX_AGE_S / 2
    rate.expire()
    assert slot[EngineField.PREFILL_RATE] == 10
    now[0] += MAX_AGE_S / 2
    rate.expire()
    assert slot[EngineField.PREFILL_RATE] == 0
    rate.observe(1000, 1.0)
    assert slot[EngineField.PREFILL_RATE] == 1000, "what was slow counts no more"
