"""Watchdogs: each finds processes that only a restart can help, and says why.

`HangWatchdog` judges heartbeats, `SpinWatchdog` CPU time, `MemoryWatchdog` memory. All are pure:
the clock and the readers of `/proc` are passed in. `/health` reports a late step or heartbeat
earlier than a watchdog acts (`Slot.unhealthy_reason`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace.board.board import Seat, Slot, State
from headrace.board.fields import CommonField
from headrace.runtime.heartbeat import MAX_WORK_S
from headrace.runtime.wake_clock import WakeClock

STARTING_S = 120.0  # for a start; a process that takes longer beats meanwhile (`heartbeat.py`)
# Of CPU time of the working thread without progress. One piece of work that a heartbeat covers
# may take that.
CEILINGS_S = {
    **dict.fromkeys(("frontend", "engine", "detokenizer", "fetcher", "telemetry"), 60.0),
    **dict.fromkeys(("placement", "stage"), 60.0),
    **dict.fromkeys(("tokenizer", "worker", "vision", "kv_store"), MAX_WORK_S),
}
IDLE_SHARE = 0.1  # of a core: a process that uses less waits for work
SHORTEST_S = 0.1  # between looks: the kernel counts in ticks of 10 ms
# Of the machine's memory, or the container's, per process of a role.
MEMORY_SHARES = {
    "frontend": 0.25,
    "tokenizer": 0.25,
    "detokenizer": 0.25,
    "engine": 0.5,
    "worker": 0.95,
    "vision": 0.5,
    "kv_store": 0.25,
    "fetcher": 0.25,
    "telemetry": 0.25,
    "placement": 0.25,
    "stage": 0.25,
}


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
    """A `Watchdog` of processes that spin: they use CPU time and make no progress.

    A heartbeat shows that a loop runs, not that it does work. A process that is woken without end
    for an event that it does not take still beats, and keeps a core from the others.

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


class MemoryWatchdog:
    """A `Watchdog` of processes with too much memory of their own.

    Without it, the kernel kills the largest process when memory runs out: the worker, even where
    another process has grown.

    Args:
        memory_bytes: of the machine.
        resident_bytes: returns the memory of the process with an id, files included. That is read
            in a tenth of the time.
        own_bytes: returns its memory without files; None where there is none.
    """

    def __init__(
        self,
        memory_bytes: int,
        resident_bytes: Callable[[int], int],
        own_bytes: Callable[[int], int | None],
    ) -> None:
        self._bytes = {role: int(share * memory_bytes) for role, share in MEMORY_SHARES.items()}
        self._resident_bytes = resident_bytes
        self._own_bytes = own_bytes

    def check(self, slots: Sequence[Slot], now_ns: int) -> list[WatchdogVerdict]:
        """Return a verdict for each serving process above its share; see `Watchdog.check`."""
        found = []
        for slot in slots:
            limit, pid = self._bytes[slot.seat.role], slot[CommonField.PID]
            if slot[CommonField.STATE] != State.READY or self._resident_bytes(pid) <= limit:
                continue
            has = self._own_bytes(pid)
            if has is not None and has > limit:
                reason = f"has {has >> 20} MiB of memory, more than its {limit >> 20}"
                found.append(WatchdogVerdict(slot.seat, reason))
        return found
