"""Longest wait of other clients: a process reads a stream and sends small requests.

Both have an API key of their own, so the engine is shared with all other clients.
"""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

from support.blocking import Client

PAUSE_S = 0.02
NUM_TOKENS = 100_000  # of the stream: it outlasts what is measured


class LongestWait:
    """A process that asks as long as the context lasts.

    Attributes:
        stream_ms: the longest time between two pieces of the stream.
        small_ms: the longest time that a small request took.
    """

    def __init__(self, url: str, key: str) -> None:
        self.stream_ms = self.small_ms = 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.longest_wait", url, key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it reads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        output, _error = self._process.communicate()
        self.stream_ms, self.small_ms = json.loads(output)


class Longest:
    """The longest of some times, so far."""

    def __init__(self) -> None:
        self.ms = 0.0
        self._since = time.perf_counter()

    def begin(self) -> None:
        """Mark the start of a request."""
        self._since = time.perf_counter()

    def end(self) -> None:
        """It is here."""
        self.ms = max(self.ms, (time.perf_counter() - self._since) * 1e3)


def read_stream(client: Client, longest: Longest, begun: threading.Event) -> None:
    """Read one stream after the other, for ever."""
    fields = {"prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    body = json.dumps(fields | {"seed": 7}).encode()
    while True:
        client.send("POST", "/v1/completions", body)
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data = client.receive()
            longest.end()
            longest.begin()
            begun.set()


def main(url: str, key: str) -> None:
    """Ask until standard input ends; print the longest waits in milliseconds."""
    stop, begun, stream, small = threading.Event(), threading.Event(), Longest(), Longest()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    reader = (Client(url, key), stream, begun)
    threading.Thread(target=read_stream, args=reader, daemon=True).start()
    begun.wait()
    stream.ms = 0.0
    print("reading", flush=True)
    client = Client(url, key)
    body = json.dumps({"prompt": [5, 6, 7, 9], "max_tokens": 2, "ignore_eos": True}).encode()
    while not stop.is_set():
        small.begin()
        client.send("POST", "/v1/completions", body)
        assert client.response() == 200
        small.end()
        time.sleep(PAUSE_S)
    stream.end()  # what has not come by now counts, too
    print(json.dumps([stream.ms, small.ms]))


if __name__ == "__main__":
    main(*sys.argv[1:])
