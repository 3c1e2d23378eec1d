"""Replaced processes of the ring, seen on the board."""

from headrace.board.board import Board, Seat, Slot, State
from headrace.board.fields import CommonField


class ReplacementWatch:
    """Reports deaths of processes of some roles once others can do their work.

    That is once a successor is ready; for an engine, as soon as another of its model is. Where none
    follows, because its model is unloaded, requests wait until that is loaded again.
    """

    def __init__(self, board: Board, roles: tuple[str, ...]) -> None:
        self._slots = [slot for role in roles for slot in board.of(role)]
        self._board = board
        self._deaths = [slot[CommonField.DEATHS] for slot in self._slots]  # that were reported

    def replaced(self) -> list[Seat]:
        """Return the seats of processes that have died, and whose work can go on, since the last
        call."""
        found = []
        for place, slot in enumerate(self._slots):
            deaths = slot[CommonField.DEATHS]
            if deaths != self._deaths[place] and self._can_go_on(slot):
                found.append(slot.seat)
                self._deaths[place] = deaths
        return found

    def _can_go_on(self, slot: Slot) -> bool:
        """Whether a process takes the work of the one that died, or, where none follows, may."""
        return is_ready(slot) or self._board.is_vacant(slot) or self._has_replica(slot)

    def _has_replica(self, slot: Slot) -> bool:
        """Whether another process that serves takes the requests of this one."""
        return slot.seat.role == "engine" and any(map(is_ready, self._board.replicas_of(slot)))


def is_ready(slot: Slot) -> bool:
    """Whether a process serves in a slot."""
    return slot[CommonField.STATE] == State.READY
