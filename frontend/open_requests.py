"""Open requests of one frontend: an id out, response bytes back.

The ring answers by id, and this table maps the id to the waiting request. Bytes for an unknown id
are dropped: its client has left, and an abort is on its way.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.board.board import Slot
from headrace.board.fields import CommonField, FrontendField
from headrace.board.http_counts import CLIENT_LEFT
from headrace.frontend.http.socket_writer import Streams
from headrace.frontend.http.unsent import Unsent
from headrace.ipc.inflight import InflightRequest, InflightRequests
from headrace.ipc.messages import Head, first_counter
from headrace.ipc.sockets import Frame

MAX_UNSENT_BYTES = 4 << 20  # of a stream, waiting for a client that reads too slowly
MAX_TOTAL_UNSENT_BYTES = 256 << 20  # of all responses; past it the client that reads least is cut


@dataclass(eq=False)
class OpenRequest:
    """One request and its response so far."""

    id: int
    wants_timing: bool = False
    sent: InflightRequest | None = None  # once it has been
    head: Head | None = None
    has_begun: bool = False  # the head has been written
    status: int = CLIENT_LEFT  # until there is a head
    declared_length: int = 0  # of the answer; 0 where it streams
    unsent: Unsent = field(default_factory=Unsent)
    sent_at: int = 0  # when it was, CLOCK_MONOTONIC, ns
    stats: bytes = b""  # as in `RequestEnded`
    written_at: float = 0.0  # when its client was last given something, seconds; see `OpenRequests`
    complete: bool = False
    dropped: bool = False  # the client left, or reads too slowly
    on_news: Callable[[], None] | None = None  # there is something to write, or the client has left
    # Write a piece from the middle of a response, without the bytes of its chunk that have been
    # written. False where the client does not read.
    write: Callable[[Frame, int], bool] | None = None

    def hold(self, part: Frame) -> None:
        """Take a part of a piece whose last part follows in `deliver`."""
        self.unsent.append(part)

    def deliver(self, data: Frame, last: bool, num_written: int = 0) -> None:
        """Take response bytes. Past the limit the request is dropped: memory stays bounded.

        Args:
            num_written: how many bytes of their HTTP chunk have been written.
        """
        is_piece = not last and not self.unsent.num_bytes and len(data)
        if is_piece and self.write is not None and self.write(data, num_written):
            return
        assert not num_written
        self.unsent.append(data)
        self.complete |= last
        if self.unsent.num_bytes > MAX_UNSENT_BYTES and not last:
            self.dropped = True
        self._notify()

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of its response that wait here."""
        return self.unsent.num_bytes + (0 if self.sent is None else self.sent.num_held_bytes)

    def drop(self) -> None:
        """Drop the request after a disconnect."""
        self.dropped = True
        self._notify()

    def _notify(self) -> None:
        if self.on_news is not None:
            self.on_news()


class OpenRequests(InflightRequests[OpenRequest]):
    """All open requests of a frontend.

    Attributes:
        streams: the sockets of the streaming requests whose clients read.
    """

    def __init__(self, frontend: int, slot: Slot) -> None:
        super().__init__(frontend, first_counter(slot[CommonField.STARTS]))
        self.streams = Streams()
        self._slot = slot

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that have come and not been taken."""
        return sum(open_request.num_unsent_bytes for open_request in self._receivers.values())

    def cut_slowest(self) -> None:
        """Drop requests until what waits is bounded: first whose clients last read longest ago.

        One response is always kept: its request has been bounded.
        """
        excess = self.num_unsent_bytes - MAX_TOTAL_UNSENT_BYTES
        waiting = [open_request for open_request in self if open_request.unsent]
        for open_request in sorted(waiting, key=lambda open_request: open_request.written_at)[:-1]:
            if excess <= 0:
                return
            excess -= open_request.unsent.num_bytes
            open_request.drop()

    def open(self, wants_timing: bool = False) -> OpenRequest:
        """Draw an id and wait for its answer."""
        open_request = OpenRequest(self.next_id(), wants_timing)
        self._receivers[open_request.id] = open_request
        self._slot[FrontendField.OPEN_REQUESTS] = len(self._receivers)
        return open_request

    def renumber(self, receiver: OpenRequest) -> None:
        """Draw a new id for a request; what its stream has delivered is kept."""
        if receiver.sent is not None:
            receiver.sent.num_delivered |= self.streams.num_delivered(receiver.id)
        self.streams.close(receiver.id)
        super().renumber(receiver)

    def fail(self, sent: InflightRequest, head: Head, data: bytes, event: bytes) -> None:
        """Answer a request with an error, or end a stream that has begun with an event."""
        open_request = self.receiver_of(sent)
        if open_request.has_begun or open_request.unsent:
            open_request.deliver(event, True)
        else:
            open_request.head = head
            open_request.deliver(data, True)

    def take_stats(self, stats: dict[int, bytes]) -> None:
        """Keep what has been counted for requests, unread."""
        for id, counted in stats.items():
            if id in self._receivers:
                self._receivers[id].stats = counted

    def close(self, open_request: OpenRequest) -> None:
        """Stop waiting."""
        self._receivers.pop(open_request.id, None)
        self.streams.close(open_request.id)
        self._slot[FrontendField.OPEN_REQUESTS] = len(self._receivers)
