"""What operators want and what requests need share the memory that there is."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import EngineField, Seating, TokenizerField
from headrace.board.replicas import load_size, wish_replicas, wish_sleep
from headrace.supervision.engine_seats import EngineSeats
from headrace.supervision.load_policy import LoadPolicy
from headrace.supervision.model_loads import ModelLoads

SHARES = [0.4, 0.4]


class Rig:
    """Two models of one engine each by their flags. The second one has two, and the first none."""

    def __init__(self) -> None:
        seats = [Seat("engine", index) for index in range(3)]
        self.board = Board.create([*seats, Seat("tokenizer", 0), Seat("frontend", 0)])
        self.engines = list(self.board.of("engine"))
        for slot in self.engines:
            slot[EngineField.MODEL] = slot.seat.index > 0
            slot.enter(State.READY)
        self.end(0)
        groups: Any = [
            SimpleNamespace(
                card=SimpleNamespace(name=name), config=SimpleNamespace(data_parallel_size=1)
            )
            for name in ("first", "second")
        ]
        policy = LoadPolicy(SHARES, 1, growths=SHARES)
        self.seats = EngineSeats(self.board, 60)
        self.loads = ModelLoads(self.board, groups, self.seats, policy, lambda: 0.0)

    def end(self, engine: int) -> None:
        slot = self.engines[engine]
        slot[EngineField.SEATING] = Seating.VACANT
        slot.die()

    @property
    def seatings(self) -> list[int]:
        return [slot[EngineField.SEATING] for slot in self.engines]


def test_a_model_that_has_grown_makes_room_for_another() -> None:
    rig = Rig()
    rig.board.slot("tokenizer")[TokenizerField.WAITING] = 1
    assert rig.loads.look() == []
    assert rig.seatings == [Seating.VACANT, Seating.LEAVING, Seating.LEAVING]
    rig.end(1)
    assert rig.loads.look() == [0], "there is room beside the other one"


def test_a_model_with_the_engines_of_its_flags_stays() -> None:
    rig = Rig()
    rig.end(2)
    rig.board.slot("tokenizer")[TokenizerField.WAITING] = 1
    assert rig.loads.look() == [0]
    assert rig.seatings[1] == Seating.SEATED


def test_an_unloaded_model_is_left_alone_until_it_is_asked_for() -> None:
    rig = Rig()
    assert rig.loads.are_settled
    rig.board.slot("tokenizer")[TokenizerField.WAITING] = 1
    assert not rig.loads.are_settled
    rig.board.slot("tokenizer")[TokenizerField.WAITING] = 0
    rig.engines[1][EngineField.SEATING] = rig.engines[2][EngineField.SEATING] = Seating.LEAVING
    assert not rig.loads.are_settled


def test_sleep_that_is_wanted_next_loses_no_number() -> None:
    rig = Rig()
    slot = rig.board.slot("frontend")
    wish_replicas(slot, 1, 0)
    wish_sleep(slot, 1, True)
    rig.loads.look()
    assert rig.seatings[1:] == [Seating.LEAVING, Seating.LEAVING]


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_model_that_is_loaded_again_has_its_engines(is_asked: bool) -> None:
    rig = Rig()
    slot = rig.board.slot("frontend")
    assert load_size(rig.board, 1) == 1, "by its flags"
    wish_replicas(slot, 1, 2)
    rig.loads.look()
    wish_replicas(slot, 1, 0)
    rig.loads.look()
    for engine in (1, 2):
        rig.seats.end(engine, 0)
        rig.seats.vacate(engine)
    if is_asked:
        wish_replicas(slot, 1, load_size(rig.board, 1))
    else:
        rig.board.slot("tokenizer")[TokenizerField.WAITING + 1] = 1
    assert rig.loads.look() == [1, 2]


def test_more_engines_that_cannot_start_are_not_loaded_again() -> None:
    rig = Rig()
    rig.end(2)
    rig.seats.vacate(2)
    rig.loads.look()
    wish_replicas(rig.board.slot("frontend"), 1, 2)
    assert rig.loads.look() == [2]
    assert load_size(rig.board, 1) == 2
    rig.seats.take(2)
    rig.loads.look()
    rig.seats.vacate(2)
    rig.loads.fail(2)
    assert load_size(rig.board, 1) == 1


def test_engines_that_have_served_outlast_a_failure() -> None:
    rig = Rig()
    wish_replicas(rig.board.slot("frontend"), 1, 2)
    assert rig.loads.look() == []
    rig.loads.look()
    rig.end(2)
    rig.seats.vacate(2)
    rig.loads.fail(2)
    assert load_size(rig.board, 1) == 2, "both have served"
