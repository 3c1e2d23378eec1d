"""The interface of watchdogs: each finds processes that only a restart can help.

`hang_watchdog.py` judges heartbeats, `spin_watchdog.py` CPU time, `memory_watchdog.py` memory.
All are pure: the clock and the readers of `/proc` are passed in. `/health` reports a late step or
heartbeat earlier than a watchdog acts (`Slot.unhealthy_reason`).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.board.board import Seat, Slot


class WatchdogVerdict(NamedTuple):
    """A process to be killed, and the reason: a predicate for the log, such as "is stuck"."""

    seat: Seat
    reason: str


class Watchdog(Protocol):
    """A policy that is asked often; the time between two calls is its resolution."""

    def check(self, slots: Sequence[Slot], now_ns: int) -> list[WatchdogVerdict]:
        """Return a verdict for each of these living processes that is to be killed.

        Args:
            now_ns: `time.monotonic_ns()`.
        """
