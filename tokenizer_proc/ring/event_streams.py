"""Open event streams: each event goes to all of them, by their frontends."""

import time
from collections import defaultdict
from collections.abc import Callable

from headrace.board.board import Board, Slot
from headrace.board.fields import CommonField, FrontendField
from headrace.errors import StreamsFull
from headrace.ipc.frontend_links import FrontendLinks
from headrace.ipc.messages import MAX_STARTS, ResponseFrames, frontend_of, start_of
from headrace.ipc.sockets import STEP_HIGH_WATER
from headrace.tokenizer_proc.jobs.aborts import Aborts

EVENT_INTERVAL_S = 1.0
MAX_STREAMS = 64


class EventStreams:
    """The requests that are sent events until they end.

    A stream ends with its client, with its frontend, and when that frontend waits for open requests
    to end.
    """

    def __init__(
        self,
        board: Board,
        frontends: FrontendLinks,
        aborts: Aborts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Have no streams; `clock` returns seconds and never goes back."""
        self._slots = list(board.of("frontend"))
        self._frontends = frontends
        self._aborts = aborts
        self._clock = clock
        self._open: list[int] = []
        self._due_at = clock() + EVENT_INTERVAL_S

    def __len__(self) -> int:
        return len(self._open)

    def check_room(self) -> None:
        """Check that there is room for another stream.

        Raises:
            StreamsFull: there are `MAX_STREAMS`.
        """
        if len(self._open) >= MAX_STREAMS:
            raise StreamsFull(MAX_STREAMS)

    def open(self, request: int) -> None:
        """Send a request events from now on."""
        self._open.append(request)

    @property
    def wait_s(self) -> float:
        """How long it is until events are due; 0 where they are."""
        return max(self._due_at - self._clock(), 0.0)

    def take_turn(self) -> bool:
        """Return whether events are due, and forget streams that have no client any more."""
        now = self._clock()
        if now < self._due_at:
            return False
        self._due_at = now + EVENT_INTERVAL_S
        self._aborts.look()
        self._open = [id for id in self._open if id not in self._aborts and self._is_present(id)]
        return True

    def send(self, events: bytes) -> None:
        """Send events to all streams; end those whose frontends wait for open requests to end.

        A frontend that does not keep up misses events. The next state replaces a missed one.
        """
        by_frontend: defaultdict[int, list[int]] = defaultdict(list)
        for request in self._open:
            by_frontend[frontend_of(request)].append(request)
        for frontend, requests in by_frontend.items():
            if self._frontends.backlog(frontend) >= STEP_HIGH_WATER:
                continue
            is_last = is_ending(self._slots[frontend])
            count = len(requests)
            frames = ResponseFrames.of({}, requests, [len(events)] * count, [is_last] * count)
            self._frontends.send(frontend, frames, events * count)
            if is_last:
                self._open = [id for id in self._open if id not in requests]

    def _is_present(self, request: int) -> bool:
        """Whether the frontend that sent a request is still in its seat."""
        starts = self._slots[frontend_of(request)][CommonField.STARTS]
        return start_of(request) == starts % MAX_STARTS


def is_ending(slot: Slot) -> bool:
    """Whether a frontend waits for its open requests, to end then."""
    return bool(slot[FrontendField.IS_CLOSED] or slot[FrontendField.IS_LEAVING])
