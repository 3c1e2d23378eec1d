"""The replicas of models on the board: how many there are, and how many operators want.

A wish is a word that a frontend writes: its lowest byte is the number, the others are of the time,
in nanoseconds. The newest of all frontends holds. The supervisor polls; of sleep, engines do.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from headrace.board.board import Board, Slot
from headrace.board.fields import EngineField, FrontendField, Seating, WorkerField
from headrace.board.replacements import is_ready

COUNT_BITS = 8


class ReplicaCount(NamedTuple):
    """How many engines of a model there are."""

    wanted: int  # those that leave are not
    ready: int  # of those that are wanted
    leaving: int  # that end their last requests


def own_engines(board: Board, model: int) -> list[Slot]:
    """Return the seats of engines that this server starts, here or by Ray, for a model.

    Operators have as many of them as they want. The model is given by its place among the server's.
    """
    engines = [slot for slot in board.of("engine") if slot[EngineField.MODEL] == model]
    return [slot for slot in engines if slot[EngineField.IS_PLACED] or not board.is_remote(slot)]


def load_size(board: Board, model: int) -> int:
    """Return how many engines this server starts for a model when that is loaded, or again."""
    return next(
        slot[EngineField.LOAD_SIZE]
        for slot in board.of("engine")
        if slot[EngineField.MODEL] == model
    )


def count_replicas(engines: Sequence[Slot]) -> ReplicaCount:
    """Return how many engines there are in the seats of a model."""
    seated = [slot for slot in engines if slot[EngineField.SEATING] == Seating.SEATED]
    return ReplicaCount(
        wanted=len(seated),
        ready=sum(map(is_ready, seated)),
        leaving=sum(slot[EngineField.SEATING] == Seating.LEAVING for slot in engines),
    )


def adapter_bytes(board: Board, model: int) -> int:
    """Return what adapters of one engine of a model may take, as the last workers reckoned it."""
    return max(
        (
            slot[WorkerField.ADAPTER_BYTES]
            for slot in board.of("worker")
            if board.slot("engine", slot[WorkerField.ENGINE])[EngineField.MODEL] == model
        ),
        default=0,
    )


def wish_replicas(slot: Slot, model: int, count: int) -> None:
    """Note that operators want so many engines of a model, of 0 none; for the slot's owner."""
    slot[FrontendField.REPLICAS + model] = wish_of(count)


def wish_sleep(slot: Slot, model: int, sleeps: bool) -> None:
    """Note that operators want a model to sleep, or to be awake; for the slot's owner."""
    slot[FrontendField.SLEEPS + model] = wish_of(sleeps)


def wish_of(number: int) -> int:
    """Return a wish of this moment."""
    return time.monotonic_ns() >> COUNT_BITS << COUNT_BITS | number


class ModelWishes:
    """Wishes since the last poll.

    Args:
        field: of all models' wishes.
    """

    def __init__(self, board: Board, field: FrontendField) -> None:
        self._slots = list(board.of("frontend"))
        self._words = field.words
        self._seen = self._read()

    def _read(self) -> list[int]:
        return [max([slot[word] for slot in self._slots], default=0) for word in self._words]

    def take(self) -> dict[int, int]:
        """Return the numbers that are newly wanted, by model."""
        before, self._seen = self._seen, self._read()
        return {
            model: wish % (1 << COUNT_BITS)
            for model, wish in enumerate(self._seen)
            if wish != before[model]
        }
