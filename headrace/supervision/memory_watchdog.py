"""A memory limit per process. Pure: the caller measures the memory.

Without a limit, the kernel ends the largest process when the machine runs out. That is the worker,
even where another process has grown.
"""

from collections.abc import Callable, Iterable

from headrace.board.board import Field, Slot, State

# Of the machine's memory, or the container's.
SHARES = {
    **{"frontend": 0.25, "tokenizer": 0.25, "detokenizer": 0.25, "engine": 0.5, "worker": 0.95},
    **{"vision": 0.5, "fetcher": 0.25},
}


class MemoryWatchdog:
    """Memory limits by role, shares of the machine's memory."""

    def __init__(self, memory_bytes: int) -> None:
        self._bytes = {role: int(share * memory_bytes) for role, share in SHARES.items()}

    def passed(
        self, slots: Iterable[Slot], own_bytes: Callable[[int], int | None]
    ) -> list[tuple[Slot, str]]:
        """Return the processes above their limit, each with a text for the log.

        Args:
            own_bytes: memory of the process with some id; None where there is none.
        """
        found = []
        for slot in slots:
            limit = self._bytes[slot.seat.role]
            has = own_bytes(slot[Field.PID]) if slot[Field.STATE] == State.READY else None
            if has is not None and has > limit:
                found.append((slot, f"has {has >> 20} MiB of memory, more than its {limit >> 20}"))
        return found
