"""Event loop lag, which delays every client of a frontend.

A timer that fires late was held up, by a callback that ran long or by another process on the same
core. The CPU time that this process used meanwhile tells the two apart. A timer costs 0.1 ms where
other processes use the core. So a loop with little to do has few, unless timers are late.
"""

import asyncio
import time

from headrace.board.board import Slot, Timing
from headrace.board.fields import FrontendField

PERIOD_S = 0.01
QUIET_PERIOD_S = 0.1
QUIET = 0.05  # of a core's time, which the loop has used since the last timer


class LoopLag:
    """Measures an event loop from inside."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slot: Slot) -> None:
        self._loop = loop
        self._slot = slot
        self._began_ns = 0
        self._due_ns = 0
        self._cpu_ns = 0

    def start(self) -> None:
        """Begin; the timer lives as long as the loop."""
        self._wait(QUIET_PERIOD_S)

    def _wait(self, period_s: float) -> None:
        self._began_ns, self._cpu_ns = time.monotonic_ns(), time.thread_time_ns()
        self._due_ns = self._began_ns + round(period_s * 1e9)
        self._loop.call_later(period_s, self._fire)

    def _fire(self) -> None:
        now_ns, used_ns = time.monotonic_ns(), time.thread_time_ns() - self._cpu_ns
        lag_ns = max(now_ns - self._due_ns, 0)
        self._slot[FrontendField.LAG_NS] = lag_ns
        self._slot.histogram(Timing.LOOP_LAG).observe(lag_ns)
        # No callback that held the timer up has used more than either.
        blocked_ns = min(lag_ns, used_ns)
        if blocked_ns > self._slot[FrontendField.LONGEST_CALLBACK_NS]:
            self._slot[FrontendField.LONGEST_CALLBACK_NS] = blocked_ns
        has_little = used_ns < QUIET * (now_ns - self._began_ns)
        is_quiet = has_little and lag_ns < PERIOD_S * 1e9
        self._wait(QUIET_PERIOD_S if is_quiet else PERIOD_S)
