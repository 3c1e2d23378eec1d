"""Engines that serve another machine, and a link to them that can be cut."""

import re
import selectors
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from servers import RunningServer

from support.ports import reserved_port

CHUNK_BYTES = 1 << 16
LOOK_S = 0.05


class RunningNode(RunningServer):
    """A server without HTTP, whose `url` is where its engine listens."""

    ready = re.compile(r" is at (tcp:\S+)")

    def __init__(
        self, key_file: Path, *args: str, host: str = "127.0.0.1", under: Sequence[str] = ()
    ) -> None:
        with reserved_port() as port:
            where = f"tcp://{host}:{port}"
            flags = ("--engine-listen", where, "--engine-key-file", str(key_file))
            super().__init__(*flags, *args, under=under)


class Link:
    """A relay of TCP connections. While it is cut, it carries nothing and closes nothing."""

    def __init__(self, where: str) -> None:
        self._there = urlsplit(where)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_cut = False
        self._has_ended = False
        self._others: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._has_ended:
                for key, _ in selector.select(LOOK_S):
                    if self.is_cut:
                        continue
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.data in self._others:
                        self._carry(selector, key.data)
        for one in (*self._others, self._listener):
            one.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        here, _ = self._listener.accept()
        try:
            there = socket.create_connection((self._there.hostname, self._there.port or 0))
        except OSError:
            here.close()
            return
        for one, other in ((here, there), (there, here)):
            self._others[one] = other
            selector.register(one, selectors.EVENT_READ, one)

    def _carry(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        other = self._others[one]
        try:
            data = one.recv(CHUNK_BYTES)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for end in (one, other):
                del self._others[end]
                selector.unregister(end)
                end.close()

    def close(self) -> None:
        """End all connections."""
        self._has_ended = True
        self._thread.join()
