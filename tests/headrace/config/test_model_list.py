"""What `/v1/models` says of a model, as the board has it."""

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField, EngineField, WorkerField
from headrace.board.model_status import model_status
from headrace.config.model_list import status_of

MODELS = (0, 0, 1)  # of the engines
LOADED = (125, 900, 600, 300, 950)  # per mille, of the workers
ENGINES = (0, 0, 1, 1, 2)


def loading() -> Board:
    """Return a board with two engines of a model and one of another: all load."""
    board = Board.create(
        [
            *(Seat("engine", index) for index in range(len(MODELS))),
            *(Seat("worker", index) for index in range(len(ENGINES))),
            Seat("tokenizer", 0),
        ]
    )
    for slot, model in zip(board.of("engine"), MODELS, strict=True):
        slot[EngineField.MODEL] = model
        slot.enter(State.STARTING)
    for slot, engine, progress in zip(board.of("worker"), ENGINES, LOADED, strict=True):
        slot[WorkerField.ENGINE] = engine
        slot[CommonField.PROGRESS] = progress
    return board


def test_progress_is_that_of_the_engine_that_has_loaded_most() -> None:
    board = loading()
    first, second = (status_of(model_status(board, model)) for model in (0, 1))
    assert (first.value, first.progress) == ("loading", 0.3), "its slowest worker counts"
    assert (second.value, second.progress) == ("loading", 0.95)
    board.slot("worker", 3)[CommonField.PROGRESS] = 700
    assert status_of(model_status(board, 0)).progress == 0.6, "it goes on"


def test_progress_is_whole_once_an_engine_serves() -> None:
    board = loading()
    board.slot("engine", 1).enter(State.READY)
    status = status_of(model_status(board, 0))
    assert (status.value, status.progress) == ("loaded", 1.0)


def test_nothing_is_loaded_before_the_first_worker() -> None:
    board = loading()
    for slot in board.of("worker"):
        slot[CommonField.PROGRESS] = 0
    assert status_of(model_status(board, 0)).progress == 0.0
