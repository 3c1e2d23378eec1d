"""The board keeps how the last process of a seat died, and since when the seat serves."""

import time
from collections.abc import Iterator

import pytest

from headrace.board.board import Board, Seat, Slot, State
from headrace.board.last_death import DEATH_WORDS


@pytest.fixture
def slot() -> Iterator[Slot]:
    yield Board.create([Seat("engine", 0)]).slot("engine")


def test_a_seat_without_deaths_reports_none(slot: Slot) -> None:
    last = slot.last_death
    assert (last.died_at, last.served_at, last.pid, last.how) == (0, 0, 0, "")


def test_a_death_outlives_the_start_of_a_successor(slot: Slot) -> None:
    slot.enter(State.READY)
    before = time.time()
    slot.last_death.record(4711, "was killed by SIGKILL")
    slot.enter(State.STARTING)
    last = slot.last_death
    assert (last.pid, last.how) == (4711, "was killed by SIGKILL")
    assert before <= last.died_at <= time.time()
    assert last.served_at <= last.died_at, "the successor does not serve yet"
    slot.enter(State.READY)
    assert last.served_at >= last.died_at


def test_a_long_text_is_cut_to_its_room(slot: Slot) -> None:
    slot.last_death.record(1, "x" * 1000)
    slot.last_death.record(2, "y" * 1000)
    assert slot.last_death.how == "y" * (DEATH_WORDS - 3) * 8
    slot.last_death.record(3, "exited with 1")
    assert slot.last_death.how == "exited with 1"
