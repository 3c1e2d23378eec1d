"""A process is seen to be replaced once its successor is ready."""

from headrace.board.board import Board, Seat, State
from headrace.board.fields import EngineField
from headrace.board.replacements import ReplacementWatch

TOKENIZER, ENGINE, WORKER = Seat("tokenizer", 0), Seat("engine", 0), Seat("worker", 0)


def test_replacement_is_reported_once_when_it_serves() -> None:
    board = Board.create([TOKENIZER, ENGINE, WORKER])
    watch = ReplacementWatch(board, ("tokenizer", "engine"))
    for slot in board.slots:
        slot.enter(State.STARTING)
        slot.enter(State.READY)
    assert watch.replaced() == [], "first processes are no replacements"
    board.slot("worker").enter(State.STARTING)
    board.slot("engine").die()
    board.slot("engine").enter(State.STARTING)
    assert watch.replaced() == []
    board.slot("engine").enter(State.READY)
    assert watch.replaced() == [ENGINE]
    assert watch.replaced() == []


def test_death_of_a_replica_is_reported_while_another_serves() -> None:
    board = Board.create([ENGINE, Seat("engine", 1), TOKENIZER])
    watch = ReplacementWatch(board, ("tokenizer", "engine"))
    first, second = board.of("engine")
    for slot in board.slots:
        slot.enter(State.STARTING)
        slot.enter(State.READY)
    second.die()
    board.slot("tokenizer").die()
    assert watch.replaced() == [second.seat], "no other tokenizer has what this one had"
    second.enter(State.STARTING)
    second.enter(State.READY)
    assert watch.replaced() == [], "it was reported"
    for slot in (first, second):
        slot.die()
    assert watch.replaced() == []
    first.enter(State.STARTING)
    first.enter(State.READY)
    assert watch.replaced() == [first.seat, second.seat]


def test_engine_of_another_model_is_no_replica() -> None:
    board = Board.create([ENGINE, Seat("engine", 1)])
    watch = ReplacementWatch(board, ("engine",))
    first, second = board.of("engine")
    second[EngineField.MODEL] = 1
    for slot in (first, second):
        slot.enter(State.STARTING)
        slot.enter(State.READY)
    second.die()
    assert watch.replaced() == []
    second.enter(State.STARTING)
    second.enter(State.READY)
    assert watch.replaced() == [second.seat]


def test_double_replacement_is_reported_once() -> None:
    board = Board.create([ENGINE])
    board.slots[0].enter(State.STARTING)
    watch = ReplacementWatch(board, ("engine",))
    for _ in range(2):
        board.slots[0].die()
        board.slots[0].enter(State.STARTING)
        board.slots[0].enter(State.READY)
    assert watch.replaced() == [ENGINE]


def test_a_process_that_left_in_order_has_not_died() -> None:
    board = Board.create([ENGINE, Seat("engine", 1)])
    watch = ReplacementWatch(board, ("engine",))
    for slot in board.slots:
        for state in (State.STARTING, State.READY, State.DEAD, State.STARTING, State.READY):
            slot.enter(state)
            assert watch.replaced() == []
