"""Dispatches messages from the ring to waiting requests, some entries at a time.

A step of hundreds of streams writes to hundreds of sockets: between some and the next the event
loop looks at everything else.
"""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.board.board import Slot
from headrace.board.fields import FrontendField
from headrace.exit_status import ExitStatus
from headrace.frontend.open_requests import OpenRequests
from headrace.ipc.messages import ResponseFrames, request_of
from headrace.ipc.sockets import Frame

log = logging.getLogger(__name__)


class Dispatcher:
    """A queue of incoming messages to dispatch."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, open_requests: OpenRequests, slot: Slot
    ) -> None:
        self._loop = loop
        self._open_requests = open_requests
        self._slot = slot
        self._incoming: deque[Incoming] = deque()

    def __len__(self) -> int:
        """Number of waiting messages."""
        return len(self._incoming)

    def take(self, frames: ResponseFrames, data: Frame) -> None:
        """Enqueue a message; deliver as many as this turn allows."""
        with self._vital():
            self._incoming.append(Incoming(frames, data))
            if frames.stats:
                self._open_requests.take_stats(frames.stats)
        if len(self._incoming) == 1:
            self._deliver()

    def _deliver(self) -> None:
        incoming = self._incoming[0]
        with self._vital():
            num_bytes = incoming.deliver(self._open_requests)
        self._slot.add(FrontendField.BYTES_OUT, num_bytes)
        if incoming.is_delivered:
            self._incoming.popleft()
            self._slot.add(FrontendField.MESSAGES_TAKEN)
        if self._incoming:
            self._loop.call_soon(self._deliver)

    @contextmanager
    def _vital(self) -> Iterator[None]:
        """End the process at an error: else the loop would log it, and all streams would hang."""
        try:
            yield
        except Exception as error:
            self._slot.exit_reason = repr(error)
            log.exception("unexpected error")
            sys.exit(ExitStatus.FAILED)


class Incoming:
    """A message, partly dispatched."""

    def __init__(self, frames: ResponseFrames, data: Frame) -> None:
        self._frames = frames
        self._data = data if isinstance(data, bytes) else bytes(data)
        self._heads = frames.heads.copy()  # a request may have several entries
        self._ids = memoryview(frames.ids).cast("Q")
        self._lengths = memoryview(frames.lengths).cast("I")
        counts = frames.num_delivered
        self._num_delivered = memoryview(counts).cast("I") if counts else None
        assert len(self._ids) == len(self._lengths) == len(frames.last)
        assert self._num_delivered is None or len(self._num_delivered) == len(self._ids)
        assert sum(self._lengths) == len(data)
        self._row = self._start = 0

    @property
    def is_delivered(self) -> bool:
        """Whether nothing is left."""
        return self._row == len(self._ids)

    def deliver(self, open_requests: OpenRequests) -> int:
        """Hand over some entries; return how many bytes of them have been written to sockets."""
        view, last, num_delivered = memoryview(self._data), self._frames.last, self._num_delivered
        written = open_requests.streams.write(self._frames, self._data, self._row, self._start)
        for start, row, num_written in written.left:
            id = self._ids[row]
            head = self._heads.pop(request_of(id), None) if self._heads else None
            piece = view[start : start + self._lengths[row]]
            count = num_delivered[row] if num_delivered else 0
            engine = self._frames.engine
            open_requests.deliver(id, head, piece, last[row], count, num_written, engine)
        self._row, self._start = written.row, written.start
        return written.num_bytes
