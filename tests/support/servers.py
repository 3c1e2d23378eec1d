"""Starting real servers, and looking at them from outside."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import httpx
import psutil
from opened import OPENED
from readable import readable

T = TypeVar("T")
Answer = TypeVar("Answer")

START_S = 300
PATIENCE_S = 120.0  # for what takes a second or two on idle cores
MAX_SHOWN = 8_000  # characters of a log, beside a failure
POLL_INTERVAL_S = 0.02  # of effects that no server announces: it needs the cores
URL = re.compile(r" on (http\S+) \(ready")


class StartFailed(Exception):
    """The server ended before it served; the text is its standard error."""

    def __init__(self, log: str, exit_status: int) -> None:
        super().__init__(log)
        self.exit_status = exit_status


WITHOUT_TORCH = {"PYTHONPATH": str(Path(__file__).parent / "without_torch")}
# Of a server whose processes a test suspends: it may take as long as it likes.
HELD = ("--watchdog-timeout", "600")


class RunningServer:
    """A `launch_server` process and what belongs to it."""

    ready = URL  # in its log, with its address

    def __init__(
        self, *args: str, env: dict[str, str] | None = None, under: Sequence[str] = ()
    ) -> None:
        """Start and wait until the server is ready, or raise `StartFailed`.

        It runs on the CPU unless `args` say otherwise, on machines with a GPU, too. `under` is a
        command that becomes another, the one that comes after it.
        """
        launch = str(Path(sys.executable).parent / "launch_server")
        command = [*under, launch, "--port", "0", "--device", "cpu", *args]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, env={**os.environ, **(env or {})}
        )
        OPENED.close_with_owner(self._kill)
        OPENED.show_at_failure(f"log of server {self.process.pid}", self._log_so_far)
        self.log = ""
        match = None
        deadline = time.monotonic() + START_S
        while match is None:
            self.read_log(deadline)
            match = self.ready.search(self.log)
        self.url = match[1]

    def read_log(self, deadline: float) -> None:
        """Read standard error; raise at its end and at the deadline."""
        assert self.process.stderr is not None
        ready = readable([self.process.stderr], deadline - time.monotonic())
        data = os.read(self.process.stderr.fileno(), 65536) if ready else b""
        self.log += data.decode()
        if not data:
            if not ready:
                self.process.kill()
            self.process.communicate()
            raise StartFailed(self.log, self.process.returncode)

    def _log_so_far(self) -> str:
        """Return the end of the log, with what has been written and not read."""
        assert self.process.stderr is not None
        stderr = self.process.stderr
        while not stderr.closed and readable([stderr], 0):
            data = os.read(stderr.fileno(), 65536)
            if not data:
                break
            self.log += data.decode(errors="replace")
        return self.log[-MAX_SHOWN:]

    @property
    def ring(self) -> dict[str, psutil.Process]:
        """The processes that the supervisor keeps, by title; not their children on demand."""
        return {title: one for title, one in self.processes.items() if " of " not in title}

    @property
    def processes(self) -> dict[str, psutil.Process]:
        """All processes of the server that have begun and not ended, by title."""
        supervisor = psutil.Process(self.process.pid)
        found = {}
        for process in [supervisor, *supervisor.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                found |= {title: process for title in process.cmdline()[:1]}
        return found

    def metrics(self) -> str:
        """Return the page of `/metrics`, of this moment or later.

        While a tokenizer is behind, the server answers with one that is some seconds old.
        """
        began = time.monotonic()
        page = ""

        def is_of_now() -> bool:
            nonlocal page
            asked = time.monotonic()
            answer = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S)
            page = answer.text
            return asked - began >= int(answer.headers.get("age", -1)) + 1

        wait_until(is_of_now, "metrics of this moment")
        return page

    def metric(self, name: str) -> float:
        """Return a metric's value, summed over processes."""
        text = self.metrics()
        values = re.findall(rf"^headrace:{name}{{.*}} (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name} in\n{text}"
        return sum(float(value) for value in values)

    def settle(self) -> None:
        """Wait until this request is the only one: all that was done before has been counted."""
        wait_until(lambda: self.metric("http_requests_open") == 1, "no other request is open")
        for name in ("num_requests_waiting", "num_requests_running", "replies_open"):
            wait_until(lambda name=name: self.metric(name) == 0, name)  # type: ignore[misc]

    def await_free(self, what: str) -> None:
        """Wait until a whole resource, such as `kv_pages`, is free: an open step may hold some."""

        def are_free() -> bool:
            return self.metric(f"{what}_free") == self.metric(what) > 0

        wait_until(are_free, f"{what} are free")

    def ask_together(self, ask: Callable[[T], Answer], what: Sequence[T]) -> list[Answer]:
        """Return the answers to requests that run beside each other, however slowly they come.

        No step is computed until all are open. It takes a server that is `HELD`, has one worker,
        and has no other client.
        """
        worker = self.ring["headrace: worker 0"]
        with ThreadPoolExecutor(len(what)) as pool:
            worker.suspend()
            try:
                asking = [pool.submit(ask, one) for one in what]
                num_open = len(what) + 1
                wait_until(lambda: self.metric("http_requests_open") == num_open, "all have asked")
            finally:
                worker.resume()
            return [one.result() for one in asking]

    def stop(self) -> int:
        """Interrupt it as Ctrl-C does and return its exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def close(self) -> None:
        """Leave nothing of it, whatever became of it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        assert self.process.stderr is not None
        if not self.process.stderr.closed:
            self.wait()

    def _kill(self) -> None:
        """End what a test that failed has left."""
        assert self.process.stderr is not None
        if not self.process.stderr.closed:
            kill_tree(self.process)

    def wait(self) -> int:
        """Wait for its end, with output until then in `log`; return its exit status."""
        self.log += self.process.communicate(timeout=PATIENCE_S)[1].decode()
        return self.process.returncode


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """End a process and its descendants: a suspended one would hold its pipes open."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for one in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.communicate(timeout=PATIENCE_S)


def shared_memory_files() -> set[str]:
    """Return the names in /dev/shm, without those of tests that run beside this one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("headrace-fuzz-")}


def survivors(ring: Iterable[psutil.Process]) -> list[str]:
    """Return the processes of a ring that have not ended in time.

    A zombie has ended; its adoptive parent has not reaped it yet.
    """

    def left() -> list[str]:
        names = []
        for process in ring:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    names.append(process.name())
        return names

    with contextlib.suppress(TimeoutError):
        wait_until(lambda: not left(), "all have ended")
    return left()


def wait_until(predicate: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll for an effect that a server does not announce."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(POLL_INTERVAL_S)
