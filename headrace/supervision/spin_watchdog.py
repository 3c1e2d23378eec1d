"""Finds processes that spin: they use CPU time and make no progress.

A heartbeat shows that a loop runs, not that it does work. A process that is woken without end for
an event that it does not take still beats, and keeps a core from the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.board.board import Seat, Slot, State
from headrace.board.fields import CommonField
from headrace.runtime.heartbeat import MAX_WORK_S
from headrace.supervision.watchdog_protocol import WatchdogVerdict

# Of the working thread, without progress. Where a heartbeat covers it, one piece may take that.
CEILINGS_S = {
    **dict.fromkeys(("frontend", "engine", "detokenizer", "fetcher", "telemetry"), 60.0),
    **dict.fromkeys(("tokenizer", "worker", "vision"), MAX_WORK_S),
}
IDLE_SHARE = 0.1  # of a core: a process that uses less waits for work
SHORTEST_S = 0.1  # between looks: the kernel counts in ticks of 10 ms


@dataclass(frozen=True)
class Look:
    """The CPU time of a process at some time, and at the start of its stint."""

    at: float
    pid: int
    work: list[int]
    used_s: float
    began_s: float

    def goes_on(self, before: "Look") -> bool:
        """Whether the process has used CPU time since, and made no progress."""
        is_idle = self.used_s - before.used_s < IDLE_SHARE * (self.at - before.at)
        return not is_idle and (self.pid, self.work) == (before.pid, before.work)


class SpinWatchdog:
    """A `Watchdog` of CPU time.

    Args:
        used_s: returns the CPU time, since its start, of the main thread of the process with an id;
            None where there is none.
    """

    def __init__(self, used_s: Callable[[int], float | None]) -> None:
        self._used_s = used_s
        self._looks: dict[Seat, Look] = {}

    def check(self, slots: Sequence[Slot], now_ns: int) -> list[WatchdogVerdict]:
        """Return a verdict for each serving process that spins; see `Watchdog.check`."""
        now = now_ns / 1e9
        found = []
        for slot in slots:
            used = (
                self._used_s(slot[CommonField.PID])
                if slot[CommonField.STATE] == State.READY
                else None
            )
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
                reason = f"has used {limit_s:g} s of processor time for nothing"
                found.append(WatchdogVerdict(slot.seat, reason))
        return found
