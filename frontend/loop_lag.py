"""Event loop lag, which delays every client of a frontend.

A timer that fires late was held up, by a callback that ran long or by another process on the same
core. The CPU time that this process used meanwhile tells the two apart.
"""

import asyncio
import time
from collections.abc import Callable

from headrace.board.board import Field, Slot, Timing

PERIOD_S = 0.01
IDLE_PERIOD_S = 0.2  # where no request is open: to wake up costs


class LoopLag:
    """Measures an event loop from inside."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, slot: Slot, is_busy: Callable[[], bool]
    ) -> None:
        self._loop = loop
        self._slot = slot
        self._is_busy = is_busy
        self._due_ns = 0
        self._cpu_ns = 0

    def start(self) -> None:
        """Begin; the timer lives as long as the loop."""
        self._cpu_ns = time.thread_time_ns()
        period_s = PERIOD_S if self._is_busy() else IDLE_PERIOD_S
        self._due_ns = time.monotonic_ns() + round(period_s * 1e9)
        self._loop.call_later(period_s, self._fire)

    def _fire(self) -> None:
        lag_ns = max(time.monotonic_ns() - self._due_ns, 0)
        self._slot[Field.LAG_NS] = lag_ns
        self._slot.histogram(Timing.LOOP_LAG).observe(lag_ns)
        # No callback that held the timer up has used more than either.
        blocked_ns = min(lag_ns, time.thread_time_ns() - self._cpu_ns)
        if blocked_ns > self._slot[Field.LONGEST_CALLBACK_NS]:
            self._slot[Field.LONGEST_CALLBACK_NS] = blocked_ns
        self.start()
