"""Cancels a request from another thread before its response begins.

httpx names a request's connection with the response only. A `CancelScope` finds it before:

- the extension `trace` names each new connection of any transport;
- `PooledTransport` also names reused ones: each connection reports to the scope of the thread that
  writes to it.

Closing a socket wakes no thread that waits for it; shutting it down does. With proxies of the
environment or a transport of the caller, a request on a reused connection is canceled when its
response begins.
"""

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from urllib.request import getproxies

import httpcore
import httpx

HTTPCORE_ERRORS = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.UnsupportedProtocol,
)
ASKING: ContextVar["CancelScope"] = ContextVar("ASKING")


class Canceled(Exception):
    """The caller has canceled."""


class CancelScope:
    """The connection of one request, once there is one."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._is_cut = threading.Event()

    @property
    def is_cut(self) -> bool:
        """Whether `cut` has been called."""
        return self._is_cut.is_set()

    def take(self, stream: Any) -> None:
        """Attach the connection of the request."""
        self._stream = stream
        if self.is_cut:
            hang_up(stream)

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Attach the connection of an event of httpx's extension `trace`, if it is new."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self.take(info["return_value"])

    def cut(self) -> None:
        """Hang up: a reader finds the connection's end, and no retry follows."""
        self._is_cut.set()
        if self._stream is not None:
            hang_up(self._stream)

    def wait(self, seconds: float) -> None:
        """Wait before asking again.

        Raises:
            Canceled: `cut` has been called.
        """
        if self._is_cut.wait(seconds):
            raise Canceled

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Report the connections that are written to within this context."""
        token = ASKING.set(self)
        try:
            yield
        finally:
            ASKING.reset(token)


def hang_up(stream: Any) -> None:
    """Shut a connection down."""
    found = stream.get_extra_info("socket")
    if found is None or found.fileno() < 0:
        return
    with socket.socket(fileno=os.dup(found.fileno())) as same, contextlib.suppress(OSError):
        same.shutdown(socket.SHUT_RDWR)


class TellingStream(httpcore.NetworkStream):
    """A connection that reports itself to its writer."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Read."""
        return self._stream.read(max_bytes, timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Report the connection, and write."""
        line = ASKING.get(None)
        if line is not None:
            line.take(self._stream)
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        """Close it."""
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        """Return the same one, encrypted."""
        return TellingStream(self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        """Return the transport's extra info."""
        return self._stream.get_extra_info(info)


class TellingBackend(httpcore.NetworkBackend):
    """Makes connections that report themselves to a `CancelScope`."""

    def __init__(self, backend: httpcore.NetworkBackend) -> None:
        self._backend = backend

    def connect_tcp(self, *args: Any, **kwargs: Any) -> httpcore.NetworkStream:
        """Connect to a port."""
        return TellingStream(self._backend.connect_tcp(*args, **kwargs))

    def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore.NetworkStream:
        """Connect to a Unix socket."""
        return TellingStream(self._backend.connect_unix_socket(*args, **kwargs))


class ResponseStream(httpx.SyncByteStream):
    """The body of a response of httpcore."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        with httpx_errors():
            yield from self._stream

    def close(self) -> None:
        """Close it."""
        self._stream.close()


class PooledTransport(httpx.BaseTransport):
    """A pool of connections with httpx's limits. Each reports to the scope of its request.

    Args:
        keepalive_expiry_s: until an idle connection is closed; None is never.
    """

    def __init__(
        self, ssl_context: ssl.SSLContext | None = None, keepalive_expiry_s: float | None = 5.0
    ) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=ssl_context,
            max_connections=100,
            max_keepalive_connections=20,
            keepalive_expiry=keepalive_expiry_s,
            network_backend=TellingBackend(httpcore.SyncBackend()),
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; return its response without the body."""
        url = request.url
        asked = httpcore.Request(
            method=request.method,
            url=httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        with httpx_errors():
            found = self._pool.handle_request(asked)
        return httpx.Response(
            status_code=found.status,
            headers=found.headers,
            stream=ResponseStream(found.stream),
            extensions=found.extensions,
        )

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()


@contextlib.contextmanager
def httpx_errors() -> Iterator[None]:
    """Raise httpcore's errors as those of httpx, which have the same names."""
    try:
        yield
    except HTTPCORE_ERRORS as error:
        kind = getattr(httpx, type(error).__name__, httpx.TransportError)
        raise kind(str(error)) from error


def transport_of(url: httpx.URL) -> httpx.BaseTransport | None:
    """Return a transport to a server, or httpx's own with proxies of the environment."""
    if getproxies().keys() & {"http", "https", "all"}:
        return None
    return PooledTransport(httpx.create_ssl_context() if url.scheme == "https" else None)
