"""Cancels a request from another thread before its response begins.

httpx names a request's connection with the response only. Here each connection reports to the
`CancelScope` of the thread that writes to it. Closing a socket wakes no thread that waits for it;
shutting it down does.

`hook_connections` replaces a private attribute, as public means lose behaviour (httpx 0.28,
httpcore 1.0):

- the extension `trace` names a new connection, and none that is reused;
- the extension `network_stream` comes with the response, which is too late;
- `httpx.Client.close` in another thread ends the requests of all threads;
- `httpcore.ConnectionPool(network_backend=...)` needs a transport of our own. A transport that the
  caller passes, `httpx.HTTPTransport(limits=...)` for instance, has no such parameter.
"""

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import httpcore
import httpx

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


def hook_connections(http: httpx.Client) -> None:
    """Hook a client's connections into cancel scopes.

    httpx has no name for this. Where its parts are called otherwise than they have been, an answer
    can be canceled once it has begun.
    """
    pool = getattr(getattr(http, "_transport", None), "_pool", None)
    backend = getattr(pool, "_network_backend", None)
    if isinstance(backend, httpcore.NetworkBackend):
        setattr(pool, "_network_backend", TellingBackend(backend))  # noqa: B010
