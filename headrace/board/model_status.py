"""Whether a model is loaded, as the board tells. Models are given by their places."""

import enum
import time
from dataclasses import dataclass

from headrace.board.board import Board, Slot
from headrace.board.fields import CommonField, EngineField, Seating, TokenizerField, WorkerField
from headrace.board.replacements import is_ready


class ModelState(enum.Enum):
    """What becomes of requests for a model. All but the first take memory."""

    UNLOADED = "unloaded"  # they wait until it is loaded
    LOADING = "loading"  # they wait
    LOADED = "loaded"  # they run
    UNLOADING = "unloading"  # those that run end; others wait until it is loaded again


@dataclass(frozen=True)
class ModelStatus:
    """A model as it is now."""

    state: ModelState
    num_waiting: int  # sequences that wait for an engine
    progress: float  # of the engine that has loaded most, 0 to 1
    failure: str = ""  # why it could not be loaded; it is not tried again
    retry_s: float = 0.0  # before these seconds have passed
    is_asleep: bool = False  # as `is_asleep` has it


def engines_of(board: Board, model: int) -> list[Slot]:
    """Return the seats of a model's engines."""
    return [slot for slot in board.of("engine") if slot[EngineField.MODEL] == model]


def model_state(board: Board, model: int) -> ModelState:
    """Return the state of a model."""
    engines = engines_of(board, model)
    seated = [slot for slot in engines if slot[EngineField.SEATING] == Seating.SEATED]
    if seated:
        return ModelState.LOADED if any(map(is_ready, seated)) else ModelState.LOADING
    is_gone = all(map(board.is_vacant, engines))
    return ModelState.UNLOADED if is_gone else ModelState.UNLOADING


def num_waiting(board: Board, model: int) -> int:
    """Return how many sequences wait for an engine of a model, in all tokenizer processes."""
    return sum([slot[TokenizerField.WAITING + model] for slot in board.of("tokenizer")])


def model_status(board: Board, model: int) -> ModelStatus:
    """Return the status of a model."""
    state = model_state(board, model)
    failed, retry_s = None, 0.0
    if state is ModelState.UNLOADED:
        failed, retry_s = last_failure(engines_of(board, model))
    return ModelStatus(
        state=state,
        num_waiting=num_waiting(board, model),
        progress=progress_of(board, model, state),
        failure="" if failed is None else failed.last_death.how,
        retry_s=retry_s,
        is_asleep=is_asleep(board, model),
    )


def is_asleep(board: Board, model: int) -> bool:
    """Whether all engines of a model sleep. A request wakes one of them."""
    engines = engines_of(board, model)
    seated = [slot for slot in engines if slot[EngineField.SEATING] == Seating.SEATED]
    return bool(seated) and all(is_ready(slot) and slot[EngineField.IS_ASLEEP] for slot in seated)


def progress_of(board: Board, model: int, state: ModelState) -> float:
    """Return which share of a model is loaded: the most of all its engines."""
    if state in (ModelState.LOADED, ModelState.UNLOADING):
        return 1.0
    shares: dict[int, float] = {}  # by engine: what its slowest worker has
    for slot in board.occupied("worker"):
        engine = board.slot("engine", slot[WorkerField.ENGINE])
        if engine[EngineField.MODEL] == model:
            share = slot[CommonField.PROGRESS] / 1000
            shares[engine.seat.index] = min(share, shares.get(engine.seat.index, 1.0))
    return max(shares.values(), default=0.0)


def last_failure(engines: list[Slot]) -> tuple[Slot | None, float]:
    """Return the engine that could not be loaded, and in how many seconds it is tried again.

    There is none where that is due.
    """
    latest = max(engines, key=lambda slot: slot[EngineField.RETRY_NS], default=None)
    if latest is None:
        return None, 0.0
    retry_s = (latest[EngineField.RETRY_NS] - time.monotonic_ns()) / 1e9
    return (latest, retry_s) if retry_s > 0 else (None, 0.0)
