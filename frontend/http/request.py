"""An HTTP request on a connection, and the methods to answer it.

uvicorn parses requests and keeps their state; what is answered is written here. An ASGI application
would be a task and five messages for each request, which cost more than all that is done with it.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from headrace.frontend.http.rejections import Rejection, error_body
from headrace.frontend.http.request_head import REQUEST_ID, Headers, RequestHead
from headrace.ipc.sockets import Frame
from headrace.routes import ANTHROPIC_PATHS

HEAD = "HEAD"
JSON = b"application/json"
ANTHROPIC_REQUEST_ID = b"request-id"  # as Anthropic's clients read it
LAST_CHUNK = b"0\r\n\r\n"
ANNOUNCED = b"HTTP/1.1 "  # with which each answer begins
LEADING_ZERO = b"0"  # of the size of a chunk; RFC 9112, 7.1 allows any number of them
SHARED_BYTES = 16 << 10  # of a body, from which on a second write costs less than a copy
MAX_ZEROS = 8  # h11 takes 20 digits at most


def ignore() -> None:
    """A callback that does nothing."""


class HttpExchange:
    """One request: its head, its body, and its answer.

    Attributes:
        path: decoded, without the query.
        headers: names are in lower case.
        head: those that the frontend reads; the response repeats its `id`.
        received_at: when the head was read, CLOCK_MONOTONIC, ns.
        status: of its answer; 0 where there is none yet.
        num_sent: bytes of its body that have been written here.
        begun_at: when the answer began, as `received_at`; 0 unless its handler sets it.
        common: headers of its answer, whatever that is.
        on_lost: called when the client has left.
        on_writable: called when the client reads again.
    """

    __slots__ = (
        "_cycle",
        "_head",
        "_is_chunked",
        "_num_announced",
        "_num_zeros",
        "begun_at",
        "common",
        "head",
        "headers",
        "method",
        "num_sent",
        "on_lost",
        "on_writable",
        "path",
        "received_at",
        "status",
    )

    def __init__(self, cycle: RequestResponseCycle) -> None:
        """Create the request that uvicorn keeps as `cycle`, from its head."""
        self._cycle = cycle
        scope = cycle.scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = list(scope["headers"])
        self.head = RequestHead.of(self.headers)
        self.received_at = time.monotonic_ns()
        self.status = self.num_sent = self.begun_at = 0
        self.common: Headers = ()
        self.on_lost: Callable[[], None] = ignore
        self.on_writable: Callable[[], None] = ignore
        self._head = b""  # of the answer, until something is written
        self._is_chunked = False
        self._num_zeros = 0
        self._num_announced = 0  # bytes of the head that have been written before the rest

    @property
    def cycle(self) -> RequestResponseCycle:
        """uvicorn's part of it."""
        return self._cycle

    @property
    def version(self) -> str:
        """The version of HTTP."""
        version: str = self._cycle.scope["http_version"]
        return version

    @property
    def query(self) -> bytes:
        """The query string, without the question mark."""
        query: bytes = self._cycle.scope["query_string"]
        return query

    @property
    def is_given_up(self) -> bool:
        """Whether the client has left."""
        return bool(self._cycle.disconnected)

    @property
    def has_begun(self) -> bool:
        """Whether the response has begun."""
        return bool(self._cycle.response_started)

    @property
    def is_complete(self) -> bool:
        """Whether the response is complete."""
        return bool(self._cycle.response_complete)

    def give_up(self) -> None:
        """Note that the client has left."""
        self._cycle.disconnected = True
        self._cycle.waiting_for_100_continue = False  # else it would be told to go on
        self._cycle.message_event.set()
        self.on_lost()

    def take_body(self) -> bytes | None:
        """Return the body if it is whole; None if it must be received."""
        if self._cycle.more_body:
            return None
        self._cycle.flow.resume_reading()  # else the client could not be seen to leave
        return bytes(self._cycle.body)

    async def receive(self) -> Any:
        """Receive a part of the body, as an ASGI application does."""
        message = await self._cycle.receive()
        if not message.get("more_body"):
            self._cycle.flow.resume_reading()  # as in `take_body`
        return message

    def probe(self) -> None:
        """Send the next byte of the answer ahead, if it is known whatever the answer is."""
        if not self.has_begun:
            self._cycle.transport.write(ANNOUNCED[self._num_announced :][:1])
            self._num_announced = min(self._num_announced + 1, len(ANNOUNCED))
        elif self._is_chunked and self.method != HEAD and self._num_zeros < MAX_ZEROS:
            self._cycle.transport.write(LEADING_ZERO)
            self._num_zeros += 1

    @property
    def is_writable(self) -> bool:
        """Whether the client reads."""
        return not self._cycle.flow.write_paused

    def begin(self, status: int, headers: Headers, length: int | None = None) -> None:
        """Begin the answer. Its head is written with the first of its body: writes cost most.

        Args:
            length: of the body; None where it is not known yet.
        """
        cycle = self._cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        self.status = status
        id = self.head.id
        lines = [STATUS_LINE[status][self._num_announced :], REQUEST_ID, b": ", id, b"\r\n"]
        if self.path.startswith(ANTHROPIC_PATHS):
            lines += (ANTHROPIC_REQUEST_ID, b": ", id, b"\r\n")
        for name, value in (*cycle.default_headers, *self.common, *headers):
            lines += (name, b": ", value, b"\r\n")
        if length is not None:
            lines.append(b"content-length: %d\r\n" % length)
        elif cycle.scope["http_version"] != "1.0":  # there the end is where the connection closes
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        self._head = b"".join(lines)

    def write(self, data: Frame, num_written: int = 0) -> None:
        """Write a piece of the body, but for so many bytes of its chunk that have been written."""
        self.num_sent += len(data)
        chunk = self._chunk(data)
        self._write((b"".join(chunk)[num_written:],) if num_written else chunk)

    @property
    def clear_socket(self) -> int:
        """The socket's number if all earlier chunks are written, so the next can be written
        directly; else -1."""
        cycle = self._cycle
        transport = cycle.transport
        is_plain = self._is_chunked and self.method != HEAD and cycle.scope["scheme"] == "http"
        if not is_plain or transport.is_closing() or transport.get_write_buffer_size():
            return -1
        fd: int = transport.get_extra_info("socket").fileno()
        return fd

    def end(self, data: Frame = b"") -> None:
        """Write the last of the body; the connection may be used again."""
        self.num_sent += len(data)
        cycle = self._cycle
        self._write((*self._chunk(data), LAST_CHUNK) if self._is_chunked else (data,))
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        on_response, cycle.on_response = cycle.on_response, ignore
        on_response()

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response. A long body is shared with the transport, not copied."""
        self.begin(status, headers, len(body))
        if len(body) >= SHARED_BYTES:
            self._write(())
        self.end(body)

    def refuse(self, rejection: Rejection) -> int:
        """Answer with an error, in the form of the API; return the length of its body."""
        body = error_body(rejection, self.path)
        headers = [(b"content-type", JSON)]
        if rejection.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % rejection.retry_after_s))
        if rejection.allow:
            headers.append((b"allow", rejection.allow.encode()))
        if rejection.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        self.respond(rejection.status, headers, body)
        return len(body)

    def break_off(self) -> None:
        """Part without an end to the answer, so that the client sees that it is not whole."""
        if self.is_writable:
            self._cycle.transport.close()
        else:
            self._cycle.transport.abort()

    def _chunk(self, data: Frame) -> tuple[Frame, ...]:
        if self._is_chunked and data:
            return b"%x\r\n" % len(data), data, b"\r\n"
        return (data,)

    def _write(self, body: Iterable[Frame]) -> None:
        """Write the unwritten head, then this part of the body, if there is one."""
        transport = self._cycle.transport
        if not self._cycle.disconnected and not transport.is_closing():
            pieces = () if self.method == HEAD else body
            # A join of one piece is that piece.
            transport.write(b"".join((self._head, *pieces) if self._head else pieces))
        self._head = b""
