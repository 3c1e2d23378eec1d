"""Stage process: has the worker of a pipeline's stage for a server on another machine.
In: ToStage (engine_proc), FromWorker (engine_proc).  Out: FromStage, ToWorker, HiddenFrame."""

import logging
import os
import time
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from headrace.board.admin_requests import PROFILE, note_counts
from headrace.board.fields import StageField
from headrace.config.process_configs import ExecutionConfig, StageConfig
from headrace.config.weight_files import sampled_digest
from headrace.engine_proc.stages.stage_run import RunEnded, StageRun
from headrace.exit_status import ExitStatus
from headrace.ipc.curve_key import read_key
from headrace.ipc.curve_links import CurveListener
from headrace.ipc.remote_messages import (
    HiddenFrame,
    StageGrant,
    StageStatus,
    ToStage,
    WorkerInput,
    differences,
)
from headrace.ipc.schema_fingerprint import code_version
from headrace.ipc.sockets import Frame, wait_for_any
from headrace.native_core import best_kernels
from headrace.runtime.message_checks import MAX_WORD, check
from headrace.runtime.process import Context

WAIT_MS = 50
MAX_MESSAGES = 64  # of peers, before the worker gets its turn
TERMS_S = 10.0  # between looks at the files of a model

log = logging.getLogger(__name__)


def main(config: StageConfig, context: Context) -> NoReturn:
    """Serve until SIGTERM."""
    node = StageNode(config, context)
    log.info("a stage may come to %s", node.where)
    context.ready()
    while True:
        node.work()


class StageNode:
    """A stage process at work. It has one run at a time; the newest one that is granted."""

    def __init__(self, config: StageConfig, context: Context) -> None:
        self._context = context
        self._slot = context.slot
        self._frontend = context.board.slot("frontend")
        self._key = read_key(config.key_file)
        self._listener = CurveListener(config.listen, self._key, "the stage's address")
        self.where = self._listener.where
        self._cache_fd = os.memfd_create("headrace-pages", os.MFD_CLOEXEC)
        self._run: StageRun | None = None
        self._peer = b""  # the seat of the run's worker
        self._grant: StageGrant | None = None  # the last one
        self._terms = OwnTerms()
        self._kernels = best_kernels()
        self._told = ""
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToStage)
        self._encoder = msgspec.msgpack.Encoder()

    def work(self) -> None:
        """Handle all that has come; wait where there is nothing."""
        self._slot.beat()
        run = self._run
        wait_for_any([*self._listener.polled, *(() if run is None else run.polled)], WAIT_MS)
        self._listener.admit()
        for _ in range(MAX_MESSAGES):
            received = self._listener.receive()
            if received is None:
                break
            self._guard(self._take, *received)
        if self._run is not None:
            self._guard(self._run.tend, time.monotonic())

    def _guard(self, work: Any, *args: Any) -> None:
        """Do some work for the run; end that where the work fails."""
        try:
            work(*args)
        except RunEnded as end:
            self._end(str(end), end.exit_status, end.output)
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            self._tell(f"a peer sends what is wrong: {error}")
            self._end(f"the stage was sent what is wrong: {error}", ExitStatus.FAILED)
        except OSError as error:
            self._tell(f"a stage cannot be here: {error}")
            self._end(f"the system refuses what the stage needs: {error}")

    def _take(self, peer: bytes, frames: list[Frame]) -> None:
        """Handle a message. All but grants are of the run, or of one that has ended."""
        message = self._decoder.decode(frames[0])
        if isinstance(message, StageGrant):
            self._renew(peer, message)
        elif self._run is None or message.run != self._run.id:
            return
        elif isinstance(message, WorkerInput):
            self._slot.add(StageField.SENT_ON)
            self._run.take_input(frames[1:])
        elif isinstance(message, HiddenFrame):
            self._slot.add(StageField.FRAMES)
            self._run.take_frame(message, frames[1:])

    def _renew(self, peer: bytes, grant: StageGrant) -> None:
        """Take a grant; begin a run where it is of another one, or of another connection.

        What has gone through the connection before may be lost.
        """
        if self._run is not None and (peer, grant.run) != (self._peer, self._run.id):
            assert self._grant is not None
            if grant.sent_at < self._grant.sent_at:  # of a seat that has ended, on the same machine
                return
            self._end("its seat has connected anew, or another seat has come")
        self._peer, self._grant = peer, grant
        for count in grant.wishes:
            check(0 <= count < MAX_WORD, f"operators have asked {count} times")
        note_counts(self._frontend, PROFILE, grant.wishes)
        if self._run is None:
            if why := self._terms.differences(grant):
                self._tell(why)
                self._send(StageStatus(grant.run, grant.sent_at, why=why))
                return
            self._run = StageRun(grant, self._send_on, self._context, self._cache_fd, self._key)
            log.info("a server has a worker of stage %d here", grant.stage)
        self._run.renew(grant, time.monotonic())
        self._send(
            StageStatus(
                grant.run,
                grant.sent_at,
                self._run.progress,
                self._run.why,
                kernels=self._kernels,
            )
        )

    def _end(self, why: str, exit_status: int | None = None, output: str = "") -> None:
        """End the run, or what was to be one, and tell its seat."""
        grant = self._grant
        if grant is None:
            return
        if self._run is not None:
            log.warning("the run ends: %s", why)
        self._send(
            StageStatus(
                grant.run,
                grant.sent_at,
                why=why,
                exit_status=exit_status,
                has_ended=True,
                output=output,
            )
        )
        self._close()

    def _close(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None

    def _send(self, status: StageStatus) -> None:
        self._listener.send(self._peer, [self._encoder.encode(status)])

    def _send_on(self, frames: list[Frame]) -> bool:
        return self._listener.send(self._peer, frames)

    def _tell(self, what: str) -> None:
        """Log what is wrong, once."""
        if what != self._told:
            self._told = what
            log.warning("%s", what)


class OwnTerms:
    """What this machine has of a server's terms: its code, and the model's files at a path."""

    def __init__(self) -> None:
        self._path = ""
        self._digest = ""
        self._look_at = 0.0

    def differences(self, grant: StageGrant) -> str:
        """Return why the stage cannot be here; "" is nothing."""
        execution = msgspec.msgpack.decode(grant.execution, type=ExecutionConfig)
        path, now = execution.model_path, time.monotonic()
        if not os.path.exists(path):
            return f"there is no {path} here; a stage needs the model's files at the server's path"
        if path != self._path or now >= self._look_at:
            self._path, self._digest = path, sampled_digest(Path(path))
            self._look_at = now + TERMS_S
        own = {"version": code_version(), "digest of weights": self._digest}
        return differences(grant.terms, own)
