"""Replaced processes of the ring, seen on the board."""

from headrace.board.board import Board, Field, Seat, State


class ReplacementWatch:
    """Reports replaced processes of some roles since the last call."""

    def __init__(self, board: Board, roles: tuple[str, ...]) -> None:
        self._slots = [slot for role in roles for slot in board.of(role)]
        self._starts = [slot[Field.STARTS] for slot in self._slots]

    def replaced(self) -> list[Seat]:
        """Return whose successors have become ready since the last time."""
        found = []
        for place, slot in enumerate(self._slots):
            starts = slot[Field.STARTS]
            if starts != self._starts[place] and slot[Field.STATE] == State.READY:
                if self._starts[place]:  # not the first of all
                    found.append(slot.seat)
                self._starts[place] = starts
        return found
