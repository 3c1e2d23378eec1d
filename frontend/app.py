"""The ASGI application: bytes in, bytes out.

Bodies go to a tokenizer process as they came and responses are written as they come. Two things
are answered here, from constants: `/health`, which must answer when nothing else does, and
requests that are not let in.
"""

import asyncio
import contextlib
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.board import Board, Field, Slot
from headrace.frontend.exchanges import Exchange, Exchanges
from headrace.links import Links
from headrace.messages import HttpRequest, share_key

JSON = b"application/json"


def refusal(message: str, kind: str, code: str) -> bytes:
    """Return an error body in OpenAI's shape, from plain texts without quotes."""
    return (
        f'{{"error":{{"message":"{message}","type":"{kind}","param":null,"code":"{code}"}}}}'
    ).encode("ascii")


OVERLOADED = refusal("the server is overloaded; try again later", "overloaded_error", "overloaded")


class BodyTooLarge(Exception):
    """The request body passes the limit."""


class ClientLeft(Exception):
    """The connection was closed before the body was complete."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """Read a request body of at most `limit` bytes."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise BodyTooLarge
        chunks.append(chunk)
        if not message.get("more_body"):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def declared_length(scope: Scope) -> int:
    """Return the Content-Length, or 0 where there is none."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def key_of(scope: Scope) -> int:
    """Return the key whose share of the engine a request takes; 0 is nobody's."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return share_key(value)
    return 0


async def respond(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    """Send a whole JSON response."""
    fields = [(b"content-type", JSON), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


class Forwarder:
    """Carries each request into the ring and its response out of it."""

    def __init__(self, exchanges: Exchanges, links: Links, slot: Slot, max_body_bytes: int) -> None:
        self._exchanges = exchanges
        self._links = links
        self._slot = slot
        self._max_body_bytes = max_body_bytes
        self._too_large = refusal(
            f"the request body is larger than {max_body_bytes} bytes (--max-body-bytes)",
            "invalid_request_error",
            "body_too_large",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._slot.add(Field.REQUESTS)
        received_at = time.time()
        try:
            if declared_length(scope) > self._max_body_bytes:
                raise BodyTooLarge
            body = await read_body(receive, self._max_body_bytes)
        except BodyTooLarge:
            # The rest of the body is not read, so the connection cannot be used again.
            await respond(send, 413, self._too_large, (b"connection", b"close"))
            return
        except ClientLeft:
            return
        self._slot.add(Field.BYTES_IN, len(body))
        exchange = self._exchanges.open()
        try:
            request = HttpRequest(
                exchange.id, scope["method"], scope["path"], received_at, key_of(scope)
            )
            if not self._links.forward(request, body):
                await respond(send, 503, OVERLOADED, (b"retry-after", b"1"))
                return
            del body
            await self._relay(exchange, receive, send)
        finally:
            self._exchanges.close(exchange)

    async def _relay(self, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Write what comes back until the last byte, or until the client leaves."""
        watch = asyncio.create_task(drop_on_disconnect(exchange, receive))
        try:
            data = await exchange.take()
            while not exchange.dropped or exchange.complete:
                if exchange.head is not None:
                    await send(start_of(exchange, len(data)))
                    exchange.head = None
                await send(
                    {
                        "type": "http.response.body",
                        "body": data,
                        "more_body": not exchange.complete or bool(exchange.unsent),
                    }
                )
                self._slot.add(Field.BYTES_OUT, len(data))
                if exchange.complete and not exchange.unsent:
                    self._slot.add(Field.RESPONSES)
                    return
                data = await exchange.take()
        finally:
            watch.cancel()
            if not exchange.complete:
                self._slot.add(Field.DISCONNECTS)
                self._links.abort(exchange.id)


def start_of(exchange: Exchange, length: int) -> dict[str, object]:
    """Return the ASGI message that starts a response, with its length where that is known."""
    assert exchange.head is not None
    headers = [(b"content-type", exchange.head.content_type.encode())]
    if exchange.complete:
        headers.append((b"content-length", str(length).encode()))
    else:
        headers.append((b"cache-control", b"no-cache"))
    return {"type": "http.response.start", "status": exchange.head.status, "headers": headers}


async def drop_on_disconnect(exchange: Exchange, receive: Receive) -> None:
    """Drop the exchange when the client closes the connection."""
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        exchange.drop()


def build_app(board: Board, forwarder: ASGIApp) -> ASGIApp:
    """Return the application: `/health` from the board, everything else through the ring."""

    async def health(_request: Request) -> Response:
        unhealthy = board.unhealthy()
        if not unhealthy:
            return Response(b"", 200)
        names = ", ".join(str(seat) for seat in unhealthy)
        body = refusal(f"not serving: {names}", "server_error", "unhealthy")
        return Response(body, 503, media_type=JSON.decode())

    router = Router(routes=[Route("/health", health, methods=["GET"])])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_ring = scope["type"] == "http" and scope["path"] != "/health"
        await (forwarder if is_ring else router)(scope, receive, send)

    return app
