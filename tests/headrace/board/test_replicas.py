"""How many engines a model has, and is to have."""

from headrace.board.board import Board, Seat, State
from headrace.board.fields import EngineField, Seating
from headrace.board.replicas import ReplicaWishes, count_replicas, num_seats, wish_replicas


def test_replicas_are_counted_by_model() -> None:
    board = Board.create([Seat("engine", index) for index in range(5)])
    slots = list(board.of("engine"))
    slots[4][EngineField.MODEL] = 1
    for slot in slots[1:]:
        slot.enter(State.READY)
    slots[2][EngineField.SEATING] = Seating.LEAVING
    slots[3][EngineField.SEATING] = Seating.VACANT
    assert count_replicas(board, 0) == (2, 1, 1)
    assert count_replicas(board, 1) == (1, 1, 0)
    assert [num_seats(board, model) for model in (0, 1, 2)] == [4, 1, 0]


def test_the_newest_wish_holds_and_is_taken_once() -> None:
    board = Board.create([Seat("frontend", 0), Seat("frontend", 1)])
    first, second = board.of("frontend")
    wish_replicas(first, 0, 7)
    wishes = ReplicaWishes(board)
    assert wishes.take() == {}, "it is of the time before"
    wish_replicas(second, 0, 3)
    wish_replicas(first, 2, 1)
    assert wishes.take() == {0: 3, 2: 1}
    assert wishes.take() == {}
    wish_replicas(second, 0, 4)
    wish_replicas(first, 0, 2)
    assert wishes.take() == {0: 2}
