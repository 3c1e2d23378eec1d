"""A client's connection: uvicorn's, with timeouts and limits added.

uvicorn waits for ever for a request's head, and takes heads of any length and bodies at any pace.
Limits are those of Apache's mod_reqtimeout, of the same kind: 20 s for the head; at least 500
bytes/s of the body. Responses have nginx's send_timeout: a minimum must be read of them per minute.
A response that waits for its client holds memory, and a place that others want.
"""

import fcntl
import http
import struct
import termios
from collections.abc import Callable
from itertools import chain
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.frontend.http.conformance import NOT_SERVED, framing_fault
from headrace.frontend.http.deadlines import Deadlines
from headrace.frontend.http.half_closed import HalfClosed
from headrace.frontend.http.rejections import Rejection, error_body
from headrace.frontend.http.request import HttpExchange, ignore
from headrace.frontend.http.request_head import REQUEST_ID, new_request_id
from headrace.frontend.http.start_queue import StartQueue

PATIENCE_S = 20.0  # for a head, and between looks at how much of a body has come
READER_PATIENCE_S = 60.0  # between looks at how much of an answer has been read
MIN_BYTES_PER_S = 500  # of a body, and of an answer that waits to be read
MAX_HEAD_BYTES = 64 << 10
FIELD_BYTES = 4  # of a header, beside its name and value: a colon, a space, the line's end
MAX_PIPELINED = 2048  # requests that wait for those before them; each is 2 KB of objects
MAX_IGNORED_BYTES = 64 << 20  # of a body that has been refused, read so that the answer is
INVALID_VERSION = "Invalid HTTP version"  # llhttp's words
HTTP2_METHOD = b"PRI"  # of HTTP/2's preface


class Parted(Exception):
    """The connection reads no more; ends the parser's work within received data."""


