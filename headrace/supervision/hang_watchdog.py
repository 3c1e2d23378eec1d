"""Who has been silent for so long that only its end can help. Pure: the clock is the caller's."""

from headrace.board.board import Slot, State
from headrace.board.fields import CommonField
from headrace.runtime.wake_clock import WakeClock

STARTING_S = 120.0  # for a start; a process that takes longer beats meanwhile (`heartbeat.py`)


class HangWatchdog:
    """A watch over processes, by their heartbeats.

    Args:
        stuck_s: for how long one that serves may be silent, in seconds.
    """

    def __init__(self, stuck_s: float) -> None:
        self._stuck_s = stuck_s
        self._awake = WakeClock()

    def stuck(self, slots: list[Slot], now_ns: int) -> list[Slot]:
        """Return who is stuck, of processes that live; to be called often."""
        since_ns = self._awake.look(now_ns)
        return [
            slot
            for slot in slots
            if silent_s(slot, now_ns, since_ns) > patience_s(slot, self._stuck_s)
        ]


def silent_s(slot: Slot, now_ns: int, since_ns: int) -> float:
    """Return for how long a process has not been heard by who is awake since some time."""
    return (now_ns - max(slot[CommonField.HEARTBEAT_NS], since_ns)) / 1e9


def patience_s(slot: Slot, stuck_s: float) -> float:
    """Return for how long a process may be silent."""
    return stuck_s if slot[CommonField.STATE] == State.READY else max(STARTING_S, stuck_s)
