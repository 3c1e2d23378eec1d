"""Processes are replaced one at a time, and none waits for an engine that cannot be."""

import signal
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField, EngineField
from headrace.runtime.process import LEAVE
from headrace.supervision.engine_seats import EngineSeats
from headrace.supervision.renewals import Renewals
from headrace.supervision.seated_process import SeatedProcess

ENGINES = [Seat("engine", 0), Seat("engine", 1)]
THREE = [*ENGINES, Seat("engine", 2)]


class PlayedProcess:
    """A process that notes its signals."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        """Note a signal."""
        self.signals.append(number)


class Rig:
    """Replicas, a frontend and a tokenizer, all of which serve."""

    def __init__(self, engines: Sequence[Seat] = ENGINES) -> None:
        self.board = Board.create([*engines, Seat("frontend", 0), Seat("tokenizer", 0)])
        for slot in self.board.slots:
            slot.enter(State.READY)
        self.seats = EngineSeats(self.board, 60)
        self.renewals = Renewals(self.board, self.seats)
        self.children = {slot.seat: played(slot.seat) for slot in self.board.slots}

    def renew(self, *seats: Seat) -> None:
        """Have processes replaced."""
        for seat in seats:
            self.renewals.add(self.children[seat])

    @property
    def current(self) -> Seat | None:
        """The seat whose process is being replaced, after the next look."""
        self.renewals.go_on()
        found = [seat for seat in self.children if self.renewals.is_current(self.children[seat])]
        return found[0] if found else None

    def enter(self, seat: Seat, state: State) -> None:
        """Have a process get into a state."""
        self.board.slot(seat.role, seat.index)[CommonField.STATE] = state

    def replace(self, seat: Seat, state: State = State.READY) -> None:
        """Have another process take a seat."""
        if seat.role == "engine":
            self.seats.end(seat.index, 0)
        self.children[seat].process = played(seat).process
        self.enter(seat, state)


def played(seat: Seat) -> SeatedProcess:
    """Return a seat whose process is played."""
    process: Any = PlayedProcess()
    return SeatedProcess(seat, process, -1)


def test_the_next_renewal_waits_for_the_successor() -> None:
    rig, frontend, tokenizer = Rig(), Seat("frontend", 0), Seat("tokenizer", 0)
    leaving: Any = rig.children[frontend].process
    rig.renew(frontend, tokenizer, frontend)
    assert [rig.current, rig.current] == [frontend] * 2
    assert leaving.signals == [LEAVE], "it ends once its requests have"
    rig.replace(frontend, State.STARTING)
    assert rig.current == frontend
    rig.enter(frontend, State.READY)
    assert [rig.current, rig.current] == [tokenizer] * 2
    ending: Any = rig.children[tokenizer].process
    assert ending.signals == [signal.SIGTERM] * 2, "a signal may get lost"
    rig.replace(tokenizer)
    assert rig.current is None


def test_an_absent_replica_delays_no_other_renewal(caplog: pytest.LogCaptureFixture) -> None:
    rig, tokenizer = Rig(), Seat("tokenizer", 0)
    caplog.set_level("INFO")
    rig.enter(ENGINES[1], State.STARTING)
    rig.renew(ENGINES[0], tokenizer)
    assert [rig.current, rig.current] == [None, tokenizer]
    rig.replace(tokenizer)
    assert [rig.current for _ in range(3)] == [None] * 3
    told = "engine 0 is replaced once another engine of its model serves"
    assert [record.message for record in caplog.records] == [told]
    rig.enter(ENGINES[1], State.READY)
    assert rig.current == ENGINES[0], "it is its turn still"


def test_a_lost_machine_ends_the_renewal_of_its_seat() -> None:
    rig, tokenizer = Rig(), Seat("tokenizer", 0)
    rig.board.slot("engine", 1)[EngineField.IS_REMOTE] = 1
    rig.renew(ENGINES[1], tokenizer)
    assert rig.current == ENGINES[1]
    rig.replace(ENGINES[1], State.STARTING)
    assert rig.current == tokenizer


def test_a_placed_engine_is_renewed_once_the_one_before_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is no engine of Ray's passes those that wait."""
    rig, tokenizer = Rig(THREE), Seat("tokenizer", 0)
    caplog.set_level("INFO")
    for slot in rig.board.of("engine"):
        slot[EngineField.IS_REMOTE] = slot[EngineField.IS_PLACED] = 1
    rig.renew(*THREE[:2], tokenizer)
    assert rig.current == THREE[0]
    rig.replace(THREE[0], State.STARTING)
    assert [rig.current, rig.current] == [None, tokenizer]
    rig.replace(tokenizer)
    assert [rig.current for _ in range(3)] == [None] * 3
    told = "engine 1 is replaced once engine 0 serves"
    assert [record.message for record in caplog.records] == [told]
    rig.enter(THREE[0], State.READY)
    assert rig.current == THREE[1]


