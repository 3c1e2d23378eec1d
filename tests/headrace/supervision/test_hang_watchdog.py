"""A long silence means stuck, unless the watcher itself was not running."""

import pytest

from headrace.board.board import Board, Seat, Slot, State
from headrace.board.fields import CommonField
from headrace.runtime.wake_clock import GAP_S
from headrace.supervision.watchdog import STARTING_S, HangWatchdog

SECOND = 10**9
STUCK_S = 8.0


def make_slot() -> Slot:
    slot = Board.create([Seat("engine", 0)]).slots[0]
    slot.enter(State.READY)
    slot[CommonField.HEARTBEAT_NS] = 100 * SECOND
    return slot


def looks(hang_watchdog: HangWatchdog, slot: Slot, first: float, last: float) -> list[float]:
    """Look twice a second; return at which seconds it was stuck."""
    times = [first + half / 2 for half in range(int((last - first) * 2) + 1)]
    return [at for at in times if hang_watchdog.check([slot], int(at * SECOND))]


def test_silence_for_long_is_being_stuck() -> None:
    slot = make_slot()
    stuck = looks(HangWatchdog(STUCK_S), slot, 100, 100 + STUCK_S + 2)
    assert stuck[0] == 100 + STUCK_S + 0.5


def test_a_heartbeat_ends_the_silence() -> None:
    slot, hang_watchdog = make_slot(), HangWatchdog(STUCK_S)
    assert not looks(hang_watchdog, slot, 100, 100 + STUCK_S)
    slot[CommonField.HEARTBEAT_NS] = int((100 + STUCK_S) * SECOND)
    assert not looks(hang_watchdog, slot, 100 + STUCK_S, 99 + 2 * STUCK_S)


@pytest.mark.parametrize("state", [State.ABSENT, State.STARTING, State.DEAD])  # the one before it
def test_starting_process_may_be_silent_for_longer(state: State) -> None:
    slot = make_slot()
    slot[CommonField.STATE] = state
    stuck = looks(HangWatchdog(STUCK_S), slot, 100, 100 + STARTING_S + 2)
    assert stuck[0] == 100 + STARTING_S + 0.5


def test_a_watcher_that_slept_begins_anew() -> None:
    slot, hang_watchdog = make_slot(), HangWatchdog(STUCK_S)
    looks(hang_watchdog, slot, 100, 101)
    awake = 1000 + GAP_S
    stuck = looks(hang_watchdog, slot, awake, awake + STUCK_S + 1)
    assert stuck[0] == awake + STUCK_S + 0.5


def test_startup_timeout_is_at_least_hang_timeout() -> None:
    slot = make_slot()
    slot[CommonField.STATE] = State.STARTING
    patience_s = STARTING_S + 60
    stuck = looks(HangWatchdog(patience_s), slot, 100, 100 + patience_s + 2)
    assert stuck[0] == 100 + patience_s + 0.5
