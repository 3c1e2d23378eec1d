"""Requests that take long are handled by child processes; the loop of their tokenizer goes on.

A child (`offload_process.py`) is started when the first such request comes. There are at most
`MAX_PROCESSES` of them, each with a thread that talks to it. One that has had no request for a
while is ended, and its memory with it. A request that waits for a child is laid aside
(`stages.Check`); a child whose client leaves is ended. A request at which two children die gets a
500, and one that takes too much CPU time or memory a 400.
"""

import logging
import os
import queue
import signal
import subprocess
import threading
from dataclasses import dataclass, field

from headrace.config.config import TokenizerConfig
from headrace.errors import DeadlyRequest, InvalidValue, RequestError
from headrace.ipc.messages import HttpRequest
from headrace.logs import current_request
from headrace.system.machine import memory_limit
from headrace.tokenizer_proc.jobs.child_pipe import ChildPipe
from headrace.tokenizer_proc.jobs.stages import Body, Check, Outcome, Stages
from headrace.tokenizer_proc.offload_process import CPU_S, Handled, Offloaded, Setup

MODULE = "headrace.tokenizer_proc.offload_process"
MAX_PROCESSES = 2
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


class OffloadPool:
    """The children of one tokenizer process, and the requests that wait for them."""

    def __init__(
        self,
        config: TokenizerConfig,
        log_level: str = "info",
        log_format: str = "text",
        max_processes: int = MAX_PROCESSES,
        max_bytes: int | None = None,
    ) -> None:
        self._max_processes = max_processes
        self._max_bytes = max_bytes or int(MEMORY_SHARE * memory_limit())
        self._idle_s = IDLE_S
        title = f"headrace: offload of {os.getpid()}"
        self._setup = Setup(config, title, NICENESS, log_level, log_format)
        self._calls: queue.SimpleQueue[PendingOffload] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_pending = self._num_threads = 0

    def handle(self, request: HttpRequest, body: Body) -> Stages:
        """Return the outcome of a request.

        Raises:
            RequestError: the process that handles it dies.
        """
        call = PendingOffload(request, body)
        with self._lock:
            self._num_pending += 1
            is_short = self._num_pending > self._num_threads < self._max_processes
            self._num_threads += is_short
        self._calls.put(call)
        if is_short:
            threading.Thread(target=self._serve, name="offload", daemon=True).start()
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
        with self._lock:
            call.is_cancelled, call.body = True, b""
            if call.process is not None:
                call.process.kill()

    def _serve(self) -> None:
        """Have requests handled, one after the other, as long as this process lives."""
        child = ChildPipe(MODULE, self._setup, DEADLINE_S, max_bytes=self._max_bytes)
        while True:
            try:
                call = self._calls.get(timeout=self._idle_s if child.process else None)
            except queue.Empty:
                child.end()
                continue
            current_request().id = call.request.request_id
            try:
                found = self._outcome(call, child)
            except OSError as error:  # the system is short of processes, say
                log.warning("%s cannot be started: %s", self._setup.title, error)
                found = DeadlyRequest()
            with self._lock:
                call.process = None
                self._num_pending -= 1
            call.check.found = found

    def _outcome(self, call: PendingOffload, child: ChildPipe) -> Outcome | RequestError:
        for _ in range(MAX_DEATHS):
            with self._lock:
                if call.is_cancelled:
                    break
                call.process = child.start()
            handled = child.ask(Offloaded(call.request, memoryview(call.body)), Handled)
            with self._lock:
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
            if code == -signal.SIGXCPU:
                return InvalidValue(
                    f"the body takes more than {CPU_S} s of CPU time to handle; send less at a time"
                )
        return DeadlyRequest()
