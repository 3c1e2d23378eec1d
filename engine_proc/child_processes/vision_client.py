"""The engine's client of the vision worker: sends images, and replaces a worker that dies.

Only sequences whose images are in progress wait for it. A new worker gets the images of the dead
one. On a GPU it allocates before the workers share the rest, so they start after it.
"""

import logging
import time
from collections.abc import Callable

from headrace.config.process_configs import EngineConfig, VisionConfig
from headrace.engine_proc.child_processes.child_process import ChildProcess, WorkerDied
from headrace.engine_proc.images.encoder_batch import MAX_IMAGES
from headrace.engine_proc.images.encoder_queue import EncoderQueue, Losses
from headrace.engine_proc.shm.embedding_area import ROW_NUMBER_BYTES, EmbeddingArea
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.ipc.arena import Arena
from headrace.ipc.worker_messages import FromVision, ToVision, TowerReady
from headrace.runtime.process import Context
from headrace.supervision.crash_reports import CrashReports
from headrace.supervision.restart_backoff import RestartBackoff
from headrace.system.machine import has_gpus

IMAGE_BYTES = 1024  # of an image in an `Encode`, its rows aside
WHY_BYTES = 4096  # of what an `Encoded` says of an image that failed
LOADING_S = 0.5  # between beats while the first one is not ready

log = logging.getLogger(__name__)


def num_area_rows(config: EngineConfig) -> int:
    """Return how many rows the embedding area has: as its memory allows, and any prompt's fit."""
    row_bytes = ROW_NUMBER_BYTES * config.execution.image_row_size
    return max(config.execution.max_model_len, config.image_memory_bytes // row_bytes)


class VisionClient:
    """The vision worker; there is none between a death and the replacement.

    Args:
        arena: where tensors of images are.
        area: where embeddings are to be.
    """

    def __init__(
        self,
        config: EngineConfig,
        context: Context,
        arena: Arena,
        area: EmbeddingArea,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._context = context
        self._arena = arena
        self._area = area
        self._clock = clock
        self._restarts = RestartBackoff()
        self._crash_reports = CrashReports(config.crash, context.board)
        self._start_at = 0.0  # while there is none
        self._has_served = False
        self._ready: TowerReady | None = None
        self._child: ChildProcess[ToVision, FromVision] | None = self._start()

    def _start(self) -> ChildProcess[ToVision, FromVision]:
        asks: StepChannel[ToVision] = StepChannel.create(
            ToVision, num_area_rows(self._config) * ROW_NUMBER_BYTES + MAX_IMAGES * IMAGE_BYTES
        )
        answers: StepChannel[FromVision] = StepChannel.create(
            FromVision, MAX_IMAGES * WHY_BYTES, look_us=0
        )
        config = VisionConfig(
            execution=self._config.execution,
            ask_fd=asks.fd,
            answer_fd=answers.fd,
            arena_fd=self._arena.fd,
            num_arena_regions=self._config.num_arena_regions,
            embedding_fd=self._area.fd,
            store_tiers=self._config.store_tiers,
        )
        slot = self._context.board.slot("vision")
        fds = (self._arena.fd, self._area.fd)
        return ChildProcess(
            self._context, slot, config, (asks, answers), fds, self._config.watchdog_timeout
        )

    def wait_gpu_bytes(self, images: EncoderQueue) -> int:
        """Return what the tower has of the first GPU, in bytes; wait for it where there are some.

        Raises:
            WorkerDied: as `take`.
        """
        if self._config.execution.device == "cpu" or not has_gpus():
            return 0
        while self._ready is None:
            self._context.slot.beat()
            if self._child is None:
                time.sleep(min(max(0.0, self._start_at - self._clock()), LOADING_S))
            self.take(images, LOADING_S)
        return self._ready.gpu_bytes

    def take(self, images: EncoderQueue, wait_s: float = 0.0) -> Losses:
        """Return the vision worker's results since the last call, if any arrive within `wait_s`.

        Raises:
            WorkerDied: one could not start at all, or too many died in a row.
        """
        if self._child is None:
            if self._clock() >= self._start_at:
                self._child = self._start()
            return Losses()
        self._has_served |= self._child.is_ready
        answer = self._child.receive(wait_s)
        if isinstance(answer, TowerReady):
            self._ready = answer
        elif answer is not None:
            self._restarts.worked()
            return images.take(answer)
        try:
            self._child.check()
        except WorkerDied as death:
            self._child.make_crash_report(self._crash_reports, death, images.in_progress)
            self.stop()
            return self._schedule_restart(death, images)
        return Losses()

    def _schedule_restart(self, death: WorkerDied, images: EncoderQueue) -> Losses:
        """Schedule the next start, and return the lost work."""
        is_hopeless = death.has_reason and not self._has_served
        delay_s = None if is_hopeless else self._restarts.delay_s()
        if delay_s is None:
            self._crash_reports.close()
            raise death
        log.warning("%s; starting again%s", death, f" in {delay_s:g} s" if delay_s else "")
        self._start_at = self._clock() + delay_s
        losses = images.died()
        if losses.failed:  # it was they, which do not come again
            self._restarts.worked()
        return losses

    def ask(self, images: EncoderQueue, fingerprint: str = "") -> None:
        """Have the next images encoded, unless some are being encoded.

        Args:
            fingerprint: as `EncoderQueue.next_batch` has it.
        """
        if self._child is not None and self._ready is not None:
            batch = images.next_batch(self._ready.max_numbers, fingerprint)
            if batch is not None:
                self._child.send(batch)

    def stop(self) -> None:
        """End it, if there is one."""
        if self._child is not None:
            self._child.stop()
            self._child = None
            self._ready = None
