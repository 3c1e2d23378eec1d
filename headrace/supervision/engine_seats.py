"""Which engines keep their seats, and when those that leave end.

An engine leaves in three steps, of which the board tells all processes. It gets no new requests.
When it has none, its seat is vacant: nothing is sent there any more. If then it has none still, it
ends, and no request notices. After `patience_s` it ends with those that it has. That is a death,
after which they go on elsewhere.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.board.backlog import Backlog, engine_backlog
from headrace.board.board import Board, Slot, State
from headrace.board.fields import CommonField, EngineField, Seating
from headrace.board.replacements import is_ready
from headrace.board.replicas import own_engines

FIRST_TIME = 1  # that an engine is told to end
TOLD_AGAIN_S = 15.0  # a signal may get lost; a KV store has some seconds for its last pages


@dataclass
class Departure:
    """An engine that leaves its seat.

    `returns` tells that another one takes it.
    """

    slot: Slot
    backlog: Backlog
    until: float  # it may have requests
    returns: bool
    told_at: float | None = None  # that it is to end
    num_told: int = 0
    was_empty: bool = False  # when it was told

    @property
    def is_empty(self) -> bool:
        """Whether the engine has no request, and none is on its way.

        What has come counts as taken once the engine counts as busy.
        """
        return not self.backlog() and not self.slot[EngineField.IS_BUSY]


class EngineSeats:
    """The seats of all engines on the board. Only the supervisor writes.

    Args:
        patience_s: for the requests of an engine that leaves.
        clock: returns seconds and never goes back.
    """

    def __init__(
        self, board: Board, patience_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._board = board
        self._patience_s = patience_s
        self._clock = clock
        self._departures: dict[int, Departure] = {}  # by engine

    @property
    def are_changing(self) -> bool:
        """Whether engines are leaving."""
        return bool(self._departures)

    def resize(self, model: int, count: int) -> list[int]:
        """Have a server start so many engines of a model, if there are seats; return the new ones.

        Engines stay that are not leaving, serve, and have the first seats, in this order.
        """
        engines = own_engines(self._board, model)
        staying = [slot for slot in engines if self._stays(slot)]
        for slot in sorted(staying, key=self._rank)[count:]:
            self._begin(slot, returns=False)
        num_missing = count - len(staying)
        leaving = [slot for slot in engines if slot.seat.index in self._departures]
        vacant = [slot for slot in engines if slot not in (*staying, *leaving)]
        # One that has not been told to end yet can stay.
        leaving.sort(key=lambda slot: self._departures[slot.seat.index].told_at is not None)
        started = []
        for slot in [s for s in (*leaving, *vacant) if s not in staying][: max(num_missing, 0)]:
            if slot.seat.index in self._departures:
                self._keep(slot)
            else:
                started.append(slot.seat.index)
        return started

    def staying(self, engine: int) -> list[Slot]:
        """Return the engines of an engine's model that are to serve, those that return included."""
        own = self._board.slot("engine", engine)
        return [slot for slot in self._board.replicas_of(own) if self._stays(slot)]

    def is_leaving(self, engine: int) -> bool:
        """Whether an engine leaves, for good or for another in its seat."""
        return engine in self._departures

    def is_given_up(self, engine: int) -> bool:
        """Whether an engine leaves for good."""
        return self.is_leaving(engine) and not self._departures[engine].returns

    def has_replicas(self, engine: int) -> bool:
        """Whether other engines of its model are to serve."""
        own = self._board.slot("engine", engine)
        return any(slot is not own for slot in self.staying(engine))

    def renew(self, engine: int) -> bool:
        """Have an engine leave for another in its seat, if others of its model serve meanwhile."""
        serving = [
            one
            for one in self._others(engine)
            if is_ready(one) and one[EngineField.SEATING] == Seating.SEATED
        ]
        if engine in self._departures or not serving:
            return False
        self._begin(self._board.slot("engine", engine), returns=True)
        return True

    def due(self) -> dict[int, int]:
        """Take the next step with engines that leave.

        Returns:
            By engine that is to be told to end, how often it has been told with this time.
        """
        now = self._clock()
        told = {}
        for engine, departure in self._departures.items():
            if departure.told_at is not None:
                if now < departure.told_at + TOLD_AGAIN_S:
                    continue
            elif now < departure.until:
                is_vacant = departure.slot[EngineField.SEATING] == Seating.VACANT
                if departure.is_empty:
                    self._board.seat(departure.slot, Seating.VACANT)
                    departure.was_empty = is_vacant
                if not departure.was_empty:
                    continue
            self._board.seat(departure.slot, Seating.VACANT)
            departure.told_at = now
            departure.num_told += 1
            told[engine] = departure.num_told
        return told

    def end(self, engine: int, code: int) -> Departure | None:
        """Note that the process of an engine has ended; return its departure, if it was leaving.

        If that was in order, it is no death to those that had requests there.
        """
        slot = self._board.slot("engine", engine)
        departure = self._departures.pop(engine, None)
        was_empty = departure is not None and departure.was_empty
        if was_empty and (code == 0 or slot[CommonField.STATE] != State.READY):
            slot[CommonField.STATE] = State.DEAD
        else:
            slot.die()
        self._board.note_seating()
        if departure is not None and departure.returns:  # not before: nothing is sent to the dead
            self._board.seat(slot, Seating.SEATED)
        return departure

    def take(self, engine: int) -> None:
        """Note that a process starts in a seat."""
        slot = self._board.slot("engine", engine)
        slot[EngineField.RETRY_NS] = 0
        self._board.seat(slot, Seating.SEATED)

    def vacate(self, engine: int) -> None:
        """Note that an engine has left, and its children with it."""
        own = self._board.slot("engine", engine)
        self._board.seat(own, Seating.VACANT)
        for slot in self._board.slots:
            if self._board.engine_of(slot) is own:
                slot[CommonField.STATE] = State.ABSENT
                slot.clear_gauges()
        self._board.note_seating()

    def _stays(self, slot: Slot) -> bool:
        """Whether an engine is to serve from now on."""
        departure = self._departures.get(slot.seat.index)
        if departure is not None:
            return departure.returns
        return slot[EngineField.SEATING] == Seating.SEATED

    def _rank(self, slot: Slot) -> tuple[bool, bool, int]:
        """Return a key by which the engines that are to stay come first."""
        return slot.seat.index in self._departures, not is_ready(slot), slot.seat.index

    def _others(self, engine: int) -> list[Slot]:
        """Return the other seats of an engine's model."""
        own = self._board.slot("engine", engine)
        return [slot for slot in self._board.replicas_of(own) if slot is not own]

    def _begin(self, slot: Slot, returns: bool) -> None:
        engine = slot.seat.index
        if engine in self._departures:
            self._departures[engine].returns = returns
            return
        self._board.seat(slot, Seating.LEAVING)
        backlog = engine_backlog(self._board, engine)
        until = self._clock() + self._patience_s
        self._departures[engine] = Departure(slot, backlog, until, returns)

    def _keep(self, slot: Slot) -> None:
        """Have an engine stay that is leaving, or another come after it."""
        departure = self._departures[slot.seat.index]
        departure.returns = True
        if departure.told_at is None:
            del self._departures[slot.seat.index]
            self._board.seat(slot, Seating.SEATED)
