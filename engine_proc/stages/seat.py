"""Worker process: in the seat of a stage's worker that another machine has.
In: ToWorker (engine_proc), hidden states, FromStage.  Out: FromWorker, ToStage."""

import logging
import os
import time
from collections import deque
from dataclasses import replace
from typing import NoReturn, assert_never

import msgspec
import numpy as np

from headrace.board.admin_requests import PROFILE, AdminRequests
from headrace.board.fields import CommonField, WorkerField
from headrace.config.process_configs import ExecutionConfig, RemoteStages, WorkerConfig
from headrace.engine_proc.remote.grants import Grants
from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask
from headrace.engine_proc.shm.hidden_link import HiddenLink
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.engine_proc.stages.hidden_frames import FrameSource
from headrace.engine_proc.stages.pump import Pump
from headrace.engine_proc.stages.stage_link import StageLink
from headrace.errors import HeadraceError
from headrace.exit_status import ExitStatus
from headrace.ipc.curve_key import read_key
from headrace.ipc.curve_links import MAX_FRAME_BYTES
from headrace.ipc.remote_messages import (
    FromStage,
    HiddenFrame,
    StageGrant,
    StageStatus,
    WorkerInput,
    WorkerOutput,
)
from headrace.ipc.sockets import Frame, wait_for_any
from headrace.ipc.worker_messages import (
    ITEM_BYTES,
    FromWorker,
    Masks,
    Resume,
    Step,
    StepFailed,
    StepResult,
    ToWorker,
    WorkerReady,
)
from headrace.native_core import best_kernels
from headrace.runtime.message_checks import MAX_WORD, WrongMessage, check
from headrace.runtime.placed_address import PlacedAddress
from headrace.runtime.process import Context

WAIT_MS = 50
MAX_MESSAGES = 64  # of one side, before the other gets its turn
SILENCE_S = 5.0  # of a stage; its link may be full of hidden states
SECOND_NS = 10**9

log = logging.getLogger(__name__)


class StageLost(HeadraceError):
    """The machine of the stage is out of reach, or has ended the run since another was."""

    exit_status = ExitStatus.NODE_LOST


class StageFailed(HeadraceError):
    """The worker there has ended, or messages are wrong: that may happen again."""

    def __init__(self, why: str, exit_status: int = ExitStatus.FAILED) -> None:
        super().__init__(why)
        self.exit_status = ExitStatus(exit_status)


def main(config: WorkerConfig, context: Context) -> NoReturn:
    """Serve by the worker on another machine; end when that is lost."""
    assert config.remote is not None
    seat = StageSeat(config, config.remote, context)
    while True:
        seat.work()


