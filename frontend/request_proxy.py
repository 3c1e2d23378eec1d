"""Proxies one request into the ring, and its answer back to the client."""

import asyncio
import time
from collections.abc import Callable

from headrace.board.board import Counts, Slot, Timing
from headrace.board.fields import FrontendField
from headrace.frontend.http.rejections import Rejection
from headrace.frontend.http.request import HttpExchange, ignore
from headrace.frontend.http.socket_writer import Streams
from headrace.frontend.open_requests import OpenRequest
from headrace.frontend.request_timings import RequestTimings
from headrace.ipc.inflight import InflightRequest
from headrace.ipc.messages import HttpRequest
from headrace.ipc.router import Router
from headrace.ipc.sockets import Frame
from headrace.routes import POST

OVERLOADED = Rejection(
    503, "the server is overloaded; try again later", "overloaded_error", "overloaded", 1
)
TOO_MANY = 429
PIECE_BYTES = 256 << 10  # of a whole answer, written at once
MAX_PIECES = 8  # in one turn of the event loop


class RequestProxy:
    """Writes the answer of a request as it arrives, at the pace of its client."""

    def __init__(
        self,
        request: HttpExchange,
        open_request: OpenRequest,
        links: Router,
        slot: Slot,
        *,
        streams: Streams,
        retry_after_s: Callable[[], int],
        on_end: Callable[[HttpExchange, OpenRequest], None],
    ) -> None:
        """Start the proxy of a request.

        Args:
            streams: write the pieces of a stream whose client reads.
            retry_after_s: when there will be room again in an engine that was full.
            on_end: is called when it has been answered, or given up.
        """
        self._request = request
        self._open_request = open_request
        self._links = links
        self._slot = slot
        self._streams = streams
        self._retry_after_s = retry_after_s
        self._on_end = on_end
        self._num_kept = 0
        self._has_place = False  # its body is kept, and a POST is counted at the door
        self._counts: Counts | None = None  # of its model, where the engine had a part in it

    def enter(self, body: bytes, key: int) -> None:
        """Send the request into the ring; `key` is whose part it has of the engine."""
        request, open_request, slot = self._request, self._open_request, self._slot
        slot.add(FrontendField.BYTES_IN, len(body))
        message = HttpRequest(
            open_request.id,
            request.method,
            request.path,
            time.time(),
            key,
            request_id=request.head.id.decode(),
        )
        sent = InflightRequest(message, body)
        if not self._links.forward(sent):
            self.refuse(OVERLOADED)
            return
        open_request.sent, open_request.sent_at = sent, time.monotonic_ns()
        self._num_kept = len(body)
        self._has_place = True
        slot.add(FrontendField.KEPT_BYTES, self._num_kept)
        slot.add(FrontendField.ADMITTED, request.method == POST)
        open_request.on_news = request.on_writable = self._write_news
        request.on_lost = open_request.drop

    def refuse(self, rejection: Rejection) -> None:
        """Answer with an error instead."""
        self._open_request.status = rejection.status
        self._open_request.declared_length = self._request.refuse(rejection)
        self.end()

    def end(self) -> None:
        """Let go of the request."""
        if self._has_place:
            self._give_up_place()
        self._open_request.on_news = self._open_request.write = None  # else it would be in a cycle
        self._request.on_lost = self._request.on_writable = ignore
        self._on_end(self._request, self._open_request)

    def _give_up_place(self) -> None:
        """Release the body and the place at the door: the response is here."""
        self._has_place = False
        self._slot.add(FrontendField.KEPT_BYTES, -self._num_kept)
        self._slot.add(FrontendField.ADMITTED, -(self._request.method == POST))
        if self._open_request.sent is not None:
            self._open_request.sent.body = b""

    def _write_news(self) -> None:
        """Write received data if the client reads; it may be the last."""
        request, open_request = self._request, self._open_request
        if open_request.complete and self._has_place:
            self._give_up_place()
        if open_request.dropped:
            self._slot.add(FrontendField.DISCONNECTS)
            if not open_request.complete:
                assert open_request.sent is not None
                self._links.abort(open_request.sent)
            if not request.is_given_up:
                request.break_off()
            self.end()
            return
        if open_request.head is None or not request.is_writable:
            return
        if not open_request.has_begun:
            self._begin(open_request.unsent.num_bytes)
        open_request.written_at = time.monotonic()
        if open_request.complete and not self._write_most():
            return
        data = open_request.unsent.take_all()
        self._slot.add(FrontendField.BYTES_OUT, len(data))
        if not open_request.complete:
            request.write(data)
            open_request.write = self._write_piece
            return
        self._write_last(data, open_request.head.is_cut)
        self._slot.add(FrontendField.RESPONSES)
        if self._counts is not None:
            whole = self._counts.histogram(Timing.WHOLE)
            whole.observe(time.monotonic_ns() - request.received_at)
        self.end()

    def _write_last(self, data: Frame, is_cut: bool) -> None:
        """Write the last piece, and the end of the response unless that is cut."""
        if is_cut:
            self._request.write(data)
            self._request.break_off()
        else:
            self._request.end(data)

    def _write_most(self) -> bool:
        """Write all of the rest but its last piece; return whether that can be written now.

        If the client does not read, the data is written when it does. Data left after some pieces
        is written in the next turn of the event loop.
        """
        request, unsent = self._request, self._open_request.unsent
        for _ in range(MAX_PIECES):
            if unsent.num_bytes <= PIECE_BYTES:
                return True
            data = unsent.take(PIECE_BYTES)
            self._slot.add(FrontendField.BYTES_OUT, len(data))
            request.write(data)
            if not request.is_writable:
                return False
        asyncio.get_running_loop().call_soon(self._go_on)
        return False

    def _go_on(self) -> None:
        """Write more, unless that has been done or the request has ended meanwhile."""
        if self._open_request.on_news is not None:
            self._write_news()

    def _write_piece(self, data: Frame, num_written: int) -> bool:
        """Write a piece from the middle of an answer, if the client reads."""
        if not self._request.is_writable:
            return False
        self._request.write(data, num_written)
        self._slot.add(FrontendField.BYTES_OUT, len(data))
        # There may be many more pieces. Where this one waits none may overtake it, though one of
        # another sequence may have gone through a moment ago.
        self._streams.open(self._open_request.id, self._request.clear_socket)
        return True

    def _begin(self, length: int) -> None:
        """Begin the answer, with its length where that is known."""
        open_request = self._open_request
        head = open_request.head
        assert head is not None
        open_request.has_begun = True
        open_request.status = head.status
        headers = [(b"content-type", head.content_type.encode())]
        headers += [(name.encode(), value.encode()) for name, value in head.headers]
        if head.status == TOO_MANY and not head.headers:
            headers.append((b"retry-after", b"%d" % self._retry_after_s()))
        if open_request.complete:
            length += head.is_cut  # by a byte that never comes
            open_request.declared_length = length
        else:
            headers.append((b"cache-control", b"no-cache"))
        if head.times is not None:
            counts = self._counts = self._slot.of_model(head.times.model)
            timings = RequestTimings(self._request.received_at, head.times)
            timings.observe(counts)
            if not open_request.complete:
                written_ns = time.monotonic_ns() - head.times.rendered
                counts.histogram(Timing.WRITE).observe(written_ns)
            if open_request.wants_timing:
                headers.append((b"server-timing", timings.header()))
        self._request.begin(head.status, headers, length if open_request.complete else None)
        self._request.begun_at = time.monotonic_ns()
