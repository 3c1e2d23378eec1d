"""Deadlines by which clients must send more. Pure."""

from collections.abc import Iterator
from typing import Generic, TypeVar

C = TypeVar("C")


class Deadlines(Generic[C]):
    """Deadlines of equal duration, so they expire in order of their start."""

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self._due: dict[C, float] = {}

    def __len__(self) -> int:
        return len(self._due)

    def start(self, client: C, now: float) -> None:
        """Give a client the whole time from now."""
        self._due.pop(client, None)
        self._due[client] = now + self.duration_s

    def stop(self, client: C) -> None:
        """Nothing is expected of a client any more."""
        self._due.pop(client, None)

    def passed(self, now: float) -> Iterator[C]:
        """Yield, and let go of, those whose time is up."""
        while self._due:
            client = next(iter(self._due))
            if self._due[client] > now:
                return
            del self._due[client]
            yield client
