"""Start of a process of the ring, and its end with its parent.

A child is a copy of the supervisor where both start together, which saves it the common imports.
Otherwise it is this package run by a fresh interpreter: what replaces a process takes nothing along
that the supervisor has gathered. Either inherits the board and a note, a memfd with its role,
config and log level.
"""

import contextlib
import ctypes
import gc
import logging
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import msgspec
import setproctitle

from headrace import logs
from headrace.board.board import Board, Seat, Slot, State
from headrace.board.fields import CommonField
from headrace.errors import HeadraceError
from headrace.exit_status import ExitStatus
from headrace.ipc.recorder import Tee
from headrace.ipc.recorder import begin as begin_record
from headrace.ipc.schema_fingerprint import fingerprint
from headrace.logs import LineWriter
from headrace.runtime.forked import go_on, signals_held
from headrace.runtime.heartbeat import Heartbeat
from headrace.runtime.roles import ROLES, title
from headrace.runtime.stack_dumps import StackFile, write_to
from headrace.system.cpu_scheduling import take_turns
from headrace.system.procfs import resident_bytes

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
COLLECT = (2_000, 10, 5)  # objects made between looks at the young; looks between older ones
# Of libgomp, which torch loads: threads that wait for each other spin for some 20 us, then sleep.
# A layer's phases are shorter than it takes to wake a thread. Threads that spin on, as they do by
# default, take the cores of the rest of the ring. See bench/module_threads.py.
SPIN_COUNT = {"GOMP_SPINCOUNT": "5000"}
DRAIN = signal.SIGUSR1  # to a frontend: take no more requests
LEAVE = signal.SIGUSR2  # to a frontend: end when open requests are answered

log = logging.getLogger(__name__)


class LaunchSpec(msgspec.Struct):
    """The launch data that a parent passes to a child."""

    role: str
    index: int
    parent: int
    fingerprint: str
    board_fd: int
    seats: list[Seat]
    log_level: str
    config: bytes
    stacks_fd: int
    record: str | None = None  # the folder of what processes receive
    log_format: str = "text"


@dataclass
class Context:
    """The surroundings of a process: board, seat, logging."""

    seat: Seat
    board: Board
    slot: Slot
    log_level: str
    parent: int
    tee: Tee | None = None  # records what this process receives
    log_format: str = "text"

    @property
    def index(self) -> int:
        """This process's number among those of its role."""
        return self.seat.index

    def ready(self) -> None:
        """Publish that the process serves.

        What lives as long as the process need not be looked at for garbage again, and the young,
        most of them messages, not as often. Connections that have closed are in cycles, and large.

        SIGTERM ends a process without cleanup by the kernel. A Python handler would wait for native
        code, such as an encoder's, and the interpreter for its threads.
        """
        gc.freeze()
        gc.set_threshold(*COLLECT)
        if ROLES[self.seat.role].cleans_up:
            signal.signal(signal.SIGTERM, leave)
        self.slot.enter(State.READY)

    def keep_beating(self) -> Heartbeat:
        """Send heartbeats from a second thread, beside the working one."""
        heartbeat = Heartbeat(self.slot)
        heartbeat.start()
        return heartbeat

    def progress(self) -> list[tuple[int, int]]:
        """Return values that change while this process or one that starts with it loads something.

        A worker that has loaded its share waits for slower ones; it hangs when all do.
        """
        likes = [s for s in self.board.of(self.seat.role) if s[CommonField.STATE] != State.READY]
        return [
            (slot[CommonField.PROGRESS], resident_bytes(slot[CommonField.PID])) for slot in likes
        ]

    @property
    def orphaned(self) -> bool:
        """Whether the parent has died."""
        return os.getppid() != self.parent


class Process(subprocess.Popen[bytes]):
    """A child process, with its stack file."""

    stacks: StackFile


