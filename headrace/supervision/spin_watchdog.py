"""Detects processes that spin without progress. Pure: the caller measures CPU time.

A heartbeat shows that a loop turns, not that it gets work done. A process that an unread event
wakes without end still beats, and keeps a core from the others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.board.board import Field, Seat, Slot, State
from headrace.runtime.heartbeat import MAX_WORK_S

# Of the thread that works, without anything done. Where a heart bears it, one piece may take that.
CEILINGS_S = {
    **dict.fromkeys(("frontend", "engine", "detokenizer", "fetcher"), 60.0),
    **dict.fromkeys(("tokenizer", "worker", "vision"), MAX_WORK_S),
}
IDLE_SHARE = 0.1  # of a core: a process that uses less is idle
SHORTEST_S = 0.1  # between looks: the kernel counts in ticks of 10 ms


@dataclass(frozen=True)
class Look:
    """CPU time of a process at one time, and at the start of its stretch without progress."""

    at: float
    pid: int
    work: bytes
    used_s: float
    began_s: float

    def goes_on(self, before: "Look") -> bool:
        """Whether it has worked since, and got nothing done."""
        is_idle = self.used_s - before.used_s < IDLE_SHARE * (self.at - before.at)
        return not is_idle and (self.pid, self.work) == (before.pid, before.work)


class SpinWatchdog:
    """Compares processes' CPU time with their progress."""

    def __init__(self) -> None:
        self._looks: dict[Seat, Look] = {}

    def passed(
        self, slots: Iterable[Slot], used_s: Callable[[int], float | None], now: float
    ) -> list[tuple[Slot, str]]:
        """Return the processes above their limit, each with a text for the log. Call it often.

        Args:
            used_s: CPU time, since its start, of the main thread of the process with some id;
                None where there is none.
        """
        found = []
        for slot in slots:
            used = used_s(slot[Field.PID]) if slot[Field.STATE] == State.READY else None
            before = self._looks.pop(slot.seat, None)
            if used is None:
                continue
            if before is not None and now - before.at < SHORTEST_S:
                self._looks[slot.seat] = before
                continue
            look = Look(now, slot[Field.PID], slot.work, used, used)
            if before is not None and look.goes_on(before):
                look = Look(now, look.pid, look.work, used, before.began_s)
            self._looks[slot.seat] = look
            limit_s = CEILINGS_S[slot.seat.role]
            if look.used_s - look.began_s > limit_s:
                found.append((slot, f"has used {limit_s:g} s of processor time for nothing"))
        return found
