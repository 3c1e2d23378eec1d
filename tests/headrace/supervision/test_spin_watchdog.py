"""Processes that spin without progress are found."""

import os
from itertools import count

import pytest

from headrace.board.board import Board, Seat, Slot, State
from headrace.board.fields import FIELDS, CommonField, FrontendField
from headrace.runtime.heartbeat import MAX_WORK_S
from headrace.runtime.roles import ROLES
from headrace.supervision.watchdog import CEILINGS_S, IDLE_SHARE, SpinWatchdog
from headrace.system.procfs import busy_seconds

POLL_INTERVAL_S = 0.5


def slot_of(role: str) -> Slot:
    slot = Board.create([Seat(role, 0)]).slots[0]
    slot.enter(State.STARTING)
    slot.enter(State.READY)
    return slot


class Watched:
    """A process that uses so much of a core, and is looked at."""

    def __init__(self, role: str, share: float = 1.0) -> None:
        self.slot = slot_of(role)
        self.share = share
        self.used_s = 100.0
        self._spin_watchdog = SpinWatchdog(lambda _: self.used_s)
        self._now = 0.0

    def look_again(self, seconds: float) -> None:
        """Look so soon that the kernel has counted nothing."""
        self._now += seconds
        assert self._spin_watchdog.check([self.slot], int(self._now * 1e9)) == []

    def told(self, seconds: float) -> list[str]:
        """Let it work for so long, and return what is said of it meanwhile."""
        said = []
        for _ in range(round(seconds / POLL_INTERVAL_S)):
            self._now += POLL_INTERVAL_S
            self.used_s += self.share * POLL_INTERVAL_S
            passed = self._spin_watchdog.check([self.slot], int(self._now * 1e9))
            assert all(seat == self.slot.seat for seat, _ in passed)
            said += [why for _, why in passed]
        return said


def test_there_is_a_ceiling_for_every_role() -> None:
    assert CEILINGS_S.keys() == ROLES.keys()
    assert max(CEILINGS_S.values()) <= MAX_WORK_S


@pytest.mark.parametrize("role", ROLES)
def test_spinning_process_is_reported(role: str) -> None:
    watched, limit_s = Watched(role), CEILINGS_S[role]
    assert watched.told(limit_s + POLL_INTERVAL_S) == []  # its first look is where counting begins
    assert watched.told(POLL_INTERVAL_S) == [
        f"has used {limit_s:g} s of processor time for nothing"
    ]


@pytest.mark.parametrize("role", ROLES)
def test_working_process_may_use_any_cpu_time(role: str) -> None:
    watched, numbers = Watched(role), count(1)
    for _ in range(4):
        assert watched.told(CEILINGS_S[role] - POLL_INTERVAL_S) == []
        watched.slot[next(iter(FIELDS[role]))] = next(numbers)


def test_idle_time_resets_the_spin_watchdog() -> None:
    watched = Watched("engine")
    for _ in range(3):
        watched.share = 1.0
        assert watched.told(CEILINGS_S["engine"]) == []
        watched.share = IDLE_SHARE / 2
        assert watched.told(POLL_INTERVAL_S) == []
    assert watched.told(100 * CEILINGS_S["engine"]) == [], "to be idle is no crime"


def test_working_process_is_not_idle_between_kernel_ticks() -> None:
    watched, limit_s = Watched("engine"), CEILINGS_S["engine"]
    for _ in range(round(limit_s / POLL_INTERVAL_S) + 1):
        assert watched.told(POLL_INTERVAL_S) == []
        watched.look_again(0.004)
    assert watched.told(POLL_INTERVAL_S) == [
        f"has used {limit_s:g} s of processor time for nothing"
    ]


def test_watch_restarts_for_successors_and_skips_non_serving() -> None:
    watched = Watched("frontend")
    assert watched.told(CEILINGS_S["frontend"]) == []
    watched.slot[CommonField.PID] += 1
    assert watched.told(CEILINGS_S["frontend"]) == []
    watched.slot[CommonField.STATE] = State.STARTING
    assert watched.told(3 * CEILINGS_S["frontend"]) == []


def test_what_is_late_on_an_event_loop_is_nothing_done() -> None:
    slot = slot_of("frontend")
    before = slot.work
    slot[FrontendField.LAG_NS] = 1
    slot.beat()
    assert slot.work == before
    slot[FrontendField.ANSWERED] = 1
    assert slot.work != before


def test_the_time_of_the_main_thread_is_the_kernels() -> None:
    before = busy_seconds(os.getpid())
    assert before is not None
    while busy_seconds(os.getpid()) == before:
        pass
    assert busy_seconds(2**22 + 1) is None
