"""The ASGI application: bytes in, bytes out.

Bodies go to a tokenizer process as they came and responses are written as they come. Two things
are answered here: `/health` and its kin, which must answer when nothing else does, and requests
that are not let in.
"""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.board import Board, Field, Slot, Span
from headrace.errors import ANTHROPIC_PATHS
from headrace.frontend.admin import PREFIX, Admin
from headrace.frontend.connection import EXTENSION, RECEIVED_AT, Connection
from headrace.frontend.door import Door
from headrace.frontend.exchanges import Exchange, Exchanges
from headrace.frontend.health import PATHS, health_of
from headrace.frontend.hops import Hops
from headrace.frontend.long_bodies import LongBodies
from headrace.frontend.refusals import Refusal, anthropic_body, error_body, too_large
from headrace.frontend.request_head import RequestHead
from headrace.http_counts import HttpCounts
from headrace.links import LONG_BODY_BYTES, Links
from headrace.messages import Head, HttpRequest, share_key
from headrace.sent import Sent
from headrace.sockets import Frame

JSON = b"application/json"
OVERLOADED = Refusal(
    503, "the server is overloaded; try again later", "overloaded_error", "overloaded", 1
)

DEADLY = Refusal(
    500,
    "the server failed at this request; its log says why",
    "server_error",
    "internal_error",
)


class BodyTooLarge(Exception):
    """The request body passes the limit."""


class ClientLeft(Exception):
    """The connection was closed before the body was complete."""


class Forwarder:
    """Carries each request into the ring and its response out of it."""

    def __init__(
        self, exchanges: Exchanges, links: Links, slot: Slot, door: Door, max_body_bytes: int
    ) -> None:
        self._exchanges = exchanges
        self._links = links
        self._slot = slot
        self._door = door
        self._max_body_bytes = max_body_bytes
        self._long_bodies = LongBodies(links)
        self._too_large = too_large(max_body_bytes)
        self._counts = HttpCounts(slot.http_words)
        self._counts.settle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._slot.add(Field.REQUESTS)
        head = RequestHead.of(scope)
        method, received_at = scope["method"], scope["extensions"][RECEIVED_AT]
        row = self._counts.row(method, scope["path"])
        row.begin()
        refusal = self._door.enter(method, head)
        if refusal is not None:
            # The body is not read; the connection ignores it, and may be used again.
            length = await respond(send, refusal, scope["path"])
            row.end(refusal.status, time.monotonic_ns() - received_at, head.length, length)
            return
        exchange = self._exchanges.open(received_at, head.wants_timing)
        try:
            await self._carry(exchange, scope, head, receive, send)
        except BodyTooLarge:
            await self._refuse(exchange, send, self._too_large, scope["path"])
        except ClientLeft:
            pass
        finally:
            self._exchanges.close(exchange)
            self._door.leave(method)
            duration_ns = time.monotonic_ns() - received_at
            row.end(exchange.status, duration_ns, head.length, exchange.declared_length)

    def resend(self) -> None:
        """Send again what processes had that have died and been replaced."""
        self._links.resend(self._exchanges.sent, self._exchanges.renumber, self._give_up)

    def _give_up(self, sent: Sent) -> None:
        """Answer a request at which processes die, whichever it is sent to."""
        path = sent.request.path
        body = anthropic_body(DEADLY) if path.startswith(ANTHROPIC_PATHS) else error_body(DEADLY)
        self._exchanges.fail(sent, Head(DEADLY.status, JSON.decode()), body)

    async def _carry(
        self, exchange: Exchange, scope: Scope, head: RequestHead, receive: Receive, send: Send
    ) -> None:
        if head.length >= LONG_BODY_BYTES:
            async with self._long_bodies.turn(receive) as receive_in_turn:
                body = await self._read_body(receive_in_turn)
        else:
            body = await self._read_body(receive)
        self._slot.add(Field.BYTES_IN, len(body))
        key = 0 if head.key is None else share_key(head.key)
        request = HttpRequest(exchange.id, scope["method"], scope["path"], time.time(), key)
        sent = Sent(request, body)
        if not self._links.forward(sent):
            await self._refuse(exchange, send, OVERLOADED, scope["path"])
            return
        exchange.sent = sent
        self._slot.add(Field.KEPT_BYTES, len(body))
        connection: Connection = scope["extensions"][EXTENSION]
        exchange.on_overflow = connection.cut
        connection.on_lost = exchange.drop
        try:
            await self._relay(exchange, connection, send)
        finally:
            self._slot.add(Field.KEPT_BYTES, -len(body))
            connection.on_lost = None
            if not exchange.complete:
                self._slot.add(Field.DISCONNECTS)
                self._links.abort(exchange.id)

    async def _refuse(self, exchange: Exchange, send: Send, refusal: Refusal, path: str) -> None:
        """Answer with an error from here."""
        exchange.status = refusal.status
        exchange.declared_length = await respond(send, refusal, path)

    async def _read_body(self, receive: Receive) -> bytes:
        """Read a request body, which counts as held until it is whole."""
        chunks: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                chunk = message.get("body", b"")
                size += len(chunk)
                self._slot.add(Field.HELD_BYTES, len(chunk))
                if size > self._max_body_bytes:
                    raise BodyTooLarge
                chunks.append(chunk)
                if not message.get("more_body"):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        finally:
            self._slot.add(Field.HELD_BYTES, -size)

    async def _relay(self, exchange: Exchange, connection: Connection, send: Send) -> None:
        """Write what comes back until the last byte, or until the client leaves."""

        def write(data: Frame) -> bool:
            is_written = connection.write_piece(data)
            self._slot.add(Field.BYTES_OUT, len(data) if is_written else 0)
            return is_written

        is_timed = False
        data = await exchange.take()
        while not exchange.dropped or exchange.complete:
            if exchange.head is not None:
                is_timed = exchange.head.times is not None
                await send(self._start(exchange, len(data)))
                exchange.head, exchange.has_begun, exchange.write = None, True, write
            is_last = exchange.complete and not exchange.unsent
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            self._slot.add(Field.BYTES_OUT, len(data))
            if is_last:
                self._slot.add(Field.RESPONSES)
                if is_timed:
                    whole = self._slot.histogram(Span.WHOLE)
                    whole.observe(time.monotonic_ns() - exchange.received_at)
                return
            data = await exchange.take()

    def _start(self, exchange: Exchange, length: int) -> dict[str, Any]:
        """Return the ASGI message that starts a response, with its length where that is known."""
        assert exchange.head is not None
        headers = [(b"content-type", exchange.head.content_type.encode())]
        headers += [(name.encode(), value.encode()) for name, value in exchange.head.headers]
        if exchange.head.status == 429:  # the engine's queue was full: the door knows how long
            headers.append((b"retry-after", str(self._door.retry_after_s).encode()))
        exchange.status = exchange.head.status
        if exchange.complete:
            exchange.declared_length = length
            headers.append((b"content-length", str(length).encode()))
        else:
            headers.append((b"cache-control", b"no-cache"))
        times = exchange.head.times
        if times is not None:
            hops = Hops(exchange.received_at, times)
            hops.observe(self._slot)
            if not exchange.complete:
                written_ns = time.monotonic_ns() - times.rendered
                self._slot.histogram(Span.WRITE).observe(written_ns)
            if exchange.wants_timing:
                headers.append((b"server-timing", hops.header()))
        return {"type": "http.response.start", "status": exchange.head.status, "headers": headers}