class StageSeat:
    """The engine's messages and the hidden states of the first stage there, results back."""

    def __init__(self, config: WorkerConfig, remote: RemoteStages, context: Context) -> None:
        self._config, self._remote, self._context = config, remote, context
        self._slot = context.slot
        self._key = read_key(remote.key_file)
        steps: StepChannel[ToWorker] = StepChannel(config.step_fd, ToWorker)
        self._inputs: Pump[bytes] = Pump(steps.receive_encoded)
        self._results: StepChannel[FromWorker] = StepChannel(config.result_fd, FromWorker)
        self._masks = GrammarBitmask(config.mask_fd, config.execution.vocab_size)
        self._frames: Pump[tuple[HiddenFrame, list[Frame]]] | None = None
        self._place = PlacedAddress(remote.run_dir, f"stage {config.stage}")
        self._next_place = PlacedAddress(remote.run_dir, f"stage {config.stage + 1}")
        self._where: str | None = None
        self._link: StageLink | None = None
        self._grants = Grants(time.monotonic(), SILENCE_S)
        self._open: deque[int] = deque()  # logit rows of the steps without a result
        self._num_masks: deque[int] = deque()  # of the steps whose masks are not written yet
        self._serves = False
        self._kernels = ""  # there; as `best_kernels` has them
        self._told = ""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromStage] = msgspec.msgpack.Decoder(FromStage)
        self._messages: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
        self._outputs: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
        self._wishes = AdminRequests(context.board, PROFILE)
        self._execution = self._encoder.encode(with_absolute_paths(config.execution))

    def work(self) -> None:
        """Pass on all that has come; wait where there is nothing.

        Raises:
            StageLost: the stage is out of reach.
            StageFailed: its worker has ended, or sends what is wrong.
        """
        self._slot.beat()
        polled = self._inputs.polled
        polled += [] if self._frames is None else self._frames.polled
        polled += [] if self._link is None else self._link.polled
        wait_for_any(polled, WAIT_MS)
        if self._link is not None:
            self._receive(self._link)
        for encoded in self._inputs.take():
            self._send_input(encoded)
        for frame, rows in () if self._frames is None else self._frames.take():
            self._send([self._encoder.encode(frame), *rows])
        self._keep_alive()

    def _receive(self, link: StageLink) -> None:
        for _ in range(MAX_MESSAGES):
            frames = link.receive()
            if frames is None:
                self._grants.judge(time.monotonic())
                break
            try:
                self._take(self._decoder.decode(frames[0]), frames[1:])
            except (msgspec.MsgspecError, WrongMessage) as error:
                raise StageFailed(
                    f"the stage at {self._where} sends what is wrong: {error}"
                ) from None
        if link.lost_connections():
            if self._serves:
                raise StageLost(f"the stage at {self._where} has closed the connection")
            self._tell(f"{self._where} closes the connection: it has no stage, or another key")

    def _keep_alive(self) -> None:
        """Grant the stage more time when that is due; follow it until it serves."""
        sent_at = time.monotonic_ns()
        now = sent_at / SECOND_NS
        if self._grants.are_due(now):
            self._grants.granted(now)
            if not self._serves:
                self._follow()
            if self._link is not None and self._link.is_connected:
                self._grant(self._link, sent_at)
        if not self._grants.have_run_out(now):
            return
        if self._serves:
            raise StageLost(f"the stage at {self._where} cannot be heard")
        self._tell(f"waiting for stage {self._config.stage}{self._at}")
        self._grants = Grants(now, SILENCE_S)

    @property
    def _at(self) -> str:
        return "" if self._where is None else f" at {self._where}"

    def _follow(self) -> None:
        """Connect to where the stage is now."""
        where = self._place.read()
        if where == self._where:
            return
        if self._link is not None:
            self._link.close()
        self._where = where
        self._link = None if where is None else StageLink(where, self._key)

    def _grant(self, link: StageLink, sent_at: int) -> None:
        config = self._config
        is_last = config.stage == config.execution.pp - 1
        grant = StageGrant(
            run=config.run,
            sent_at=sent_at,
            stage=config.stage,
            following=None if is_last else self._next_place.read(),
            execution=self._execution,
            watchdog_timeout=self._remote.watchdog_timeout,
            terms=self._remote.terms,
            wishes=self._wishes.read(),
        )
        link.grant([self._encoder.encode(grant)])

    def _take(self, message: FromStage, frames: list[Frame]) -> None:
        if message.run != self._config.run:
            return
        match message:
            case StageStatus():
                self._note(message)
            case WorkerOutput():
                check(len(frames) == 1, f"{len(frames)} frames of a worker's output")
                self._take_output(bytes(frames[0]))
            case _:
                assert_never(message)

    def _note(self, status: StageStatus) -> None:
        """Note the state of the run.

        Raises:
            StageLost: it has ended, after it has served.
            StageFailed: its worker has ended, or it was sent what is wrong.
        """
        now = time.monotonic_ns()
        check(0 <= status.granted_at <= now, f"it answers a grant of {status.granted_at} at {now}")
        check(0 <= status.progress < MAX_WORD, f"its worker's progress is {status.progress}")
        self._grants.answered(status.granted_at / SECOND_NS)
        self._slot[CommonField.PROGRESS] = status.progress
        self._kernels = status.kernels or self._kernels
        if status.exit_status is not None:
            known = status.exit_status in list(ExitStatus)
            code = status.exit_status if known else ExitStatus.FAILED
            for line in status.output.splitlines():  # for a crash report
                self._slot.keep_line(f"{line}\n".encode())
            refusal = f"{self._slot.seat} could not start: "  # which the engine says, too
            if status.why.startswith(refusal):
                raise StageFailed(f"at {self._where}: {status.why.removeprefix(refusal)}", code)
            raise StageFailed(f"{status.why}{self._at}", code)
        if status.has_ended and self._serves:
            raise StageLost(f"the stage{self._at} has ended its run: {status.why}")
        if status.why:
            self._tell(f"stage {self._config.stage}{self._at}: {status.why}")

    def _take_output(self, output: bytes) -> None:
        """Hand the engine what the worker has sent.

        Raises:
            WrongMessage: it answers nothing, or has tokens that the vocabulary does not have.
        """
        message = self._outputs.decode(output)
        match message:
            case WorkerReady():
                check(not self._serves, "its worker is ready twice")
                self._begin(message)
            case StepFailed():
                check(bool(self._open), "a failure without a step")
                self._open.popleft()
            case StepResult():
                check(bool(self._open), "a result without a step")
                self._check_tokens(message, self._open.popleft())
                self._slot.add(WorkerField.COMPUTED_STEPS)
            case _:
                check(False, f"its worker sends {type(message).__name__}")
        self._results.send_encoded(output)

    def _check_tokens(self, result: StepResult, num_rows: int) -> None:
        check(len(result.token_ids) in (0, ITEM_BYTES * num_rows), f"a result of {num_rows} rows")
        tokens, vocab_size = np.frombuffer(result.token_ids, np.int32), self._masks.vocab_size
        is_known = not len(tokens) or (tokens.min() >= 0 and tokens.max() < vocab_size)
        check(bool(is_known), f"a token that a vocabulary of {vocab_size} does not have")

    def _begin(self, ready: WorkerReady) -> None:
        """Serve from now on."""
        config = self._config
        if config.stage == 1:  # other stages get their hidden states from the stage before
            assert config.before_fd is not None
            num_frames, max_rows = config.execution.pp, config.execution.max_num_batched_tokens
            link = HiddenLink(config.before_fd, num_frames, max_rows, ready.hidden_size)
            self._frames = Pump(FrameSource(link, config.run).take)
        self._serves = True
        self._context.ready()
        log.info("stage %d serves%s", config.stage, self._at)
        own = best_kernels()
        if self._kernels not in ("", own):
            log.warning(
                "stage %d%s has other kernels (%s) than stage 0 (%s): texts may differ from those "
                "of one machine; take processors of the same kind",
                config.stage,
                self._at,
                self._kernels,
                own,
            )

    def _send_input(self, encoded: bytes) -> None:
        """Send on a message of the engine, and with `Masks` the masks that are there now.

        Raises:
            StageFailed: no link takes it.
        """
        if len(encoded) > MAX_FRAME_BYTES:
            raise StageFailed(
                f"a step takes {len(encoded)} bytes, and links at most {MAX_FRAME_BYTES}; lower "
                "--max-num-seqs"
            )
        frames: list[Frame] = [encoded]
        match message := self._messages.decode(encoded):
            case Step():
                self._open.append(len(message.logit_rows) // ITEM_BYTES)
                if message.masked_rows:
                    self._num_masks.append(len(message.masked_rows) // ITEM_BYTES)
            case Masks():
                num_bytes = self._num_masks.popleft() * self._masks.mask_bytes
                if self._config.stage == self._config.execution.pp - 1:  # others draw nothing
                    frames.append(self._masks.buffer[:num_bytes])
            case Resume():  # no masks come for steps that have failed
                self._num_masks.clear()
            case _:
                pass
        self._send([self._encoder.encode(WorkerInput(self._config.run)), *frames])

    def _send(self, frames: list[Frame]) -> None:
        if self._link is None or not self._link.send(frames):
            raise StageLost(f"the link to the stage{self._at} is full")

    def _tell(self, what: str) -> None:
        """Log why the stage does not serve, once."""
        if what != self._told:
            self._told = what
            log.warning("%s", what)


def with_absolute_paths(execution: ExecutionConfig) -> ExecutionConfig:
    """Return a configuration for a worker that runs elsewhere."""
    profiles = execution.profile_dir
    return replace(
        execution,
        model_path=os.path.abspath(execution.model_path),
        profile_dir=None if profiles is None else os.path.abspath(profiles),
    )
