"""Finds processes without a heartbeat."""

from collections.abc import Sequence

from headrace.board.board import Slot, State
from headrace.board.fields import CommonField
from headrace.runtime.wake_clock import WakeClock
from headrace.supervision.watchdog_protocol import WatchdogVerdict

STARTING_S = 120.0  # for a start; a process that takes longer beats meanwhile (`heartbeat.py`)


class HangWatchdog:
    """A `Watchdog` of heartbeats.

    Args:
        stuck_s: seconds that a serving process may be silent.
    """

    def __init__(self, stuck_s: float) -> None:
        self._stuck_s = stuck_s
        self._awake = WakeClock()

    def check(self, slots: Sequence[Slot], now_ns: int) -> list[WatchdogVerdict]:
        """Return a verdict for each hung process; see `Watchdog.check`."""
        since_ns = self._awake.look(now_ns)
        return [
            WatchdogVerdict(slot.seat, "is stuck")
            for slot in slots
            if silent_s(slot, now_ns, since_ns) > patience_s(slot, self._stuck_s)
        ]


def silent_s(slot: Slot, now_ns: int, since_ns: int) -> float:
    """Return the seconds since a heartbeat, or since the watcher woke up."""
    return (now_ns - max(slot[CommonField.HEARTBEAT_NS], since_ns)) / 1e9


def patience_s(slot: Slot, stuck_s: float) -> float:
    """Return the seconds that a process may be silent."""
    return stuck_s if slot[CommonField.STATE] == State.READY else max(STARTING_S, stuck_s)