async def respond(send: Send, refusal: Refusal, path: str) -> int:
    """Send an error response, in the form of the API at `path`; return its body's length."""
    body = anthropic_body(refusal) if path.startswith(ANTHROPIC_PATHS) else error_body(refusal)
    headers = [(b"content-type", JSON), (b"content-length", str(len(body)).encode())]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
    if refusal.allow:
        headers.append((b"allow", refusal.allow.encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    return len(body)


async def administer(admin: Admin, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer an operator."""
    key = RequestHead.of(scope).key
    answer = admin.answer(scope["method"], scope["path"], scope["query_string"], key)
    if isinstance(answer, Refusal):
        await respond(send, answer, scope["path"])
    else:
        response = Response(answer.body, answer.status, media_type=JSON.decode())
        await response(scope, receive, send)


def build_app(board: Board, forwarder: ASGIApp, door: Door, admin: Admin) -> ASGIApp:
    """Return the application: health and what operators ask here, all else through the ring."""

    async def health(request: Request) -> Response:
        found = health_of(board, request.url.path, door.is_closed, time.monotonic_ns())
        return Response(found.body, found.status, media_type=JSON.decode())

    router = Router(routes=[Route(path, health, methods=["GET"]) for path in PATHS])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        if is_http and scope["path"].startswith(PREFIX):
            await administer(admin, scope, receive, send)
        elif is_http and scope["path"] not in PATHS:
            await forwarder(scope, receive, send)
        else:
            await router(scope, receive, send)

    return app
