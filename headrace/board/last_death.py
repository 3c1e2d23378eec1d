"""The last death in a seat, in words of its slot, and since when the seat serves.

The parent of a process writes its death, the process itself when it serves. A restart keeps both.
"""

import time

DIED_NS, SERVED_NS, PID = range(3)
DEATH_WORDS = 64  # of 8 bytes: the three, and how it died


class LastDeath:
    """Times are seconds since the epoch; 0 is never."""

    def __init__(self, words: "memoryview[int]") -> None:
        """Use `DEATH_WORDS` words."""
        self._words = words
        self._text = words[PID + 1 :].cast("B")

    def record(self, pid: int, how: str) -> None:
        """Keep that a process has died just now; a long text is cut."""
        data = how.encode()[: len(self._text)]
        self._text[:] = data.ljust(len(self._text), b"\0")
        self._words[PID] = pid
        self._words[DIED_NS] = time.time_ns()  # last: a reader compares it first

    def serve(self) -> None:
        """Keep that the process in the seat serves from now on."""
        self._words[SERVED_NS] = time.time_ns()

    @property
    def died_at(self) -> float:
        """When the last process died in this seat."""
        return self._words[DIED_NS] / 1e9

    @property
    def served_at(self) -> float:
        """When a process was last ready in this seat."""
        return self._words[SERVED_NS] / 1e9

    @property
    def pid(self) -> int:
        """The id of the process that died."""
        return self._words[PID]

    @property
    def how(self) -> str:
        """How it died, and why, as a predicate: "was killed by SIGKILL"."""
        return bytes(self._text).rstrip(b"\0").decode(errors="replace")
