"""Every error of the clients is one of ours, at whatever moment the connection fails."""

import asyncio
import gzip
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest

from headrace import ApiConnectionError, ApiError, ApiTimeoutError, AsyncClient, Client
from headrace.errors import ConfigError

DEADLINE_S = 120
TRANSPORT = [
    httpx.ConnectError,
    httpx.ReadError,
    httpx.WriteError,
    httpx.CloseError,
    httpx.LocalProtocolError,
    httpx.RemoteProtocolError,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
    httpx.DecodingError,
    httpx.TooManyRedirects,
]
TIMEOUTS = [httpx.ConnectTimeout, httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout]
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}\n\n'
Kind = Callable[..., httpx.RequestError]


class Failing(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that breaks off after one event."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def __iter__(self) -> Iterator[bytes]:
        yield EVENT
        raise self._kind("broken")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield EVENT
        raise self._kind("broken")


def at_once(kind: Kind) -> httpx.MockTransport:
    """Return a transport that fails before any answer."""

    def fail(request: httpx.Request) -> httpx.Response:
        raise kind("broken", request=request)

    return httpx.MockTransport(fail)


def in_the_body(kind: Kind, status: int = 200) -> httpx.MockTransport:
    """Return a transport that fails within the body."""
    return httpx.MockTransport(lambda _: httpx.Response(status, stream=Failing(kind)))


CALLS: list[Callable[[Any], Any]] = [
    lambda client: client.chat("Hi"),
    lambda client: client.models(),
    lambda client: client.health(),
    lambda client: client.embed("Hi"),
]


async def call_all(transport: httpx.MockTransport, expected: type[Exception]) -> None:
    """Assert that calls and streams of both clients raise `expected`, and exactly that."""
    with Client(transport=transport) as client:
        for call in CALLS:
            with pytest.raises(ApiError) as told:
                call(client)
            assert type(told.value) is expected
        with pytest.raises(ApiError) as told:
            list(client.stream_chat("Hi"))
        assert type(told.value) is expected
    async with AsyncClient(transport=transport) as async_client:
        for call in CALLS:
            with pytest.raises(ApiError) as told:
                await call(async_client)
            assert type(told.value) is expected
        with pytest.raises(ApiError) as told:
            [text async for text in async_client.stream_chat("Hi")]
        assert type(told.value) is expected


@pytest.mark.parametrize("kind", TRANSPORT)
async def test_transport_error_is_a_connection_error(kind: Kind) -> None:
    await call_all(at_once(kind), ApiConnectionError)
    await call_all(in_the_body(kind), ApiConnectionError)
    await call_all(in_the_body(kind, status=500), ApiConnectionError)


@pytest.mark.parametrize("kind", TIMEOUTS)
async def test_timeout_of_the_transport_is_a_timeout_error(kind: Kind) -> None:
    await call_all(at_once(kind), ApiTimeoutError)
    await call_all(in_the_body(kind), ApiTimeoutError)


def test_httpx_has_no_errors_that_are_left_out() -> None:
    """A new class of httpx's must be one that the clients catch."""
    classes = [c for c in vars(httpx).values() if isinstance(c, type) and issubclass(c, Exception)]
    bases = (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, httpx.CookieConflict)
    assert [c for c in classes if not issubclass(c, bases)] == []


def test_text_before_a_broken_connection_is_reported() -> None:
    texts = []
    with Client(transport=in_the_body(httpx.ReadError)) as client:
        stream = client.stream_chat("Hi")
        texts.append(next(stream))
        with pytest.raises(ApiConnectionError) as told:
            next(stream)
    assert texts == ["Hi"]
    assert told.value.status == 0
    assert str(told.value) == "the connection to http://127.0.0.1:8000 failed: broken"


def test_silent_server_is_given_up_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ApiTimeoutError) as told:
            client.with_options(timeout_s=0.05).chat("Hi")
    assert str(told.value) == f"{url} was silent for 0.05 s; raise timeout_s to wait longer"
    assert told.value.__suppress_context__


async def test_async_stream_is_given_up_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with AsyncClient(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            with pytest.raises(ApiTimeoutError):
                await anext(client.with_options(timeout_s=0.05).stream_chat("Hi"))


async def test_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with Client(url) as client, pytest.raises(ApiConnectionError, match=f"^{url} cannot be reach"):
        client.health()
    async with AsyncClient(url) as async_client:
        with pytest.raises(ApiConnectionError, match="cannot be reached"):
            await async_client.health()


def answering(data: bytes) -> tuple[str, threading.Thread]:
    """Answer one request with some bytes, and hang up; return where, and the thread to join."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.settimeout(DEADLINE_S)
            connection.recv(65536)
            connection.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense\r\n\r\n",
        HEAD + b"content-length: 100\r\n\r\n{",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"content-encoding: gzip\r\ncontent-length: 4\r\n\r\nnope",
    ],
)
async def test_broken_http_is_a_connection_error(data: bytes) -> None:
    for ask in (lambda client: client.chat("Hi"), lambda client: list(client.stream_chat("Hi"))):
        url, thread = answering(data)
        with Client(url) as client, pytest.raises(ApiConnectionError):
            ask(client)
        thread.join(DEADLINE_S)
        url, thread = answering(data)
        async with AsyncClient(url) as async_client:
            with pytest.raises(ApiConnectionError):
                await async_client.complete("Hi")
        await asyncio.to_thread(thread.join, DEADLINE_S)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"\xff\xfe",
        b'{"id": "\xff"}',
        b"[" * 100_000,
        b"null",
        gzip.compress(b"x", mtime=0),
        b"",
    ],
)
def test_body_that_is_no_answer_is_an_api_error(body: bytes) -> None:
    for status in (200, 502):
        answer = httpx.MockTransport(lambda _: httpx.Response(status, content=body))  # noqa: B023
        with Client(transport=answer) as client:
            with pytest.raises(ApiError) as told:
                client.chat("Hi")
            assert told.value.status == status
            with pytest.raises(ApiError):
                list(client.stream_chat("Hi"))


@pytest.mark.parametrize("event", [b"{", b"\xff", b'{"error": 3}', b'{"choices": 1}', b"[" * 9999])
def test_event_that_is_no_answer_is_an_api_error(event: bytes) -> None:
    body = b"data: " + event + b"\n\ndata: [DONE]\n\n"
    answer = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    with Client(transport=answer) as client, pytest.raises(ApiError):
        list(client.stream_chat("Hi"))


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://[::1", "http://h:x"]
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_url_that_is_none_is_a_config_error(kind: type[Client], url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        kind(url)


def test_key_that_no_header_carries_is_never_shown() -> None:
    with pytest.raises(ConfigError) as told:
        Client(api_key="secret\n")
    assert "secret" not in str(told.value)


def test_connection_errors_are_api_errors() -> None:
    assert issubclass(ApiTimeoutError, ApiConnectionError)
    assert issubclass(ApiConnectionError, ApiError)
