"""Stacks of a process's Python threads, on request, and when a signal ends it.

Each process has a file in memory to which the interpreter writes them, whatever the process is busy
with. Its parent holds the file too, so that it outlives the process; other processes of the ring
find it by the board.
"""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Iterator
from fcntl import F_SETFL, fcntl

from headrace.board.board import Seat, Slot, State
from headrace.board.fields import CommonField

ASK = signal.SIGQUIT  # has a process write; it is not stopped by it, nor its system calls
POLL_INTERVAL_S = 0.01  # between looks at whether a file is complete: it has not grown
MAX_POLLS = 100  # of all processes together; a stopped one does not answer
MAX_BYTES = 16 << 10  # of a process
NAME = "headrace-stacks"
ALIVE = (State.STARTING, State.READY)


class StackFile:
    """A process's file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> "StackFile":
        """Make an empty one, for a child to inherit."""
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        fcntl(fd, F_SETFL, os.O_APPEND)
        return cls(fd)

    @classmethod
    def of(cls, slot: Slot) -> "StackFile | None":
        """Open that of the process in a seat; None where there is none."""
        path = f"/proc/{slot[CommonField.PID]}/fd/{slot[CommonField.STACKS_FD]}"
        try:  # a later process with the same id has no such file
            if slot[CommonField.STATE] not in ALIVE or not os.readlink(path).startswith(
                f"/memfd:{NAME}"
            ):
                return None
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            return None

    def take(self) -> str:
        """Return the content, truncated at the end, and empty the file."""
        data = os.pread(self.fd, MAX_BYTES, 0)
        os.ftruncate(self.fd, 0)
        return data.decode(errors="replace")

    @property
    def size(self) -> int:
        """Number of bytes written."""
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)


def write_to(fd: int) -> None:
    """Have the stacks of this process written to `fd` when it is asked, or a signal ends it."""
    faulthandler.enable(fd)
    faulthandler.register(ASK, fd)


def stacks_of(slots: Iterable[Slot]) -> dict[Seat, str]:
    """Ask processes for their stacks; one without a dump after `MAX_POLLS` is left out."""
    with asked(slots) as files:
        return {seat: text for seat, file in files.items() if (text := file.take())}


def write_last(slot: Slot) -> None:
    """Write the stacks of a process that is about to be killed to its file."""
    with asked([slot]):
        pass


@contextlib.contextmanager
def asked(slots: Iterable[Slot]) -> Iterator[dict[Seat, StackFile]]:
    """Request stacks and wait for them, for a limited number of polls.

    The limit is no clock time: on a machine that stands still no process can answer.
    """
    with contextlib.ExitStack() as opened:
        files = {}
        for slot in slots:
            file = StackFile.of(slot)
            if file is not None:
                opened.callback(file.close)
                file.take()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(slot[CommonField.PID], ASK)
                    files[slot.seat] = file
        before, sizes = [0], [file.size for file in files.values()]
        for _ in range(MAX_POLLS):
            if 0 not in sizes and sizes == before:
                break
            time.sleep(POLL_INTERVAL_S)
            before, sizes = sizes, [file.size for file in files.values()]
        yield files
