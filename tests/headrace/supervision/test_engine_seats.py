"""Engines leave their seats in order, and come back where they are wanted."""

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField, EngineField, Seating, TokenizerField, WorkerField
from headrace.supervision.engine_seats import FIRST_TIME, EngineSeats

PATIENCE_S = 30.0
SEATED, LEAVING, VACANT = Seating
KILLED = -9


class Rig:
    """Four seats of a model, of which the first ones have engines, and a clock."""

    def __init__(self, num_engines: int = 1) -> None:
        engines = [Seat("engine", index) for index in range(4)]
        self.board = Board.create([*engines, Seat("worker", 0), Seat("tokenizer", 0)])
        self.board.slot("worker")[WorkerField.ENGINE] = 1
        self.slots = list(self.board.of("engine"))
        self.now = 0.0
        self.seats = EngineSeats(self.board, PATIENCE_S, lambda: self.now)
        for slot in self.slots[num_engines:]:
            self.seats.vacate(slot.seat.index)
        for engine in range(num_engines):
            self.start(engine)

    def start(self, engine: int) -> None:
        """Have a process serve in a seat."""
        self.seats.take(engine)
        self.slots[engine].enter(State.STARTING)
        self.slots[engine].enter(State.READY)

    def end(self, engine: int, code: int = 0) -> bool | None:
        """Have the process of a seat end; return whether another is to take it."""
        departure = self.seats.end(engine, code)
        return None if departure is None else departure.returns

    def leave(self, engine: int) -> None:
        """Have an engine that is leaving go in order."""
        assert self.seats.due() == {}
        assert self.seats.due() == {engine: FIRST_TIME}
        if self.end(engine):
            self.start(engine)
        else:
            self.seats.vacate(engine)

    @property
    def seatings(self) -> list[int]:
        return [slot[EngineField.SEATING] for slot in self.slots]


def test_more_replicas_take_vacant_seats() -> None:
    rig = Rig()
    assert rig.seats.resize(0, 3) == [1, 2]
    rig.start(1)
    rig.start(2)
    assert rig.seats.resize(0, 3) == []
    assert rig.seats.resize(0, 9) == [3], "there are no more"


def test_fewer_replicas_keep_those_that_serve() -> None:
    rig = Rig(3)
    rig.slots[0].enter(State.STARTING)
    assert rig.seats.resize(0, 2) == []
    assert rig.seatings == [LEAVING, SEATED, SEATED, VACANT]
    assert rig.seats.resize(0, 1) == []
    assert rig.seatings == [LEAVING, SEATED, LEAVING, VACANT]


def test_engines_of_other_machines_are_left_alone() -> None:
    rig = Rig(3)
    for slot in rig.slots[1:3]:
        slot[EngineField.IS_REMOTE] = 1
    assert rig.seats.resize(0, 2) == [3], "one of this machine beside the other"
    assert rig.seats.resize(0, 0) == []
    assert rig.seatings == [LEAVING, SEATED, SEATED, VACANT]


def test_an_engine_without_requests_leaves_unnoticed() -> None:
    rig = Rig(2)
    rig.slots[1][EngineField.RUNNING] = 3
    rig.seats.resize(0, 1)
    rig.leave(1)
    assert rig.seatings == [SEATED, VACANT, VACANT, VACANT]
    assert [slot[CommonField.DEATHS] for slot in rig.slots] == [0, 0, 0, 0]
    assert not rig.seats.are_changing
    assert rig.slots[1][EngineField.RUNNING] == 0, "it tells of nothing any more"
    assert rig.board.occupied() == [rig.slots[0], rig.board.slot("tokenizer")]


def test_an_engine_stays_until_it_has_no_request() -> None:
    rig = Rig(2)
    tokenizer, slot = rig.board.slot("tokenizer"), rig.slots[1]
    slot[EngineField.IS_BUSY] = 1
    rig.seats.resize(0, 1)
    for _ in range(3):
        assert rig.seats.due() == {}
    slot[EngineField.IS_BUSY] = 0
    assert rig.seats.due() == {}
    assert rig.seatings[1] == VACANT
    tokenizer[TokenizerField.SENT_TOKENS + 1] = 7  # just before the seat was vacant
    for _ in range(3):
        assert rig.seats.due() == {}
    slot[EngineField.TAKEN_TOKENS] = 7
    assert rig.seats.due() == {1: FIRST_TIME}
    assert rig.seats.due() == {}, "it knows"


def test_an_engine_that_takes_too_long_dies() -> None:
    rig = Rig(2)
    rig.slots[1][EngineField.IS_BUSY] = 1
    rig.seats.resize(0, 1)
    rig.now = PATIENCE_S - 1
    assert rig.seats.due() == {}
    rig.now = PATIENCE_S
    assert rig.seats.due() == {1: FIRST_TIME}
    assert rig.seatings[1] == VACANT
    assert rig.end(1) is False
    assert rig.slots[1][CommonField.DEATHS] == 1, "its requests are sent again"


