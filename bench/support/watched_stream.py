"""A stream that a process of its own reads, and when each piece of its text came."""

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import closing
from itertools import pairwise
from typing import Self
from urllib.parse import urlsplit

PATH = "/v1/completions"
MAX_TOKENS = 120_000  # more than anything lasts that the stream is watched beside
TIMEOUT_S = 600.0


def events(url: str, seed: int) -> Generator[str]:
    """Yield the pieces of a sampled text, which is the same each time.

    Raises:
        RuntimeError: the answer is not a stream, or the stream has an error.
    """
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT_S)
    body = {"prompt": "Once upon a time", "max_tokens": MAX_TOKENS, "stream": True}
    body |= {"temperature": 1, "seed": seed, "ignore_eos": True}
    with closing(connection):
        connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {response.read()!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        raise RuntimeError(f"the stream has failed: {event}")
                    yield event["choices"][0]["text"]
    raise RuntimeError("the stream has ended")


class WatchedStream:
    """A stream that lasts as long as the context, and a piece longer. Its first piece has come."""

    def __init__(self, url: str, seed: int = 0) -> None:
        self._url, self._seed = url, seed
        self.pieces: list[tuple[float, str]] = []  # time.monotonic() and text, at the end
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, url, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "begun\n", "the stream has not begun"
        return self

    def __exit__(self, *_: object) -> None:
        output, _ = self._process.communicate()
        self.pieces = json.loads(output)

    @property
    def text(self) -> str:
        """All that has come."""
        return "".join(piece for _, piece in self.pieces)

    def text_alone(self) -> str:
        """Request the same text alone, up to the length received so far."""
        size, text = len(self.text), ""
        with closing(events(self._url, self._seed)) as pieces:
            for piece in pieces:
                text += piece
                if len(text) >= size:
                    break
        return text[:size]

    def waits_s(self, begin: float, end: float) -> list[float]:
        """Return the times between pieces, as far as they lie in a span of time.

        The first is since `begin`, the last until `end`.
        """
        moments = [at for at, _ in self.pieces if begin < at < end]
        return [later - at for at, later in pairwise([begin, *moments, end])]


def main(url: str, seed: str) -> None:
    """Read until standard input ends, then one more piece; print all pieces with their times."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    pieces: list[tuple[float, str]] = []
    for piece in events(url, int(seed)):
        if not pieces:
            print("begun", flush=True)
        was_over = stop.is_set()
        pieces.append((time.monotonic(), piece))
        if was_over:
            break
    print(json.dumps(pieces))


if __name__ == "__main__":
    main(*sys.argv[1:])