@pytest.mark.parametrize("is_placed", [0, 1])
def test_a_placed_engine_is_renewed_though_its_seat_ends(is_placed: int) -> None:
    """A local engine ends with that process."""
    rig = Rig(THREE)
    for slot in rig.board.of("engine"):
        slot[EngineField.IS_REMOTE] = slot[EngineField.IS_PLACED] = is_placed
    rig.renew(THREE[0])
    assert rig.current == THREE[0]
    rig.replace(THREE[0])
    rig.renewals.add_again(rig.children[THREE[0]])
    assert rig.current == (THREE[0] if is_placed else None)


def test_a_placed_engine_without_a_node_delays_no_renewal() -> None:
    rig = Rig(THREE)
    for slot in rig.board.of("engine"):
        slot[EngineField.IS_REMOTE] = slot[EngineField.IS_PLACED] = 1
    rig.enter(THREE[0], State.STARTING)
    rig.renew(*THREE)
    assert rig.current == THREE[0]
    rig.replace(THREE[0], State.STARTING)
    assert rig.current == THREE[1]


def test_a_placed_engine_that_was_back_delays_no_renewal() -> None:
    """It is lost after it has been renewed."""
    rig, last = Rig(THREE), THREE[1]
    for slot in rig.board.of("engine"):
        slot[EngineField.IS_REMOTE] = slot[EngineField.IS_PLACED] = 1
    rig.renew(last)
    assert rig.current == last
    rig.replace(last, State.STARTING)
    rig.enter(last, State.READY)
    assert rig.current is None
    rig.enter(last, State.STARTING)
    rig.renew(THREE[0])
    assert rig.current == THREE[0]


def test_a_placed_engine_that_leaves_delays_no_renewal() -> None:
    rig = Rig(THREE)
    for slot in rig.board.of("engine"):
        slot[EngineField.IS_REMOTE] = slot[EngineField.IS_PLACED] = 1
    rig.renew(*THREE[1:])
    assert rig.current == THREE[1]
    rig.replace(THREE[1], State.STARTING)
    assert rig.current is None
    rig.seats.resize(0, 2)
    assert rig.current == THREE[2]


def test_a_renewal_waits_for_the_successor_of_a_local_engine() -> None:
    rig = Rig()
    rig.renew(*ENGINES)
    assert rig.current == ENGINES[0]
    rig.replace(ENGINES[0], State.STARTING)
    assert rig.current == ENGINES[0]
    rig.enter(ENGINES[0], State.READY)
    assert rig.current == ENGINES[1]


def test_a_renewal_that_more_replicas_end_is_over() -> None:
    rig = Rig()
    rig.renew(ENGINES[1])
    assert rig.current == ENGINES[1]
    rig.seats.resize(0, 1)
    rig.seats.resize(0, 2)
    assert rig.current is None


def test_an_engine_without_others_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    caplog.set_level("INFO")
    rig.seats.vacate(1)
    rig.renew(ENGINES[0])
    assert [rig.current, rig.current] == [None] * 2
    told = "engine 0 is not replaced: its model has no other engine"
    assert [record.message for record in caplog.records] == [told]


def test_a_seat_that_is_given_up_has_no_renewal() -> None:
    rig = Rig()
    rig.renew(*ENGINES)
    assert rig.current == ENGINES[0]
    for seat in ENGINES:
        rig.renewals.forget(rig.children[seat])
    assert rig.current is None


def test_an_engine_that_loads_is_replaced_once_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    rig, tokenizer = Rig(), Seat("tokenizer", 0)
    caplog.set_level("INFO")
    rig.enter(ENGINES[0], State.STARTING)
    rig.renew(ENGINES[0], tokenizer)
    assert [rig.current, rig.current] == [None, tokenizer], "it delays no other"
    rig.replace(tokenizer)
    assert [rig.current for _ in range(3)] == [None] * 3
    assert not rig.seats.is_leaving(0)
    assert [record.message for record in caplog.records] == ["engine 0 is replaced once it serves"]
    rig.enter(ENGINES[0], State.READY)
    assert rig.current == ENGINES[0]
    assert rig.seats.is_leaving(0)


def test_the_successor_of_a_renewal_is_not_told_to_end() -> None:
    rig, tokenizer = Rig(), Seat("tokenizer", 0)
    rig.renew(tokenizer)
    assert rig.current == tokenizer
    assert rig.renewals.has_told(rig.children[tokenizer])
    rig.replace(tokenizer, State.STARTING)
    assert rig.current == tokenizer
    assert not rig.renewals.has_told(rig.children[tokenizer])
