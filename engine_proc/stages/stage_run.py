"""A run of a stage's worker on this machine, from the first grant of its seat to its end.

Pages outlive a run: the memory belongs to the process of the stage.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import msgspec

from headrace.board.fields import CommonField
from headrace.config.config import MAX_PP
from headrace.config.process_configs import ExecutionConfig, WorkerConfig
from headrace.engine_proc.child_processes.child_process import ChildProcess, WorkerDied
from headrace.engine_proc.child_processes.worker_group import (
    Worker,
    max_draws,
    result_bytes,
    step_bytes,
)
from headrace.engine_proc.shm.cache_memory import clear
from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask
from headrace.engine_proc.shm.hidden_link import HiddenLink
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.engine_proc.stages.hidden_frames import FrameSink, FrameSource
from headrace.engine_proc.stages.pump import Pump
from headrace.engine_proc.stages.stage_link import StageLink
from headrace.exit_status import ExitStatus
from headrace.ipc.curve_key import CurveKey
from headrace.ipc.remote_messages import HiddenFrame, StageGrant, WorkerOutput
from headrace.ipc.sockets import Frame
from headrace.ipc.worker_messages import FromWorker, ToWorker, WorkerReady
from headrace.runtime.message_checks import check
from headrace.runtime.process import Context

LAPSE_S = 10.0  # without a grant: the server, or the way to it, is lost


class RunEnded(Exception):
    """A run is over; `exit_status` is that of its worker, if that has ended, with its output."""

    def __init__(self, why: str, exit_status: int | None = None, output: str = "") -> None:
        super().__init__(why)
        self.exit_status = exit_status
        self.output = output


class StageRun:
    """A worker, the channels to it, and the link to the next stage.

    Args:
        send: hands frames to the worker's seat; false is that it is gone.
        cache_fd: of the worker's pages.
        key: of the link to the next stage.
    """

    def __init__(
        self,
        grant: StageGrant,
        send: Callable[[list[Frame]], bool],
        context: Context,
        cache_fd: int,
        key: CurveKey,
    ) -> None:
        """Start the worker.

        Raises:
            WrongMessage: the grant is of no stage after the first.
            OSError: the system is short of processes, files or memory.
        """
        execution = msgspec.msgpack.decode(grant.execution, type=ExecutionConfig)
        check(0 < grant.stage < execution.pp <= MAX_PP, f"stage {grant.stage} of {execution.pp}")
        self.id = grant.run
        self.granted_at = 0.0
        self._send = send
        self._cache_fd, self._key = cache_fd, key
        self._execution = execution
        self._slot = context.board.slot("worker", grant.stage)
        with ExitStack() as undo:

            def closing(fd: int) -> int:
                undo.callback(os.close, fd)
                return fd

            self._masks = GrammarBitmask.create(max_draws(execution), execution.vocab_size)
            closing(self._masks.fd)
            self._steps: StepChannel[ToWorker] = StepChannel.create(ToWorker, step_bytes(execution))
            closing(self._steps.fd)
            results: StepChannel[FromWorker] = StepChannel.create(
                FromWorker, result_bytes(execution)
            )
            closing(results.fd)
            self._before_fd = closing(HiddenLink.create())
            is_last = grant.stage == execution.pp - 1
            self._after_fd = None if is_last else closing(HiddenLink.create())
            self._outputs = Pump(results.receive_encoded)
            undo.callback(self._outputs.close)
            self._worker = self._start(grant, context, results)
            undo.pop_all()
        self._sink: FrameSink | None = None  # to the worker,
        self._frames: Pump[tuple[HiddenFrame, list[Frame]]] | None = None  # and of it
        self._following: StageLink | None = None
        self._where_following: str | None = None
        self._ready: bytes | None = None  # of the worker, until the next stage is there, too
        self._serves = False
        self._encoder = msgspec.msgpack.Encoder()

    def _start(
        self, grant: StageGrant, context: Context, results: StepChannel[FromWorker]
    ) -> Worker:
        config = WorkerConfig(
            execution=self._execution,
            step_fd=self._steps.fd,
            result_fd=results.fd,
            mask_fd=self._masks.fd,
            stage=grant.stage,
            before_fd=self._before_fd,
            after_fd=self._after_fd,
            cache_fd=self._cache_fd,
        )
        return ChildProcess(
            context,
            self._slot,
            config,
            (self._steps, results),
            (*self._fds, self._cache_fd),
            grant.watchdog_timeout,
        )

    @property
    def _fds(self) -> tuple[int, ...]:
        """The descriptors of the run, besides those of its channels."""
        found = (self._masks.fd, self._before_fd, self._after_fd)
        return tuple(fd for fd in found if fd is not None)

    @property
    def polled(self) -> list[tuple[object, int]]:
        """What tells that there is something to do."""
        frames = [] if self._frames is None else self._frames.polled
        links = [] if self._following is None else self._following.polled
        return [*self._outputs.polled, *frames, *links]

    @property
    def progress(self) -> int:
        """How far the start of the worker is, as on the board."""
        return self._slot[CommonField.PROGRESS]

    @property
    def why(self) -> str:
        """Why the stage does not serve, though its worker is ready; "" is nothing."""
        if self._ready is None:
            return ""
        following = self._where_following or "the next stage"
        return f"its worker is ready and has no link to {following} yet"

    def renew(self, grant: StageGrant, now: float) -> None:
        """Take a grant, and with it where the next stage is.

        Raises:
            RunEnded: that has moved.
        """
        self.granted_at = now
        if self._after_fd is None or grant.following == self._where_following:
            return
        if self._serves:
            raise RunEnded(f"the next stage has left {self._where_following}")
        if self._following is not None:
            self._following.close()
            self._following = None
        self._where_following = grant.following
        if grant.following is not None:
            self._following = StageLink(grant.following, self._key, keeps_alive=True)

    def take_input(self, frames: list[Frame]) -> None:
        """Hand the worker what its seat has sent.

        Raises:
            WrongMessage: there is too much or too little.
        """
        check(len(frames) in (1, 2), f"{len(frames)} frames for a worker")
        message, most = memoryview(frames[0]), self._steps.max_bytes
        check(message.nbytes <= most, f"{message.nbytes} bytes for a worker, at most {most} fit")
        check(self._steps.has_room, "it has sent more than its worker takes")
        if len(frames) == 2:
            masks = memoryview(frames[1])
            room = len(self._masks.buffer)
            check(masks.nbytes <= room, f"{masks.nbytes} bytes of masks, at most {room} fit")
            self._masks.buffer[: masks.nbytes] = masks
        self._steps.send_encoded(message)

    def take_frame(self, frame: HiddenFrame, data: list[Frame]) -> None:
        """Hand the worker the hidden states of a step.

        Raises:
            WrongMessage: they are not what is to come next.
        """
        check(self._sink is not None, "hidden states before the worker is ready")
        assert self._sink is not None
        self._sink.write(frame, data)

    def tend(self, now: float) -> None:
        """Send on what the worker has.

        Raises:
            RunEnded: the worker, its seat or the link to the next stage is lost.
        """
        self._check_following()
        for output in self._outputs.take():
            if self._sink is None:
                self._open_links(msgspec.msgpack.decode(output, type=WorkerReady))
                self._ready = output
            else:
                self._send_output(output)
        if self._ready is not None and self._has_following:
            self._send_output(self._ready)
            self._ready, self._serves = None, True
        for frame, data in () if self._frames is None else self._frames.take():
            assert self._following is not None
            if not self._following.send([self._encoder.encode(frame), *data]):
                raise RunEnded(f"the link to {self._where_following} is full")
        try:
            self._worker.check()
        except WorkerDied as death:
            if not death.keeps_pages:
                clear([self._cache_fd])
            status = death.exit_status if death.has_reason else ExitStatus.FAILED
            raise RunEnded(str(death), status, self._worker.last_output()) from None
        if now > self.granted_at + LAPSE_S:
            raise RunEnded(f"no grant has come for {LAPSE_S:g} s")

    @property
    def _has_following(self) -> bool:
        """Whether there is no next stage, or a connection to it."""
        has_link = self._following is not None and self._following.is_connected
        return self._after_fd is None or has_link

    def _check_following(self) -> None:
        if self._following is not None and self._following.lost_connections() and self._serves:
            raise RunEnded(f"the link to {self._where_following} is lost")

    def _open_links(self, ready: WorkerReady) -> None:
        """Open the ends of the worker's links, whose frames it has told the size of."""
        num_frames, max_rows = self._execution.pp, self._execution.max_num_batched_tokens
        open_link = partial(
            HiddenLink, num_frames=num_frames, max_rows=max_rows, row_size=ready.hidden_size
        )
        self._sink = FrameSink(open_link(self._before_fd), max_rows, ready.hidden_size)
        if self._after_fd is not None:
            self._frames = Pump(FrameSource(open_link(self._after_fd), self.id).take)

    def _send_output(self, output: bytes) -> None:
        if not self._send([self._encoder.encode(WorkerOutput(self.id)), output]):
            raise RunEnded("the server has closed the connection")

    def close(self) -> None:
        """End the worker, and what waits for it."""
        self._outputs.close()
        if self._frames is not None:
            self._frames.close()
        if self._following is not None:
            self._following.close()
        self._worker.stop()
        for fd in self._fds:
            os.close(fd)