def spawn(
    seat: Seat,
    config: Any,
    board: Board,
    log_level: str,
    pass_fds: tuple[int, ...] = (),
    record: str | None = None,
    log_format: str = "text",
    is_copy: bool = False,
) -> Process:
    """Start the process of `seat`. It dies with the calling process, at the latest.

    Args:
        is_copy: it goes on as a copy of the calling process, not as a fresh interpreter.

    Raises:
        OSError: the system is short of processes, files or memory.
    """
    slot = board.slot(seat.role, seat.index)
    slot.beat()  # from now on it may be missed
    with contextlib.ExitStack() as undo:
        stacks = StackFile.create()
        undo.callback(stacks.close)
        note = LaunchSpec(
            role=seat.role,
            index=seat.index,
            parent=os.getpid(),
            fingerprint=fingerprint(),
            board_fd=board.fd,
            seats=[slot.seat for slot in board.slots],
            log_level=log_level,
            config=msgspec.msgpack.encode(config),
            record=record,
            stacks_fd=stacks.fd,
            log_format=log_format,
        )
        env = {} if "OMP_WAIT_POLICY" in os.environ else SPIN_COUNT
        held = signals_held() if is_copy else contextlib.nullcontext()  # an `exec` keeps the mask
        with written(note) as fd, held:
            fds = (fd, board.fd, stacks.fd, *pass_fds)
            process = Process(
                [sys.executable, "-m", "headrace.runtime", str(fd)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env=env | os.environ,
                start_new_session=True,  # Ctrl-C is for the supervisor, which then ends the others
                restore_signals=not is_copy,
                # It never returns. The call ends as at an `exec`: its pipe is closed.
                preexec_fn=partial(go_on, partial(main, fd), fds, env) if is_copy else None,
            )
        process.stacks = stacks
        undo.pop_all()
    slot[CommonField.PID] = process.pid  # before it says so itself
    return process


@contextlib.contextmanager
def written(note: LaunchSpec) -> Iterator[int]:
    """A file in memory with a note, for a child to inherit."""
    fd = os.memfd_create("headrace-note")
    try:
        os.write(fd, msgspec.msgpack.encode(note))
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def die_with_parent(parent: int, how: signal.Signals) -> None:
    """Have the kernel send this process the signal `how` when its parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, how, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os._exit(ExitStatus.PEER_LOST)


def read_note(fd: int) -> LaunchSpec:
    """Read and close the inherited note."""
    with os.fdopen(fd, "rb") as file:
        return msgspec.msgpack.decode(file.read(), type=LaunchSpec)


def leave(_signal: int, _frame: FrameType | None) -> None:
    """End the process from wherever it waits, `finally` blocks included.

    It may get lost within the callback of a weak reference, say: a second signal ends it at once.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(0)


def end_with_threads(slot: Slot, writer: LineWriter) -> None:
    """From now on, end the process when a thread fails: others wait for its work."""

    def end(failed: threading.ExceptHookArgs) -> None:
        slot.exit_reason = repr(failed.exc_value)
        log.error("unexpected error", exc_info=failed.exc_value)
        try:
            writer.close()
        finally:
            os._exit(ExitStatus.FAILED)

    threading.excepthook = end


def run(note: LaunchSpec, writer: LineWriter) -> None:
    """Run the process of a `note`; `writer` writes its log."""
    role = ROLES[note.role]
    seat = Seat(note.role, note.index)
    os.nice(role.niceness)
    take_turns(role.is_urgent)
    board = Board(note.board_fd, note.seats)
    slot = board.slot(note.role, note.index)
    write_to(note.stacks_fd)
    slot[CommonField.STACKS_FD] = note.stacks_fd
    slot.enter(State.STARTING)
    writer.keep = slot.keep_line
    end_with_threads(slot, writer)
    tee = None
    if note.record is not None:
        name = f"{note.role}-{note.index}"
        tee = begin_record(note.record, name, msgspec.msgpack.encode(note))
    context = Context(seat, board, slot, note.log_level, note.parent, tee, note.log_format)
    # Until it serves, the kernel ends it: Python drops what `leave` raises within a callback, such
    # as there is after each import. A frontend has to sweep up, whenever it ends.
    if role.death_signal == signal.SIGTERM:
        signal.signal(signal.SIGTERM, leave)
    die_with_parent(note.parent, role.death_signal)
    config = msgspec.msgpack.decode(note.config, type=role.config)
    try:
        pkgutil.resolve_name(role.main)(config, context)
    except HeadraceError as error:
        slot.exit_reason = str(error)
        if slot.exit_reason != str(error):  # too long for the board
            log.error("%s", error)
        sys.exit(error.exit_status)
    except Exception as error:
        slot.exit_reason = repr(error)
        if isinstance(error, OSError | MemoryError) and slot[CommonField.STATE] == State.STARTING:
            slot.exit_reason = str(error)
            sys.exit(ExitStatus.SHORT_OF)
        log.exception("unexpected error")
        sys.exit(ExitStatus.FAILED)


def main(fd: int) -> None:
    """Run the process whose note is the descriptor `fd`."""
    note = read_note(fd)
    name = title(note.role, note.index)
    setproctitle.setproctitle(name)
    writer = logs.setup(name.removeprefix("headrace: "), note.log_level, note.log_format)
    if note.fingerprint != fingerprint():
        log.error("the code on disk has changed since the server started; restart the server")
        sys.exit(ExitStatus.HOPELESS)
    try:
        run(note, writer)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is leaving, with its last lines
