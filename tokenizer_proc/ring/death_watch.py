"""Deaths of processes, and their successors, seen on the board."""

from collections import deque
from dataclasses import dataclass

import msgspec

from headrace.board.board import Board, Slot

MAX_DEATHS = 32  # that are kept; older ones are forgotten


class Death(msgspec.Struct):
    """A process that has ended. Times are seconds since the epoch."""

    role: str
    index: int
    pid: int
    how: str  # a predicate: "was killed by SIGKILL"
    died_at: float
    back_at: float | None  # when a successor was ready; null is not yet


@dataclass
class SeenDeath:
    """A death, and the slot where its successor shows."""

    slot: Slot
    death: Death


class DeathWatch:
    """Keeps the latest deaths. The board has only the last one of each seat."""

    def __init__(self, board: Board) -> None:
        self._slots = board.slots
        self._seen: deque[SeenDeath] = deque(maxlen=MAX_DEATHS)
        self._known = [0.0] * len(board.slots)  # when the last one of each slot was, of those seen

    def look(self) -> bool:
        """Take note of deaths and of successors; return whether there is news."""
        is_news = False
        for place, slot in enumerate(self._slots):
            last = slot.last_death
            if last.died_at != self._known[place]:
                self._known[place] = last.died_at
                seat, died_at = slot.seat, round(last.died_at, 6)
                death = Death(seat.role, seat.index, last.pid, last.how, died_at, None)
                self._seen.append(SeenDeath(slot, death))
                is_news = True
        for seen in self._seen:
            served_at = round(seen.slot.last_death.served_at, 6)
            if seen.death.back_at is None and served_at >= seen.death.died_at:
                seen.death.back_at = served_at
                is_news = True
        return is_news

    def list(self) -> list[Death]:
        """Return the deaths, oldest first."""
        return sorted((seen.death for seen in self._seen), key=lambda death: death.died_at)