@pytest.mark.parametrize("is_told", [False, True])
def test_an_engine_that_is_killed_while_it_leaves_dies(is_told: bool) -> None:
    rig = Rig(2)
    rig.seats.resize(0, 1)
    if is_told:
        assert rig.seats.due() == {}
        assert rig.seats.due() == {1: FIRST_TIME}
    assert rig.end(1, KILLED) is False
    assert rig.slots[1][CommonField.DEATHS] == 1


def test_an_engine_that_never_served_leaves_in_order() -> None:
    rig = Rig(1)
    assert rig.seats.resize(0, 2) == [1]
    rig.seats.take(1)
    rig.slots[1].enter(State.STARTING)
    rig.seats.resize(0, 1)
    assert rig.seats.due() == {}
    assert rig.seats.due() == {1: FIRST_TIME}
    assert rig.end(1, -15) is False
    assert rig.slots[1][CommonField.DEATHS] == 0


def test_an_end_before_the_start_hides_no_death() -> None:
    rig = Rig(2)
    rig.seats.resize(0, 1)
    rig.leave(1)
    assert rig.seats.resize(0, 2) == [1]
    rig.seats.take(1)
    rig.seats.resize(0, 1)
    assert rig.seats.due() == {}
    assert rig.seats.due() == {1: FIRST_TIME}
    assert rig.end(1, KILLED) is False, "its process has told of nothing yet"
    rig.start(1)
    rig.end(1, KILLED)
    assert rig.slots[1][CommonField.DEATHS] == 1


def test_an_engine_that_has_died_is_given_up() -> None:
    rig = Rig(2)
    rig.end(1, KILLED)
    assert not rig.seats.is_given_up(1)
    assert rig.seats.resize(0, 1) == []
    assert rig.seats.is_given_up(1)
    assert rig.end(1) is False
    assert not rig.seats.is_leaving(1)
    assert rig.slots[1][CommonField.DEATHS] >= 1


def test_fewer_replicas_keep_none_that_is_renewed() -> None:
    rig = Rig(2)
    assert rig.seats.renew(0)
    assert rig.seats.resize(0, 1) == []
    assert rig.seatings[:2] == [LEAVING, SEATED]
    assert rig.seats.is_given_up(0)


def test_a_renewal_ends_where_its_engine_stays() -> None:
    rig = Rig(2)
    assert rig.seats.renew(1)
    assert rig.seats.is_leaving(1)
    rig.seats.resize(0, 1)
    rig.seats.resize(0, 2)
    assert not rig.seats.is_leaving(1)


def test_an_engine_that_leaves_stays_where_it_is_wanted_again() -> None:
    rig = Rig(2)
    rig.seats.resize(0, 1)
    assert rig.seats.due() == {}
    assert rig.seats.resize(0, 2) == []
    assert rig.seatings[:2] == [SEATED, SEATED]
    assert not rig.seats.are_changing


def test_another_follows_where_it_is_too_late_to_stay() -> None:
    rig = Rig(4)
    rig.seats.resize(0, 3)
    assert rig.seats.due() == {}
    assert rig.seats.due() == {3: FIRST_TIME}
    assert rig.seats.resize(0, 4) == []
    assert rig.end(3) is True
    assert rig.slots[3][CommonField.DEATHS] == 0


def test_a_renewed_engine_comes_back() -> None:
    rig = Rig(2)
    assert rig.seats.has_replicas(0)
    assert rig.seats.renew(0)
    assert rig.seatings[:2] == [LEAVING, SEATED]
    assert not rig.seats.renew(1), "it would leave none"
    rig.leave(0)
    assert rig.seatings[:2] == [SEATED, SEATED]
    assert rig.slots[0][CommonField.DEATHS] == 0
    assert rig.seats.renew(1)


def test_an_engine_that_returns_keeps_its_share() -> None:
    rig = Rig(3)
    assert rig.seats.renew(0)
    assert rig.seats.staying(1) == rig.slots[:3]
    rig.seats.resize(0, 2)
    assert rig.seats.staying(1) == rig.slots[1:3]


def test_a_single_engine_is_not_renewed() -> None:
    rig = Rig(1)
    assert not rig.seats.has_replicas(0)
    assert not rig.seats.renew(0)
    assert rig.seatings[0] == SEATED


def test_an_engine_that_is_renewed_may_have_to_leave() -> None:
    rig = Rig(2)
    assert rig.seats.renew(1)
    assert rig.seats.resize(0, 1) == []
    rig.leave(1)
    assert rig.seatings[:2] == [SEATED, VACANT]


def test_a_lost_signal_is_sent_again() -> None:
    rig = Rig(2)
    rig.seats.resize(0, 1)
    assert rig.seats.due() == {}
    assert rig.seats.due() == {1: FIRST_TIME}
    rig.now += 60
    assert rig.seats.due() == {1: 2}
