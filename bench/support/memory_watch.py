"""Private memory of processes, current and peak."""

import contextlib
import threading
from collections.abc import Mapping
from typing import Self

import psutil

POLL_INTERVAL_S = 0.05


def own_bytes(ring: Mapping[str, psutil.Process]) -> dict[str, int]:
    """Return the memory that each process shares with no other, in bytes, by title."""
    found = {}
    for title, process in ring.items():
        with contextlib.suppress(psutil.Error):
            memory = process.memory_info()
            found[title] = memory.rss - memory.shared
    return found


class MemoryWatch:
    """Samples the memory of processes while the context lasts."""

    def __init__(self, ring: Mapping[str, psutil.Process]) -> None:
        self._ring = ring
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.before = own_bytes(ring)
        self.peak = dict(self.before)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._is_over.wait(POLL_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        for title, size in own_bytes(self._ring).items():
            self.peak[title] = max(self.peak.get(title, 0), size)
