"""Detects processes that have been silent for too long. Pure: the clock is the caller's."""

from headrace.board.board import Field, Slot, State
from headrace.runtime.wake_clock import WakeClock

STARTING_S = 120.0  # for a start; a process that takes longer beats meanwhile (`heartbeat.py`)


class HangWatchdog:
    """Finds stuck processes by their heartbeats.

    Args:
        stuck_s: for how long a process that serves may be silent, in seconds.
    """

    def __init__(self, stuck_s: float) -> None:
        self._stuck_s = stuck_s
        self._awake = WakeClock()

    def stuck(self, slots: list[Slot], now_ns: int) -> list[Slot]:
        """Return those of living processes that are stuck. A long pause between calls resets it."""
        since_ns = self._awake.look(now_ns)
        return [
            slot
            for slot in slots
            if silent_s(slot, now_ns, since_ns) > patience_s(slot, self._stuck_s)
        ]


def silent_s(slot: Slot, now_ns: int, since_ns: int) -> float:
    """Return how long a process has been silent while the watcher was awake, in seconds."""
    return (now_ns - max(slot[Field.HEARTBEAT_NS], since_ns)) / 1e9


def patience_s(slot: Slot, stuck_s: float) -> float:
    """Return for how long a process may be silent, in seconds."""
    return stuck_s if slot[Field.STATE] == State.READY else max(STARTING_S, stuck_s)
