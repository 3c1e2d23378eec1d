"""The replicas of models on the board: how many there are, and how many operators want.

A wish is a word that a frontend writes: its lowest byte is the number, or `SLEEP`, the others are
of the time, in nanoseconds. The newest of all frontends holds. The supervisor polls, and engines
that are idle do.
"""

import time
from typing import NamedTuple

from headrace.board.board import Board, Slot
from headrace.board.fields import MAX_REPLICAS, EngineField, FrontendField, Seating, WorkerField
from headrace.board.replacements import is_ready

COUNT_BITS = 8
SLEEP = (1 << COUNT_BITS) - 1  # in the place of a number: all engines are to sleep


class ReplicaCount(NamedTuple):
    """How many engines of a model there are."""

    wanted: int  # those that leave are not
    ready: int  # of those that are wanted
    leaving: int  # that end their last requests


def count_replicas(board: Board, model: int) -> ReplicaCount:
    """Return how many engines of a model there are, by its place among the server's."""
    engines = [slot for slot in board.of("engine") if slot[EngineField.MODEL] == model]
    seated = [slot for slot in engines if slot[EngineField.SEATING] == Seating.SEATED]
    return ReplicaCount(
        wanted=len(seated),
        ready=sum(map(is_ready, seated)),
        leaving=sum(slot[EngineField.SEATING] == Seating.LEAVING for slot in engines),
    )


def num_seats(board: Board, model: int) -> int:
    """Return how many engines a model may have."""
    return sum(slot[EngineField.MODEL] == model for slot in board.of("engine"))


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
    at = time.monotonic_ns() >> COUNT_BITS << COUNT_BITS
    slot[FrontendField.REPLICAS + model] = at | count


class ReplicaWishes:
    """Wishes since the last poll."""

    def __init__(self, board: Board) -> None:
        self._slots = list(board.of("frontend"))
        self._seen = self._read()

    def _read(self) -> list[int]:
        words = FrontendField.REPLICAS.words
        return [max([slot[word] for slot in self._slots], default=0) for word in words]

    def take(self) -> dict[int, int]:
        """Return the numbers that are newly wanted, by model."""
        before, self._seen = self._seen, self._read()
        return {
            model: self._seen[model] & SLEEP
            for model in range(MAX_REPLICAS)
            if self._seen[model] != before[model]
        }
