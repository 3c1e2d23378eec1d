"""Requests that take long are handled by child processes; the loop of their tokenizer goes on.

A child (`offload_process.py`) is started when the first such request comes. Each has a thread that
talks to it. The last one takes small bodies only, so these wait for no large one. On two cores
there is one other: with two at large bodies no core is left for what is short. A child that has had
no request for a while is ended, and its memory with it. A request that waits for a child is laid
aside (`stages.Check`); a child whose client leaves is ended. A request at which two children die
gets a 500, and one that takes too much CPU time or memory a 400.
"""

import logging
import os
import signal
import subprocess
import threading
from dataclasses import dataclass, field

from headrace.config.process_configs import TokenizerConfig
from headrace.errors import DeadlyRequest, InvalidValue, RequestError
from headrace.ipc.messages import HttpRequest
from headrace.logs import current_request
from headrace.system.machine import memory_limit, usable_cores
from headrace.tokenizer_proc.jobs.child_pipe import ChildPipe
from headrace.tokenizer_proc.jobs.stages import Body, Check, Outcome, Stages
from headrace.tokenizer_proc.offload_process import CPU_S, Handled, Offloaded, Setup

MODULE = "headrace.tokenizer_proc.offload_process"
MAX_PROCESSES = 3  # the last takes small bodies only
SMALL_BYTES = 1 << 20  # of a body; its tokens take a quarter of a second
MAX_DEATHS = 2  # at one request
DEADLINE_S = 300.0  # for an outcome, of a process that may hang
IDLE_S = 60.0  # after which a process is ended
MEMORY_SHARE = 0.25  # of the machine's memory, or the container's, per process: as a tokenizer has
NICENESS = 5  # beside its parent's

log = logging.getLogger(__name__)


@dataclass(eq=False)
class PendingOffload:
    """A request that is handled by a child."""

    request: HttpRequest
    body: Body
    check: Check[Outcome | RequestError] = field(default_factory=Check)
    process: "subprocess.Popen[bytes] | None" = None  # that is at it
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.is_small = len(self.body) < SMALL_BYTES


class OffloadPool:
    """The children of one tokenizer process, and the requests that wait for them."""

    def __init__(
        self,
        config: TokenizerConfig,
        log_level: str = "info",
        log_format: str = "text",
        max_bytes: int | None = None,
    ) -> None:
        self._max_processes = max(2, min(MAX_PROCESSES, usable_cores()))
        self._max_bytes = max_bytes or int(MEMORY_SHARE * memory_limit())
        self._idle_s = IDLE_S
        title = f"headrace: offload of {os.getpid()}"
        self._setup = Setup(config, title, NICENESS, log_level, log_format)
        self._waiting: list[PendingOffload] = []
        self._changed = threading.Condition()  # of all that follow, and of every pending request
        self._num_threads = self._num_pending = 0

    def handle(self, request: HttpRequest, body: Body) -> Stages:
        """Return the outcome of a request.

        Raises:
            RequestError: the process that handles it dies.
        """
        call = PendingOffload(request, body)
        with self._changed:
            self._waiting.append(call)
            self._num_pending += 1
            if self._num_pending > self._num_threads < self._max_processes:
                self._num_threads += 1
                takes_large = (self._num_threads < self._max_processes,)
                threading.Thread(target=self._serve, args=takes_large, daemon=True).start()
            self._changed.notify_all()
        try:
            yield call.check
        finally:
            self._cancel(call)
        found = call.check.found
        assert found is not None
        if isinstance(found, RequestError):
            raise found
        return found

    def _cancel(self, call: PendingOffload) -> None:
        """Leave a request, if it is unfinished."""
        with self._changed:
            call.is_cancelled, call.body = True, b""
            if call.process is not None:
                call.process.kill()

    def _next(self, takes_large: bool, timeout_s: float | None) -> PendingOffload | None:
        """Take the request that came first of those a child takes; None after a time without."""
        with self._changed:
            self._changed.wait_for(lambda: self._index(takes_large) is not None, timeout_s)
            index = self._index(takes_large)
            return None if index is None else self._waiting.pop(index)

    def _index(self, takes_large: bool) -> int | None:
        fitting = (i for i, one in enumerate(self._waiting) if takes_large or one.is_small)
        return next(fitting, None)

    def _serve(self, takes_large: bool) -> None:
        """Have requests handled, one after the other, as long as this process lives."""
        child = ChildPipe(MODULE, self._setup, DEADLINE_S, max_bytes=self._max_bytes)
        while True:
            call = self._next(takes_large, self._idle_s if child.process else None)
            if call is None:
                child.end()
                continue
            current_request().id = call.request.request_id
            try:
                found = self._outcome(call, child)
            except OSError as error:  # the system is short of processes, say
                log.warning("%s cannot be started: %s", self._setup.title, error)
                found = DeadlyRequest()
            with self._changed:
                call.process = None
                self._num_pending -= 1
            call.check.found = found

    def _outcome(self, call: PendingOffload, child: ChildPipe) -> Outcome | RequestError:
        for _ in range(MAX_DEATHS):
            with self._changed:
                if call.is_cancelled:
                    break
                call.process = child.start()
            handled = child.ask(Offloaded(call.request, memoryview(call.body)), Handled)
            with self._changed:
                call.process = None
            if handled is not None:
                return handled.outcome
            code = child.end()
            if call.is_cancelled:
                break
            log.warning("%s died at a request: exit code %s", self._setup.title, code)
            if child.is_too_large:
                return InvalidValue(
                    f"the body takes more than {self._max_bytes >> 20} MiB of memory to handle; "
                    "send less at a time"
                )
            if code in (-signal.SIGXCPU, -signal.SIGPROF):
                return InvalidValue(
                    f"the body takes more than {CPU_S} s of CPU time to handle; send less at a time"
                )
        return DeadlyRequest()
