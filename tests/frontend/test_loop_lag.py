"""How late timers are is counted, and more often where the loop is busy."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.board.board import Board, Seat, Slot, Timing
from headrace.board.fields import FrontendField
from headrace.frontend.loop_lag import PERIOD_S, QUIET_PERIOD_S, LoopLag

MS = 1_000_000


class PlayedLoop:
    """A loop whose clocks and timers a test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_ns = self._cpu_ns = 0
        self._fire: Callable[[], None] = lambda: None
        self.period_s = 0.0
        monkeypatch.setattr("time.monotonic_ns", lambda: self._now_ns)
        monkeypatch.setattr("time.thread_time_ns", lambda: self._cpu_ns)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.period_s, self._fire = delay_s, call

    def fire(self, late_ms: int = 0, used_ms: int = 0) -> None:
        self._now_ns += round(self.period_s * 1e9) + late_ms * MS
        self._cpu_ns += used_ms * MS
        self._fire()


@pytest.fixture
def slot() -> Slot:
    return Board.create([Seat("frontend", 0)]).slot("frontend")


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, slot: Slot) -> PlayedLoop:
    played = PlayedLoop(monkeypatch)
    loop: Any = played
    LoopLag(loop, slot).start()
    return played


def test_busy_loop_has_more_timers_than_a_quiet_one(loop: PlayedLoop) -> None:
    periods = []
    for used_ms in (0, 20, 5, 0, 4):
        loop.fire(used_ms=used_ms)
        periods.append(loop.period_s)
    assert periods == [QUIET_PERIOD_S, PERIOD_S, PERIOD_S, QUIET_PERIOD_S, QUIET_PERIOD_S]


def test_late_timer_is_followed_soon(loop: PlayedLoop) -> None:
    periods = []
    for late_ms in (11, 9):
        loop.fire(late_ms)
        periods.append(loop.period_s)
    assert periods == [PERIOD_S, QUIET_PERIOD_S]


def test_lag_is_what_a_timer_was_late(loop: PlayedLoop, slot: Slot) -> None:
    loop.fire(late_ms=7)
    assert slot[FrontendField.LAG_NS] == 7 * MS
    loop.fire()
    assert slot[FrontendField.LAG_NS] == 0
    assert sum(slot.histogram(Timing.LOOP_LAG).counts) == 2


def test_callback_is_as_long_as_lag_and_processor_time_allow(loop: PlayedLoop, slot: Slot) -> None:
    longest = []
    for late_ms, used_ms in ((50, 2), (3, 60), (1, 1)):
        loop.fire(late_ms, used_ms)
        longest.append(slot[FrontendField.LONGEST_CALLBACK_NS] // MS)
    assert longest == [2, 3, 3]
