"""Which process is replaced next, of those that are to be: one at a time."""

import logging
import signal
from collections import deque

from headrace.board.board import Board, Seat, Slot
from headrace.board.fields import EngineField, Seating
from headrace.board.replacements import is_ready
from headrace.runtime.process import LEAVE, Process
from headrace.supervision.engine_seats import EngineSeats
from headrace.supervision.seated_process import SeatedProcess

log = logging.getLogger(__name__)


class Renewals:
    """The processes that are to be replaced, in order.

    An engine whose replicas do not serve goes to the end of the queue, so all others pass it. So do
    all engines while one of Ray's is not back yet.
    """

    def __init__(self, board: Board, engine_seats: EngineSeats) -> None:
        self._board = board
        self._engine_seats = engine_seats
        self._waiting: deque[SeatedProcess] = deque()
        self._current: tuple[SeatedProcess, Process] | None = None  # and its predecessor
        self._put_off: set[Seat] = set()  # engines of which the log tells that they wait
        self._placed: Slot | None = None  # one of Ray's that has been told, and is not back yet

    def add(self, child: SeatedProcess) -> None:
        """Have a process replaced at its turn."""
        if child not in self._waiting:
            self._waiting.append(child)

    def forget(self, child: SeatedProcess) -> None:
        """Have a process not replaced."""
        self._put_off.discard(child.seat)
        if child in self._waiting:
            self._waiting.remove(child)
        if self.is_current(child):
            self._current = None

    def add_again(self, child: SeatedProcess) -> None:
        """Have an engine replaced later whose seat's process has ended before its turn came.

        A local engine has ended with it. One that Ray has placed goes on elsewhere.
        """
        if self._board.slot(child.seat.role, child.seat.index)[EngineField.IS_PLACED]:
            if self.is_current(child):
                self._current = self._placed = None
            self.add(child)

    def is_current(self, child: SeatedProcess) -> bool:
        """Whether a process is being replaced."""
        return self._current is not None and self._current[0] is child

    def has_told(self, child: SeatedProcess) -> bool:
        """Whether the process of a seat is to end for another; its successor is not."""
        return self._current == (child, child.process)

    def go_on(self) -> None:
        """Have the next process replaced, once the one before it has been."""
        if self._current is not None and self._is_over(*self._current):
            self._current = None
        if self._current is None and self._placed is not None and not is_awaited(self._placed):
            self._placed = None
        if self._current is None and self._waiting:
            self._begin(self._waiting.popleft())

    def _is_over(self, child: SeatedProcess, before: Process) -> bool:
        """Whether a successor serves. An engine's may wait for another machine, so that is over."""
        if child.process is not before:
            slot = self._board.slot(child.seat.role, child.seat.index)
            return is_ready(slot) or self._board.is_remote(slot)
        if child.is_engine:
            return self._stays(child)  # more replicas are wanted meanwhile
        if child.seat.role != "frontend":
            before.send_signal(signal.SIGTERM)  # once more: it may have got lost
        return False

    def _begin(self, child: SeatedProcess) -> None:
        if child.is_engine:
            self._begin_engine(child)
            return
        child.process.send_signal(LEAVE if child.seat.role == "frontend" else signal.SIGTERM)
        self._current = child, child.process

    def _begin_engine(self, child: SeatedProcess) -> None:
        """Replace an engine that has loaded, if others of its model serve meanwhile."""
        if not self._engine_seats.has_replicas(child.seat.index):
            log.info("%s is not replaced: its model has no other engine", child.seat)
        elif child.start_at is None:  # else it is being replaced
            slot = self._board.slot("engine", child.seat.index)
            what, is_placed = self._lacks(slot), is_ready(slot) and slot[EngineField.IS_PLACED]
            if not what and not self._engine_seats.renew(child.seat.index):
                what = "another engine of its model serves"
            if what:
                self._wait(child, what)
                return
            self._current = child, child.process
            if is_placed:
                self._placed = slot
        self._put_off.discard(child.seat)

    def _lacks(self, slot: Slot) -> str:
        """Return what is to happen before an engine is replaced, or ""."""
        if not (is_ready(slot) or self._board.is_remote(slot)):
            return "it serves"  # it loads its model
        return "" if self._placed is None else f"{self._placed.seat} serves"

    def _wait(self, child: SeatedProcess, what: str) -> None:
        """Have an engine wait for something."""
        self._waiting.append(child)
        if child.seat not in self._put_off:
            self._put_off.add(child.seat)
            log.info("%s is replaced once %s", child.seat, what)

    def _stays(self, child: SeatedProcess) -> bool:
        """Whether an engine lives and is not leaving."""
        return child.start_at is None and not self._engine_seats.is_leaving(child.seat.index)


def is_awaited(slot: Slot) -> bool:
    """Whether an engine is to come back, and does not serve yet."""
    return slot[EngineField.SEATING] == Seating.SEATED and not is_ready(slot)
