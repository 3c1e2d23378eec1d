"""Latency of /health or another GET, polled by a process of its own.

An answer's time is when the kernel receives it (`SO_TIMESTAMPING`). On busy cores the client may
read it later, and that delay is not the server's.
"""

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

PAUSE_S = 0.002
SO_TIMESTAMPING, ON_ARRIVAL, TELL = 37, 1 << 3, 1 << 4  # <linux/net_tstamp.h>
TIMES = struct.Struct("6q")  # three `timespec`; the first is when the kernel had it
REQUEST = "GET %s HTTP/1.1\r\nHost: %s\r\n\r\n"
ROOM = 64 << 10  # for an answer


class HealthProbe:
    """A process that asks as long as the context lasts, `pause_s` after each answer."""

    def __init__(self, url: str, pause_s: float = PAUSE_S, path: str = "/health") -> None:
        self.latencies_ms: list[float] = []  # of every answer, at the end
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.health", url, str(pause_s), path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        output, _ = self._process.communicate()
        self.latencies_ms = json.loads(output)


def main(url: str, pause_s: str, path: str) -> None:
    """Ask until standard input ends; print each answer's milliseconds."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    where = urlsplit(url)
    connection = socket.create_connection((where.hostname, where.port))
    connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, ON_ARRIVAL | TELL)
    request, latencies = (REQUEST % (path, where.netloc)).encode(), []
    while not stop.is_set():
        begun = time.time_ns()
        connection.sendall(request)
        arrived = arrival_ns(connection)
        if arrived is not None:
            latencies.append((arrived - begun) / 1e6)
        time.sleep(float(pause_s))
    print(json.dumps(latencies))


def arrival_ns(connection: socket.socket) -> int | None:
    """Read a response; return when the last of it came in, in ns since 1970.

    The kernel stamps packets a moment after the socket asks for it: None before that.
    """
    answer = b""
    while not is_whole(answer):
        piece, found, _, _ = connection.recvmsg(ROOM, socket.CMSG_SPACE(TIMES.size))
        assert piece, "the server closed the connection"
        answer += piece
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    stamps = [TIMES.unpack(data) for _, kind, data in found if kind == SO_TIMESTAMPING]
    return int(stamps[0][0]) * 1_000_000_000 + int(stamps[0][1]) if stamps else None


def is_whole(answer: bytes) -> bool:
    """Whether all of a response with a length is there."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
    return bool(length) and len(body) == int(length)


if __name__ == "__main__":
    main(*sys.argv[1:])
