"""A child process of the engine, with a channel in each direction."""

import logging
import os
import signal
import subprocess
import time
from typing import Any, Generic, NoReturn, TypeVar

from headrace.board.board import Slot, State
from headrace.board.fields import CommonField
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.errors import HeadraceError
from headrace.exit_status import CAUSES, ExitStatus, ending
from headrace.ipc.messages import Message
from headrace.runtime.process import Context, spawn
from headrace.runtime.stack_dumps import write_last
from headrace.supervision.crash_reports import CrashReports
from headrace.supervision.watchdog import HangWatchdog

log = logging.getLogger(__name__)

Ask = TypeVar("Ask", bound=Message)
Answer = TypeVar("Answer", bound=Message)


# Of a process that died, that another one's log keeps: its slot has room for 8 KiB.
LOG_CHARS, STACK_CHARS = 3000, 5000
END_S = 10.0  # for processes that were killed; those that a driver holds take longer, or for ever
# Of these a process dies by its own fault: it may have written where it should not.
FAULTS = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
)


class WorkerDied(HeadraceError):
    """A process has ended on its own; or `is_chaos` has ended it, on purpose.

    Args:
        rank: the index of its seat, among those of all models.

    Attributes:
        has_lost_node: it is in the seat of another machine's, which is out of reach.
        is_from_outside: no sequence is the reason.
    """

    def __init__(
        self, message: str, rank: int = 0, code: int = -signal.SIGKILL, is_chaos: bool = False
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.has_lost_node = code == ExitStatus.NODE_LOST
        self.is_from_outside = is_chaos or self.has_lost_node
        self.has_reason = code in CAUSES
        self.exit_status = ExitStatus(code) if code in CAUSES else ExitStatus.HOPELESS
        # Pages are given up, too, where they have taken the memory that a worker needs.
        self.keeps_pages = -code not in FAULTS and self.exit_status is not ExitStatus.SHORT_OF


class ChildProcess(Generic[Ask, Answer]):
    """One process, from its start to its end.

    Args:
        config: for the process, with the descriptors of the channels and of all `fds`.
        stuck_s: for how long it may be silent, in seconds.
    """

    def __init__(
        self,
        context: Context,
        slot: Slot,
        config: Any,
        channels: tuple[StepChannel[Ask], StepChannel[Answer]],
        fds: tuple[int, ...],
        stuck_s: float,
    ) -> None:
        self._slot = slot
        self._hang_watchdog = HangWatchdog(stuck_s)
        self._asks, self._answers = channels
        slot.exit_reason = ""
        pass_fds = (self._asks.fd, self._answers.fd, *fds)
        self._process = spawn(
            slot.seat,
            config,
            context.board,
            context.log_level,
            pass_fds,
            log_format=context.log_format,
        )
        os.close(self._asks.fd)  # the child has its own, and we have the memory
        os.close(self._answers.fd)

    def send(self, message: Ask) -> None:
        """Hand something over."""
        self._asks.send(message)

    def receive(self, timeout_s: float) -> Answer | None:
        """Return its next message, if one arrives within `timeout_s`."""
        return self._answers.receive(timeout_s)

    @property
    def is_ready(self) -> bool:
        """Whether it has reported that it serves."""
        return self._slot[CommonField.STATE] == State.READY

    @property
    def has_lost_a_peer(self) -> bool:
        """Whether it has ended since another has."""
        return self._process.poll() == ExitStatus.PEER_LOST

    def check(self, but_for_peers: bool = False) -> None:
        """Raise `WorkerDied` if it has ended, with its last words, or is stuck.

        Args:
            but_for_peers: and not since another has ended.
        """
        rank, is_chaos = (
            self._slot.seat.index,
            self._slot[CommonField.HARMED_PID] == self._process.pid,
        )
        for _, reason in self._hang_watchdog.check([self._slot], time.monotonic_ns()):
            self.give_up(reason)
        code = self._process.poll()
        if code is not None and not (but_for_peers and code == ExitStatus.PEER_LOST):
            how = "could not start" if code in CAUSES and not self.is_ready else ending(code)
            why = self._slot.exit_reason
            message = f"{self._slot.seat} {how}{f': {why}' if why else ''}"
            raise WorkerDied(message, rank, code, is_chaos)

    def give_up(self, reason: str) -> NoReturn:
        """Raise `WorkerDied`: it is to be ended.

        Args:
            reason: a predicate, such as "is stuck".
        """
        write_last(self._slot)
        is_chaos = self._slot[CommonField.HARMED_PID] == self._process.pid
        seat = self._slot.seat
        raise WorkerDied(f"{seat} {reason}", seat.index, is_chaos=is_chaos)

    def make_crash_report(
        self, crash_reports: CrashReports, death: WorkerDied, requests: list[int]
    ) -> None:
        """Write a crash report of its death."""
        self._slot[CommonField.STATE] = State.DEAD
        how = str(death).removeprefix(f"{self._slot.seat} ")
        self._slot.last_death.record(self._process.pid, how)
        crash_reports.make(self._slot, str(death), self._process.stacks.take(), requests)

    def last_output(self) -> str:
        """Return the end of its log, and the beginning of its stacks where they were written."""
        return self._slot.log_tail[-LOG_CHARS:] + self._process.stacks.take()[:STACK_CHARS]

    def stop(self) -> None:
        """End it at once: it holds nothing that is not rebuilt."""
        self.kill()
        self.join(END_S)

    def kill(self) -> None:
        """Begin to end it; `join` has to follow."""
        self._process.kill()

    def join(self, timeout_s: float) -> None:
        """Wait until it has ended, but not for ever: a driver that hangs keeps a process."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.error("%s was killed, and does not end; a driver may keep it", self._slot.seat)
        self._process.stacks.close()
        self._slot[CommonField.STATE] = State.DEAD
