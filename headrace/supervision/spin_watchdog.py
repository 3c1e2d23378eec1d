"""Who uses processor time and gets nothing done. Pure: what is used is the caller's to know.

A heart tells that a loop goes round, not that it does anything: who is woken without end for what
it does not take beats, and keeps a core from the others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.board.board import Seat, Slot, State
from headrace.board.fields import CommonField
from headrace.runtime.heartbeat import MAX_WORK_S

# Of the thread that works, without anything done. Where a heart bears it, one piece may take that.
CEILINGS_S = {
    **dict.fromkeys(("frontend", "engine", "detokenizer", "fetcher"), 60.0),
    **dict.fromkeys(("tokenizer", "worker", "vision"), MAX_WORK_S),
}
IDLE_SHARE = 0.1  # of a core: who uses less waits for something to do
SHORTEST_S = 0.1  # between looks: the kernel counts in ticks of 10 ms


@dataclass(frozen=True)
class Look:
    """What a process had used at some time, and at the start of the stint it was in."""

    at: float
    pid: int
    work: list[int]
    used_s: float
    began_s: float

    def goes_on(self, before: "Look") -> bool:
        """Whether it has worked since, and got nothing done."""
        is_idle = self.used_s - before.used_s < IDLE_SHARE * (self.at - before.at)
        return not is_idle and (self.pid, self.work) == (before.pid, before.work)


class SpinWatchdog:
    """A watch over what processes use, and what they get done."""

    def __init__(self) -> None:
        self._looks: dict[Seat, Look] = {}

    def passed(
        self, slots: Iterable[Slot], used_s: Callable[[int], float | None], now: float
    ) -> list[tuple[Slot, str]]:
        """Return who has used too much, and what is to be said of it; to be called often.

        Args:
            used_s: processor time, since its start, of the main thread of the process with some
                id; None where there is none.
        """
        found = []
        for slot in slots:
            used = used_s(slot[CommonField.PID]) if slot[CommonField.STATE] == State.READY else None
            before = self._looks.pop(slot.seat, None)
            if used is None:
                continue
            if before is not None and now - before.at < SHORTEST_S:
                self._looks[slot.seat] = before
                continue
            look = Look(now, slot[CommonField.PID], slot.work, used, used)
            if before is not None and look.goes_on(before):
                look = Look(now, look.pid, look.work, used, before.began_s)
            self._looks[slot.seat] = look
            limit_s = CEILINGS_S[slot.seat.role]
            if look.used_s - look.began_s > limit_s:
                found.append((slot, f"has used {limit_s:g} s of processor time for nothing"))
        return found
