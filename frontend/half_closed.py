"""Clients that have said all (shutdown(SHUT_WR)) and still read, told from those that have gone.

To the server both look alike: the end of what it reads. A byte that is sent to a closed socket is
answered by a reset. One that is sent to a half-closed socket is read. So the answer's first bytes,
which are known before it is, are sent ahead, the first at once. Where none is left, TCP's keepalive
finds that a client has gone: after `tcp_fin_timeout`, 60 s. A Unix socket tells at once.
"""

import select
import socket
from typing import Any, Generic, Protocol, TypeVar

FIRST_GAP_S = 1.0  # between probes; each gap is twice the one before
# Seconds of silence before keepalive's probe and between probes, and how many fail (tcp(7)).
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Probed(Protocol):
    """A connection."""

    def probe(self) -> None:
        """Send a byte of the answer ahead, if one is known."""


C = TypeVar("C", bound=Probed)


class HalfClosed(Generic[C]):
    """Connections by their sockets. The event loop watches none of them: nothing more is read."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._connections: dict[int, C] = {}
        self._due: dict[int, tuple[float, float]] = {}  # when the next probe is, and the gap then

    def add(self, connection: C, sock: Any, now: float) -> None:
        """Watch whether a client goes."""
        fd = sock.fileno()
        self._connections[fd] = connection
        self._due[fd] = now + FIRST_GAP_S, 2 * FIRST_GAP_S
        self._poll.register(fd, 0)  # the kernel always tells of POLLHUP and POLLERR
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.probe()

    def discard(self, connection: C) -> None:
        """Watch no more; before the socket is closed."""
        for fd in [fd for fd, one in self._connections.items() if one is connection]:
            del self._connections[fd], self._due[fd]
            self._poll.unregister(fd)

    def gone(self, now: float) -> list[C]:
        """Return whose clients have gone, and probe the others whose turn it is. It never waits."""
        if not self._connections:
            return []
        found = [fd for fd, _ in self._poll.poll(0)]
        for fd, (at, gap_s) in list(self._due.items()):
            if at <= now and fd not in found:
                self._due[fd] = now + gap_s, 2 * gap_s
                self._connections[fd].probe()
        return [self._connections[fd] for fd in found]
