"""Profiles of a worker's steps, on request: traces for Perfetto and Chrome.

Where torch runs the model its profiler records; the C++ core has none, so there it is told when
steps ran, and nothing within them. A profile ends by itself after so many steps, and of each
worker so many are kept.
"""

import gzip
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.board.admin_requests import START_PROFILE, AdminRequests

MAX_TRACES = 16  # of a worker; the oldest go
SUFFIX = ".trace.json.gz"

log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records steps, from when it is made."""

    max_steps: int  # after which a profile would be too large to be of use

    def took(self, num_tokens: int, began_ns: int, ended_ns: int) -> None:
        """Record a step."""

    def write(self, path: Path) -> None:
        """Stop, and write the trace, compressed."""


class StepTimes:
    """A `Recorder` of when steps ran."""

    max_steps = 20_000

    def __init__(self) -> None:
        self._events: list[dict[str, object]] = []
        log.info("no torch runs this model: the trace will have its steps and nothing within them")

    def took(self, num_tokens: int, began_ns: int, ended_ns: int) -> None:
        """See `Recorder`."""
        self._events.append(
            {
                "name": "step",
                "ph": "X",
                "ts": began_ns / 1000,
                "dur": (ended_ns - began_ns) / 1000,
                "pid": os.getpid(),
                "tid": 0,
                "args": {"tokens": num_tokens},
            }
        )

    def write(self, path: Path) -> None:
        """See `Recorder`."""
        path.write_bytes(gzip.compress(msgspec.json.encode({"traceEvents": self._events})))


def record() -> Recorder:
    """Begin to record by whatever can."""
    if "torch" not in sys.modules:
        return StepTimes()
    from headrace.engine_proc.worker.torch_profile import TorchProfile

    return TorchProfile()


class Profiler:
    """Records a worker's profiles on admin requests.

    Args:
        directory: of the traces; None disables profiles.
        name: the prefix of trace files.
    """

    def __init__(
        self,
        directory: str | None,
        name: str,
        admin_requests: AdminRequests,
        record: Callable[[], Recorder] = record,
    ) -> None:
        self._directory = directory and Path(directory)
        self._name = name
        self._admin_requests = admin_requests
        self._record = record
        self._recorder: Recorder | None = None
        self._num_steps = 0
        self._began_ns = 0

    def look(self) -> None:
        """Begin or end a profile, if an admin request has arrived since the last call."""
        if self._directory:
            wishes = self._admin_requests.take()
            if self._recorder is not None:
                wishes.reverse()  # of both, the one that changes something came first
            for admin_request in wishes:
                self._begin() if admin_request == START_PROFILE else self._end()

    def _begin(self) -> None:
        if self._recorder is None:
            self._recorder, self._num_steps = self._record(), 0
            log.info("profiling %d steps, or until /stop_profile", self._recorder.max_steps)

    def began(self) -> None:
        """Record the begin of a step."""
        if self._recorder is not None:
            self._began_ns = time.monotonic_ns()

    def took(self, num_tokens: int) -> None:
        """Record the end of a step, and end the profile after its last."""
        if self._recorder is None:
            return
        self._recorder.took(num_tokens, self._began_ns, time.monotonic_ns())
        self._num_steps += 1
        if self._num_steps >= self._recorder.max_steps:
            self._end()

    def _end(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        assert isinstance(self._directory, Path)
        path = self._directory / f"{self._name}-{time.time_ns()}{SUFFIX}"
        unfinished = self._directory / f".{path.name}"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            recorder.write(unfinished)
            unfinished.rename(path)
            for old in sorted(self._directory.glob(f"{self._name}-*{SUFFIX}"))[:-MAX_TRACES]:
                old.unlink()
        except OSError as error:
            log.warning("a profile of %d steps is lost: %s", self._num_steps, error)
        else:
            log.info("a profile of %d steps is in %s", self._num_steps, path)
