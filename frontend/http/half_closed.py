"""Distinguishes half-closed clients (shutdown(SHUT_WR)), which still read, from disconnected ones.

To the server both look alike: the end of what it reads. A byte that is sent to a closed socket is
answered by a reset. One that is sent to a half-closed socket is read. So the answer's first bytes,
which are known before it is, are sent ahead, the first at once. Where none is left, TCP's keepalive
finds that a client has gone: after `tcp_fin_timeout`, 60 s. A Unix socket reports it at once.
"""

import asyncio
import select
import socket
from collections.abc import Callable
from typing import Any

FIRST_POLL_S = 0.01  # after which a client is first looked at
POLL_INTERVAL_S = 0.1
FIRST_GAP_S = 1.0  # between probes; each gap is twice the one before
# Seconds of silence before keepalive's probe and between probes, and how many fail (tcp(7)).
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class HalfClosed:
    """Polls a half-closed socket, which the event loop no longer watches."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: Any,
        probe: Callable[[], None],
        on_disconnect: Callable[[], None],
    ) -> None:
        """Begin to look.

        Args:
            probe: sends a byte of the answer ahead, if one is known.
            on_disconnect: is called when the client has gone.
        """
        self._loop, self._probe, self._on_disconnect = loop, probe, on_disconnect
        self._poll = select.poll()
        self._poll.register(sock.fileno(), 0)  # the kernel always reports POLLHUP and POLLERR
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._gap_s = FIRST_GAP_S
        self._probe_at = loop.time() + self._gap_s
        self._timer = loop.call_later(FIRST_POLL_S, self._check)
        probe()

    def stop(self) -> None:
        """Stop the probe, before the socket is closed."""
        self._timer.cancel()

    def _check(self) -> None:
        if self._poll.poll(0):
            self._on_disconnect()
            return
        if self._loop.time() >= self._probe_at:
            self._gap_s *= 2
            self._probe_at = self._loop.time() + self._gap_s
            self._probe()
        self._timer = self._loop.call_later(POLL_INTERVAL_S, self._check)
