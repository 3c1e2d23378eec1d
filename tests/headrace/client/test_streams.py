"""Answers can be given up at any moment, before they begin, too."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from headrace.client.cancellation import PooledTransport
from headrace.client.client import AsyncClient, Client
from headrace.client.streams import TextStream

DEADLINE_S = 120
EVENT = 'data: {"id": "x", "created": 1, "model": "m", "choices": [{"index": 0, "text": " TEXT"}]}'
STREAM = "\n\n".join(
    [EVENT.replace("TEXT", "4"), EVENT.replace("TEXT", "🦊"), "data: [DONE]", ""]
).encode()


class Silent:
    """A server that takes requests, and answers those that it is told to."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_S)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.close()

    def accept(self) -> socket.socket:
        connection, _ = self._listener.accept()
        connection.settimeout(DEADLINE_S)
        return connection

    @staticmethod
    def take(connection: socket.socket) -> None:
        """Read a request, which is short."""
        data = b""
        while b"\r\n\r\n" not in data or not data.endswith(b"}"):
            piece = connection.recv(65536)
            assert piece, "the client has left"
            data += piece

    @staticmethod
    def answer(connection: socket.socket, status: str, body: bytes, headers: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        connection.sendall(head.encode() + body)


@contextlib.contextmanager
def reading(stream: TextStream) -> Iterator[list[str]]:
    """Iterate in another thread, which is at its end by then."""
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.extend(stream))
    reader.start()
    yield texts
    reader.join(DEADLINE_S)
    assert not reader.is_alive()


@pytest.mark.parametrize("is_reused", [False, True])
def test_a_stream_is_canceled_before_there_is_any_text(is_reused: bool) -> None:
    with (
        Silent() as server,
        Client(server.url, transport=PooledTransport(keepalive_expiry_s=None)) as client,
        contextlib.ExitStack() as stack,
    ):
        if is_reused:
            first = client.stream_complete("Hi")
            with reading(first) as texts:
                connection = stack.enter_context(server.accept())
                server.take(connection)
                server.answer(connection, "200 OK", STREAM)
            assert texts == [" 4", " 🦊"]
        stream = client.stream_complete("Hi")
        with reading(stream) as texts:
            if not is_reused:
                connection = stack.enter_context(server.accept())
            server.take(connection)
            stream.cancel()
        assert texts == []
        assert connection.recv(1) == b"", "the server sees that its client has left"


def test_stream_over_another_transport_is_canceled_early() -> None:
    with Silent() as server, Client(server.url, transport=httpx.HTTPTransport()) as client:
        stream = client.stream_complete("Hi")
        with reading(stream) as texts, server.accept() as connection:
            server.take(connection)
            stream.cancel()
            assert connection.recv(1) == b"", "the server sees that its client has left"
        assert texts == []


def test_a_stream_is_canceled_while_it_waits_to_ask_again() -> None:
    with Silent() as server, Client(server.url) as client:
        stream = client.stream_complete("Hi")
        with reading(stream) as texts, server.accept() as connection:
            server.take(connection)
            server.answer(connection, "429 Busy", b"", "retry-after: 60\r\n")
            stream.cancel()
        assert texts == []


async def test_an_async_stream_is_canceled_before_there_is_any_text() -> None:
    with Silent() as server:
        async with AsyncClient(server.url) as client:
            stream = client.stream_complete("Hi")

            async def texts() -> list[str]:
                return [text async for text in stream]

            waiting = asyncio.create_task(texts())
            with await asyncio.to_thread(server.accept) as connection:
                await asyncio.to_thread(server.take, connection)
                stream.cancel()
                async with asyncio.timeout(DEADLINE_S):
                    assert await waiting == []
                    assert await asyncio.to_thread(connection.recv, 1) == b""


async def test_a_task_that_waits_for_a_stream_can_be_canceled_itself() -> None:
    with Silent() as server:
        async with AsyncClient(server.url) as client:
            stream = client.stream_complete("Hi")
            waiting = asyncio.ensure_future(anext(stream))
            with await asyncio.to_thread(server.accept):
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
