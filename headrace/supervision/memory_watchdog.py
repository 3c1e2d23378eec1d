"""How much memory a process may have of its own. Pure: what it has is the caller's to know.

Without, the kernel would end whoever has most when the machine has no more: the worker, though
somebody else had grown.
"""

from collections.abc import Callable, Iterable

from headrace.board.board import Slot, State
from headrace.board.fields import CommonField

# Of the machine's memory, or the container's.
SHARES = {
    **{"frontend": 0.25, "tokenizer": 0.25, "detokenizer": 0.25, "engine": 0.5, "worker": 0.95},
    **{"vision": 0.5, "fetcher": 0.25},
}


class MemoryWatchdog:
    """The limits on a machine with so much memory."""

    def __init__(self, memory_bytes: int) -> None:
        self._bytes = {role: int(share * memory_bytes) for role, share in SHARES.items()}

    def passed(
        self, slots: Iterable[Slot], own_bytes: Callable[[int], int | None]
    ) -> list[tuple[Slot, str]]:
        """Return who has too much, and what is to be said of it.

        Args:
            own_bytes: what the process with some id has; None where there is none.
        """
        found = []
        for slot in slots:
            limit = self._bytes[slot.seat.role]
            has = (
                own_bytes(slot[CommonField.PID]) if slot[CommonField.STATE] == State.READY else None
            )
            if has is not None and has > limit:
                found.append((slot, f"has {has >> 20} MiB of memory, more than its {limit >> 20}"))
        return found
