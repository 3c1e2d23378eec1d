"""What other processes are at, asked while they live and read when they are dead."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField
from headrace.runtime import stack_dumps as stacks_module
from headrace.runtime.stack_dumps import StackFile, stacks_of, write_last

CODE = """
import sys, threading
from headrace.runtime.stack_dumps import write_to
write_to(int(sys.argv[1]))
def wait_for_godot(): print("ready", flush=True); sys.stdin.read()
threading.Thread(target=wait_for_godot).start()
"""


class Child:
    """A process in a seat of a board, and its file."""

    def __init__(self) -> None:
        self.file = StackFile.create()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(self.file.fd)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self.file.fd,),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self.slot = Board.create([Seat("worker", 0)]).slot("worker")
        self.slot[CommonField.PID], self.slot[CommonField.STACKS_FD] = (
            self.process.pid,
            self.file.fd,
        )
        self.slot[CommonField.STATE] = State.READY


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child()
    yield made
    made.process.kill()
    made.process.communicate()
    made.file.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen the wait for stacks, for busy machines."""
    monkeypatch.setattr(stacks_module, "MAX_POLLS", 300)
    monkeypatch.setattr(stacks_module, "POLL_INTERVAL_S", 0.2)


@pytest.mark.usefixtures("patient")
def test_a_process_reports_the_stack_of_each_thread(child: Child) -> None:
    for _ in range(2):
        (text,) = stacks_of([child.slot]).values()
        assert text.count("most recent call first") == 2
        assert "in wait_for_godot" in text
    assert child.process.poll() is None
    assert child.file.take() == "", "a read dump is cleared"


@pytest.mark.usefixtures("patient")
def test_stack_dumps_survive_a_machine_that_stood_still(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine stands still, from when the question is asked to long after."""
    clock, sleep = time.monotonic, time.sleep
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600 * asleep)
    asleep = 0

    def wake_up(seconds: float) -> None:
        nonlocal asleep
        asleep += 1
        sleep(seconds if asleep > 1 else 0)

    monkeypatch.setattr(time, "sleep", wake_up)
    assert child.slot.seat in stacks_of([child.slot])


def test_stopped_process_gives_no_stack_dump(child: Child) -> None:
    child.process.send_signal(signal.SIGSTOP)
    assert stacks_of([child.slot]) == {}


def test_dead_or_foreign_pid_gets_no_signal(child: Child) -> None:
    child.slot[CommonField.STATE] = State.DEAD
    assert stacks_of([child.slot]) == {}
    child.slot[CommonField.STATE], child.slot[CommonField.PID] = State.READY, os.getppid()
    assert stacks_of([child.slot]) == {}, "the parent has no such file; it would die of the signal"


@pytest.mark.usefixtures("patient")
def test_what_it_was_at_outlives_a_process(child: Child) -> None:
    write_last(child.slot)
    child.process.kill()
    child.process.wait()
    assert "in wait_for_godot" in child.file.take()


def test_signal_that_ends_a_process_is_logged_with_its_stacks(child: Child) -> None:
    child.process.send_signal(signal.SIGSEGV)
    assert child.process.wait() == -signal.SIGSEGV
    text = child.file.take()
    assert text.startswith("Fatal Python error: Segmentation fault\n")
    assert "in wait_for_godot" in text
