"""How a worker's end is told."""

import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField
from headrace.engine_proc.child_processes.child_process import END_S, ChildProcess, WorkerDied
from headrace.exit_status import ExitStatus
from headrace.supervision.watchdog import HangWatchdog


@pytest.mark.parametrize(
    ("state", "how"),
    [(State.STARTING, "could not start: no room"), (State.READY, "exited with 5: no room")],
)
def test_out_of_memory_is_reported_before_and_after_the_start(state: State, how: str) -> None:
    slot = Board.create([Seat("worker", 1)]).slot("worker", 1)
    slot.enter(state)
    slot.exit_reason = "no room"
    child: ChildProcess[Any, Any] = ChildProcess.__new__(ChildProcess)
    process: Any = SimpleNamespace(poll=lambda: ExitStatus.SHORT_OF.value, pid=5)
    child._slot, child._hang_watchdog, child._process = slot, HangWatchdog(8), process
    with pytest.raises(WorkerDied) as death:
        child.check()
    assert str(death.value) == f"worker 1 {how}"
    assert (death.value.rank, death.value.exit_status) == (1, ExitStatus.SHORT_OF)


@pytest.mark.parametrize(("harmed", "is_chaos"), [(5, True), (4, False)])
def test_chaos_is_named_for_its_victim_not_for_the_successor(harmed: int, is_chaos: bool) -> None:
    slot = Board.create([Seat("worker", 0)]).slot("worker", 0)
    slot.enter(State.READY)
    slot[CommonField.HARMED_PID] = harmed
    child: ChildProcess[Any, Any] = ChildProcess.__new__(ChildProcess)
    process: Any = SimpleNamespace(poll=lambda: -signal.SIGKILL, pid=5)
    child._slot, child._hang_watchdog, child._process = slot, HangWatchdog(8), process
    with pytest.raises(WorkerDied, match="worker 0 was killed by SIGKILL") as death:
        child.check()
    assert death.value.is_from_outside == is_chaos


def test_a_process_that_a_driver_keeps_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    slot = Board.create([Seat("worker", 0)]).slot("worker", 0)
    child: ChildProcess[Any, Any] = ChildProcess.__new__(ChildProcess)
    asked: list[float] = []

    def wait(timeout: float) -> None:
        asked.append(timeout)
        raise subprocess.TimeoutExpired("worker", timeout)

    stacks = SimpleNamespace(close=lambda: None)
    process: Any = SimpleNamespace(kill=lambda: None, wait=wait, stacks=stacks)
    child._slot, child._process = slot, process
    child.stop()
    assert asked == [END_S]
    assert "worker 0 was killed, and does not end" in caplog.text
    assert slot[CommonField.STATE] == State.DEAD