class Connection(HttpToolsProtocol):
    """One connection, with one request at a time."""

    def __init__(
        self,
        deadlines: "Deadlines[Connection]",
        readers: "Deadlines[Connection]",
        start_queue: StartQueue,
        max_connections: int,
        is_leaving: Callable[[], bool] = lambda: False,
        on_parting: Callable[[], None] = ignore,
        **uvicorn: Any,
    ) -> None:
        """Handle a connection of a server with at most `max_connections`.

        Args:
            deadlines: of clients that are to say something.
            readers: of clients that are to read something.
        """
        super().__init__(**uvicorn)
        self._server_is_leaving = is_leaving
        self._deadlines = deadlines
        self._readers = readers
        self._half_closed: HalfClosed | None = None
        self._start_queue = start_queue
        self._max_connections = max_connections
        self._on_parting = on_parting
        self._awaits_head = True
        self._is_upgrade = False  # the parser takes what follows this head for another protocol
        self._num_bytes = 0  # of the head, then of the body, since the last look
        self._num_bodiless = 0  # bytes since a piece of a body
        self._num_ignored = 0
        self._num_unread = 0  # bytes of answers, at the last look
        self._holds_next = False  # the next request waits until answers have been read
        self._rejection: Rejection | None = None  # comes behind the answers that are still due
        self._is_leaving = False  # all is said; what comes is read so that the answer arrives
        self._served: HttpExchange | None = (
            None  # the one being answered; uvicorn has the last to come
        )

    @property
    def is_new(self) -> bool:
        """Whether nothing has been asked yet, and still may be."""
        return self.cycle is None and not self._is_leaving

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request; refuse a client too many."""
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._refuse(Rejection(503, "too many connections", "overloaded_error", "overloaded"))
            return
        self._deadlines.start(self, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward the disconnect to the handler of the request."""
        self._deadlines.stop(self)
        self._readers.stop(self)
        if self._half_closed is not None:
            self._half_closed.stop()
        super().connection_lost(exc)
        self._disown()

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio.Protocol
        """Answer a half-closed client that still reads; else close.

        Returns:
            Whether the connection stays open for that. TLS does not let it.
        """
        if self._served is None or self._is_leaving or not self.transport.can_write_eof():
            return False
        if self._rejection is None and not self._end_with_last(self._served):
            return False
        socket = self.transport.get_extra_info("socket")
        if self._half_closed is None:
            self._half_closed = HalfClosed(self.loop, socket, self._probe, self.cut)
        return True

    def _end_with_last(self, served: HttpExchange) -> bool:
        """Close behind the last answer; return whether one is due."""
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()  # it will never be whole; those before it are
        last = self.pipeline[0][0] if self.pipeline else served.cycle
        if last.more_body or last.response_complete:
            return False
        last.keep_alive = False
        return True

    def _probe(self) -> None:
        """Send a byte of the answer ahead, if one is known."""
        if self._served is not None and not self._served.is_complete:
            self._served.probe()

    def pause_writing(self) -> None:
        """Wait for the client to read, but not for ever."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Report to the handler of the request that the client reads again."""
        super().resume_writing()
        self._readers.stop(self)
        if self._holds_next:
            self._holds_next = False
            self._serve_next()
        if self._served is not None:
            self._served.on_writable()

    def data_received(self, data: bytes) -> None:
        """Parse, and refuse a head or a trailer that is too long."""
        if self._is_leaving or self._rejection is not None:
            self._ignore(data)
            return
        self._num_bytes += len(data)
        self._num_bodiless += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            self._parse_behind(data, stopped)
        except httptools.HttpParserError as error:
            self._refuse_malformed(error)
        if self._awaits_head and self._num_bytes > MAX_HEAD_BYTES:
            self._refuse(too_long("head"))
        elif not self._awaits_head and self._num_bodiless > MAX_HEAD_BYTES:
            self._refuse(too_long("trailer"))

    def _refuse_malformed(self, error: httptools.HttpParserError) -> None:
        """Refuse data that is not HTTP/1.1."""
        if INVALID_VERSION in str(error) or self.parser.get_method() == HTTP2_METHOD:
            self._refuse(NOT_SERVED)
        else:
            self.send_400_response(str(error))

    def _parse_behind(self, data: bytes, stopped: httptools.HttpParserUpgrade) -> None:
        """Parse on where a head names another protocol, and ignore that (RFC 9110, 7.8).

        The parser stops behind such a head, without a look at the body. Another reads the same head
        without `Upgrade`, and goes on where the first has stopped.
        """
        rest = memoryview(data)
        try:
            while True:
                self._is_upgrade = False
                head = self._head_without_upgrade()
                self.parser = self._new_parser()
                self.parser.feed_data(head)
                rest = rest[stopped.args[0] :]
                try:
                    self.parser.feed_data(rest)
                except httptools.HttpParserUpgrade as again:
                    stopped = again
                else:
                    return
        except httptools.HttpParserError as error:
            self._refuse_malformed(error)

    def _head_without_upgrade(self) -> bytes:
        """Return the head that has been read, as it was but for `Upgrade`."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"\r\n"))

    def _new_parser(self) -> Any:
        parser: Any = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        return parser

    def on_message_begin(self) -> None:
        """Start the deadline of a request's head, unless too many requests are before it."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(
                Rejection(
                    429,
                    f"{MAX_PIPELINED} requests wait on this connection; wait for their answers",
                    "rate_limit_error",
                    "rate_limit_exceeded",
                )
            )
            raise Parted
        super().on_message_begin()
        self._deadlines.start(self, self.loop.time())

    def on_headers_complete(self) -> None:
        """Begin to wait for its body, if it is known where that ends.

        A head that is too long may come in one read.
        """
        num_bytes, codings = len(self.url), []
        for name, value in self.headers:
            num_bytes += len(name) + len(value) + FIELD_BYTES
            if name == b"transfer-encoding":
                codings.append(value)
        if num_bytes > MAX_HEAD_BYTES:
            self._refuse(too_long("head"))
            raise Parted
        fault = framing_fault(self.parser.get_method(), self.parser.get_http_version(), codings)
        if fault is not None:
            self._refuse(fault)
            raise Parted
        self._is_upgrade = self.parser.should_upgrade()
        if self._is_upgrade:
            return
        self._awaits_head = False
        self._num_bytes = self._num_bodiless = 0
        super().on_headers_complete()
        self.headers = []  # what comes behind the body (a trailer) means nothing
        self._deadlines.start(self, self.loop.time())

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Have a request served, POSTs in turn; `app` is no ASGI application, but our `App`."""
        request = HttpExchange(cycle)
        self._served = request
        cycle.keep_alive &= not self._server_is_leaving()

        def begin() -> None:
            try:
                if not request.is_given_up:
                    app(request)
            except BaseException:
                self.cut()  # the request has lost its handler
                raise

        self._start_queue.add(begin, is_first=request.method != "POST")

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a body; a refused body is discarded up to a limit."""
        self._num_bodiless = 0
        cycle: Any = self.cycle
        if not cycle.body:
            cycle.body = b""  # and not uvicorn's bytearray: a piece that comes alone is not copied
        elif isinstance(cycle.body, bytes):
            cycle.body = bytearray(cycle.body)
        super().on_body(body)
        if self.cycle.response_complete:
            self._ignore(body)

    def on_message_complete(self) -> None:
        """Wait for nothing more."""
        if self._is_upgrade:  # it is still to come
            return
        if self.headers:  # a trailer; one read may bring all of it
            lengths = map(len, chain.from_iterable(self.headers))
            if sum(lengths) + FIELD_BYTES * len(self.headers) > MAX_HEAD_BYTES:
                self._refuse(too_long("trailer"))
                raise Parted
        self._awaits_head = True
        self._num_bytes = 0
        self._num_ignored = 0
        self._deadlines.stop(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Serve the next request, when answers are read: they wait in memory."""
        if self.transport.is_closing():
            self._await_reader()
        elif self.flow.write_paused:
            self._holds_next = True
            if self._rejection is None:  # else what comes is not kept
                self.flow.pause_reading()
            return
        self._serve_next()

    def _serve_next(self) -> None:
        """Serve the next request, or send the refusal behind the last answer."""
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and self._rejection is not None:
            self._part(self._rejection)

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection whose responses have been read."""
        super().timeout_keep_alive_handler()
        self._await_reader()

    def on_reader_deadline(self) -> None:
        """Part from a client that reads too little."""
        if not self.transport.get_write_buffer_size():
            return  # the kernel has all
        enough = MIN_BYTES_PER_S * self._readers.duration_s
        if self._num_unread - self._count_unread() >= enough:
            self._await_reader()
        else:
            self._on_parting()
            self.cut()

    def _await_reader(self) -> None:
        """Schedule the check of how much of the pending response was read."""
        if self in self.connections:  # it has not been lost
            self._num_unread = self._count_unread()
            self._readers.start(self, self.loop.time())

    def _count_unread(self) -> int:
        """Return how many bytes wait here and in the kernel, which takes megabytes at a time."""
        fd = self.transport.get_extra_info("socket").fileno()
        (in_kernel,) = struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))
        return int(self.transport.get_write_buffer_size() + in_kernel)

    def on_deadline(self) -> None:
        """Close a connection whose client is too slow; the parser is within a request."""
        if self._is_leaving:
            if self.transport.get_write_buffer_size():  # `_readers` has an eye on it
                self._deadlines.start(self, self.loop.time())
            else:
                self.cut()
            return
        enough = MIN_BYTES_PER_S * self._deadlines.duration_s
        is_paused = self.flow.read_paused  # by us: the client is not to blame
        if not self._awaits_head and (is_paused or self._num_bytes >= enough):
            self._num_bytes = 0
            self._deadlines.start(self, self.loop.time())
        elif self.headers is None:
            self.transport.close()  # it has not even begun
        else:
            self._refuse(
                Rejection(
                    408, "the request came too slowly", "invalid_request_error", "request_timeout"
                )
            )

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP."""
        self._refuse(
            Rejection(400, "this is not valid HTTP", "invalid_request_error", "invalid_http")
        )

    def cut(self) -> None:
        """Close at once, without sending pending data."""
        self.transport.abort()

    def _disown(self) -> None:
        """Have the handlers of this connection's requests give up: nothing more can be written."""
        self.pipeline.clear()
        if self._served is not None and not self._served.is_complete:
            self._served.give_up()

    def _ignore(self, data: bytes) -> None:
        """Read and drop unwanted bytes, up to `MAX_IGNORED_BYTES`."""
        self._num_ignored += len(data)
        if self._num_ignored > MAX_IGNORED_BYTES:
            self.cut()

    def _refuse(self, rejection: Rejection) -> None:
        """Refuse the request that comes, behind all answers before (RFC 9112, 9.3.2), and part.

        Where its own answer has begun, part in the middle of that. Where its own answer is
        complete, part without another.
        """
        if self.transport.is_closing() or self._is_leaving or self._rejection is not None:
            return
        own = None if self._awaits_head else self.cycle
        if own is not None and not self.pipeline:  # those before it have been answered
            if own.response_started and not own.response_complete:
                self.cut()
            else:
                self._part(None if own.response_complete else rejection)
            return
        if own is not None:
            self.pipeline.popleft()
        served = self._served
        if self._holds_next or (served is not None and not served.is_complete):
            self._rejection = rejection
            self._deadlines.stop(self)
            self.flow.resume_reading()  # so that a client that leaves is noticed
        else:
            self._part(rejection)

    def _part(self, rejection: Rejection | None) -> None:
        """Send the last answer, if there is one, and close when the client does.

        To close while bytes come would reset the connection, and the client would lose the answer:
        the client closes, or its time is up.
        """
        if self.transport.is_closing():
            return
        self._disown()
        self._unset_keepalive_if_required()
        self._holds_next = False
        self._on_parting()
        if rejection is not None:
            self.transport.write(whole_response(rejection))
        if self._half_closed is not None or not self.transport.can_write_eof():  # TLS
            self.transport.close()
            self._await_reader()
            return
        if self.transport.get_write_buffer_size() and not self.flow.write_paused:
            self._await_reader()
        self.transport.write_eof()
        self._is_leaving = True
        self.flow.resume_reading()  # where requests wait for one another, else its end is not seen
        self._deadlines.start(self, self.loop.time())


def too_long(part: str) -> Rejection:
    """Return the refusal of a request with a part that is too long."""
    message = f"the request's {part} is longer than {MAX_HEAD_BYTES} bytes"
    return Rejection(431, message, "invalid_request_error", "head_too_large")


def whole_response(rejection: Rejection) -> bytes:
    """Return a response after which the connection closes."""
    body = error_body(rejection)
    head = (
        f"HTTP/1.1 {rejection.status} {http.HTTPStatus(rejection.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{REQUEST_ID.decode()}: {new_request_id().decode()}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body
