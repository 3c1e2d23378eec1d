"""How many engines a model has, and is to have."""

from headrace.board.board import Board, Seat, State
from headrace.board.fields import EngineField, FrontendField, Seating
from headrace.board.replicas import (
    ModelWishes,
    count_replicas,
    own_engines,
    wish_replicas,
    wish_sleep,
)


def test_replicas_are_counted_by_model() -> None:
    board = Board.create([Seat("engine", index) for index in range(5)])
    slots = list(board.of("engine"))
    slots[4][EngineField.MODEL] = 1
    for slot in slots[1:]:
        slot.enter(State.READY)
    slots[2][EngineField.SEATING] = Seating.LEAVING
    slots[3][EngineField.SEATING] = Seating.VACANT
    assert count_replicas(own_engines(board, 0)) == (2, 1, 1)
    assert count_replicas(own_engines(board, 1)) == (1, 1, 0)
    assert [len(own_engines(board, model)) for model in (0, 1, 2)] == [4, 1, 0]
    slots[1][EngineField.IS_REMOTE] = 1
    assert own_engines(board, 0) == [slots[0], *slots[2:4]]


def test_the_newest_wish_holds_and_is_taken_once() -> None:
    board = Board.create([Seat("frontend", 0), Seat("frontend", 1)])
    first, second = board.of("frontend")
    wish_replicas(first, 0, 7)
    wishes = ModelWishes(board, FrontendField.REPLICAS)
    assert wishes.take() == {}, "it is of the time before"
    wish_replicas(second, 0, 3)
    wish_replicas(first, 2, 1)
    assert wishes.take() == {0: 3, 2: 1}
    assert wishes.take() == {}
    wish_replicas(second, 0, 4)
    wish_replicas(first, 0, 2)
    assert wishes.take() == {0: 2}


def test_a_wish_for_sleep_leaves_that_for_replicas() -> None:
    board = Board.create([Seat("frontend", 0)])
    counts, sleeps = (
        ModelWishes(board, field) for field in (FrontendField.REPLICAS, FrontendField.SLEEPS)
    )
    wish_replicas(board.slot("frontend"), 1, 3)
    wish_sleep(board.slot("frontend"), 1, True)
    assert (counts.take(), sleeps.take()) == ({1: 3}, {1: 1})
    wish_sleep(board.slot("frontend"), 1, False)
    assert (counts.take(), sleeps.take()) == ({}, {1: 0})
