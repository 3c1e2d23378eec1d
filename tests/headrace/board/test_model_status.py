"""Whether a model sleeps, as the board tells."""

from headrace.board.board import Board, Seat, State
from headrace.board.fields import EngineField
from headrace.board.model_status import is_asleep


def test_a_model_sleeps_while_all_its_engines_live_and_sleep() -> None:
    board = Board.create([Seat("engine", 0), Seat("engine", 1)])
    for slot in board.of("engine"):
        slot.enter(State.READY)
        assert not is_asleep(board, 0)
        slot[EngineField.IS_ASLEEP] = 1
    assert is_asleep(board, 0)
    board.slot("engine", 1).die()
    assert not is_asleep(board, 0)
