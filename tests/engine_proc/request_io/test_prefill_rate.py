"""The board tells how fast an engine computes prompts."""

import pytest

from headrace.board.board import Board, Seat, Slot
from headrace.board.fields import EngineField
from headrace.engine_proc.request_io.prefill_rate import PrefillRate


@pytest.fixture
def slot() -> Slot:
    return Board.create([Seat("engine", 0)]).slot("engine")


def test_nothing_is_told_before_a_prompt_is_computed(slot: Slot) -> None:
    rate = PrefillRate(slot)
    assert slot[EngineField.PREFILL_RATE] == 0
    rate.observe(100, 0.5)
    assert slot[EngineField.PREFILL_RATE] == 200
    rate.observe(1, 10.0)
    assert slot[EngineField.PREFILL_RATE] > 150, "one token is no measure"


def test_short_prompts_do_not_make_an_engine_slow(slot: Slot) -> None:
    rate = PrefillRate(slot)
    rate.observe(2000, 1.0)
    for _ in range(40):
        rate.observe(20, 0.1)
    assert slot[EngineField.PREFILL_RATE] > 1600, "theirs is 200"


def test_a_change_of_pace_is_told_after_some_steps(slot: Slot) -> None:
    rate = PrefillRate(slot)
    for _ in range(50):
        rate.observe(1000, 1.0)
    for _ in range(50):
        rate.observe(1000, 4.0)
    assert slot[EngineField.PREFILL_RATE] == pytest.approx(250, rel=0.1)


def test_steps_that_take_no_time_tell_nothing(slot: Slot) -> None:
    PrefillRate(slot).observe(100, 0.0)
    assert slot[EngineField.PREFILL_RATE] == 0
