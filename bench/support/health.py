"""How soon /health answers: asked some time after each answer, by a process of its own."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

from support.blocking import Client

PAUSE_S = 0.002


class HealthProbe:
    """A process that asks as long as the context lasts, `pause_s` after each answer."""

    def __init__(self, url: str, pause_s: float = PAUSE_S) -> None:
        self.latencies_ms: list[float] = []  # of every answer, at the end
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.health", url, str(pause_s)],
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


def main(url: str, pause_s: str) -> None:
    """Ask until standard input ends; print each answer's milliseconds."""
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    client, latencies = Client(url), []
    while not stop.is_set():
        begun = time.perf_counter()
        client.send("GET", "/health")
        assert client.response() == 200
        latencies.append((time.perf_counter() - begun) * 1e3)
        time.sleep(float(pause_s))
    print(json.dumps(latencies))


if __name__ == "__main__":
    main(*sys.argv[1:])
