"""Finds processes with too much memory of their own.

Without it, the kernel kills the largest process when memory runs out: the worker, even where
another process has grown.
"""

from collections.abc import Callable, Sequence

from headrace.board.board import Slot, State
from headrace.board.fields import CommonField
from headrace.supervision.watchdog_protocol import WatchdogVerdict

# Of the machine's memory, or the container's.
SHARES = {
    **{"frontend": 0.25, "tokenizer": 0.25, "detokenizer": 0.25, "engine": 0.5, "worker": 0.95},
    **{"vision": 0.5, "fetcher": 0.25, "telemetry": 0.25},
}


class MemoryWatchdog:
    """A `Watchdog` of memory.

    Args:
        memory_bytes: of the machine.
        own_bytes: returns the memory of the process with an id; None where there is none.
    """

    def __init__(self, memory_bytes: int, own_bytes: Callable[[int], int | None]) -> None:
        self._bytes = {role: int(share * memory_bytes) for role, share in SHARES.items()}
        self._own_bytes = own_bytes

    def check(self, slots: Sequence[Slot], now_ns: int) -> list[WatchdogVerdict]:
        """Return a verdict for each serving process above its share; see `Watchdog.check`."""
        found = []
        for slot in slots:
            limit = self._bytes[slot.seat.role]
            has = (
                self._own_bytes(slot[CommonField.PID])
                if slot[CommonField.STATE] == State.READY
                else None
            )
            if has is not None and has > limit:
                reason = f"has {has >> 20} MiB of memory, more than its {limit >> 20}"
                found.append(WatchdogVerdict(slot.seat, reason))
        return found
