"""Whole answers that are being written: a slice at a time, so that no stream waits for one.

Of long ones a frontend gets one after the other: it keeps what has come until all of it has.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.detokenizer_proc.frames import Frames
from headrace.detokenizer_proc.renderers.json_slices import SLICE_BYTES
from headrace.ipc.messages import MORE, Head, frontend_of, request_of

LONG_BYTES = 1 << 20  # of log probabilities, before they are rendered: five times as much


@dataclass(eq=False, slots=True)
class SlicedBody:
    """An answer whose head is known, and the slices that are still to be made of its body."""

    id: int  # of its last sequence to end
    head: Head
    slices: Iterator[bytes]
    num_delivered: int  # of that sequence, as in `HttpRequest`
    is_long: bool


class Bodies:
    """The bodies of all frontends. Those that are written take turns, a slice each."""

    def __init__(self) -> None:
        self._written: dict[int, deque[SlicedBody]] = {}  # by frontend
        self._waiting: dict[int, deque[SlicedBody]] = {}
        self.in_progress = 0  # the request whose body was written last, and has slices left

    def __len__(self) -> int:
        lists = (*self._written.values(), *self._waiting.values())
        return sum(map(len, lists))

    def put(self, body: SlicedBody) -> None:
        """Write a body from now on, or when the long ones before it have been written."""
        frontend = frontend_of(body.id)
        written = self._written.setdefault(frontend, deque())
        if body.is_long and any(other.is_long for other in written):
            self._waiting.setdefault(frontend, deque()).append(body)
        else:
            written.append(body)

    def drop(self, request: int) -> None:
        """Forget the body of a request, if it is here."""
        for bodies in (*self._written.values(), *self._waiting.values()):
            for body in [body for body in bodies if request_of(body.id) == request]:
                bodies.remove(body)
        if self.in_progress == request:
            self.in_progress = 0
        for frontend in self._waiting:
            self._go_on(frontend)

    def first(self, frontend: int) -> int:
        """Return the request whose body is written next; 0 is none."""
        written = self._written.get(frontend)
        return request_of(written[0].id) if written else 0

    def write(self, frontend: int, frames: Frames) -> int:
        """Add the next slice to what a frontend is sent; return how many bytes it has."""
        written = self._written[frontend]
        body = written.popleft()
        slice = next(body.slices, b"")
        self.in_progress = 0
        if len(slice) < SLICE_BYTES:  # only the last one is shorter
            frames.add(body.id, body.head, slice, True, body.num_delivered)
            self._go_on(frontend)
        else:
            frames.add(body.id, None, slice, MORE)
            written.append(body)
            self.in_progress = request_of(body.id)
        return len(slice)

    def _go_on(self, frontend: int) -> None:
        """Begin the next long body, if there is none now."""
        waiting, written = self._waiting.get(frontend), self._written[frontend]
        if waiting and not any(body.is_long for body in written):
            written.append(waiting.popleft())
