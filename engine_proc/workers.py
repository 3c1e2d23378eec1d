"""The engine's side of its workers: their processes and the channels to them."""

from headrace.board import Seat
from headrace.config import EngineConfig, WorkerConfig
from headrace.engine_proc.mask_area import MaskArea
from headrace.engine_proc.speculation import TOKENS_PER_STEP
from headrace.engine_proc.step_channel import StepChannel
from headrace.errors import HeadraceError
from headrace.messages import (
    MAX_BIASES,
    MAX_LOGPROBS,
    SAMPLING_ROW,
    FromWorker,
    Masks,
    Step,
    StepResult,
    ToWorker,
    WorkerReady,
)
from headrace.process import START_FAILED, Context, spawn

WAIT_S = 0.2  # between looks at whether a silent worker is alive
MIN_PAGE_TOKENS = 16  # of any executor; bounds the page table in a step
MAX_HIDDEN_SIZE = 1 << 15  # of any embedding model


class WorkerDied(HeadraceError):
    """A worker ended while the engine needed it."""


def step_bytes(config: EngineConfig) -> int:
    """Return an upper bound of an encoded `Step`. The channel takes only the memory it uses."""
    table = config.max_num_seqs * -(-config.max_model_len // MIN_PAGE_TOKENS) * 4
    per_token = 16 + SAMPLING_ROW.size
    num_tokens = max(config.max_num_batched_tokens, config.max_model_len)  # encoders cut nothing
    per_draw = 4 * config.max_model_len + 8 * MAX_BIASES + 4
    return table + per_token * num_tokens + per_draw * max_draws(config) + 4096


def max_draws(config: EngineConfig) -> int:
    """Return an upper bound of the tokens a step draws."""
    return config.max_num_seqs + TOKENS_PER_STEP


def result_bytes(config: EngineConfig) -> int:
    """Return an upper bound of an encoded `StepResult`."""
    per_token = 4 + 8 + 8 * MAX_LOGPROBS
    per_sequence = 4 * MAX_HIDDEN_SIZE
    return per_token * config.max_num_batched_tokens + per_sequence * config.max_num_seqs + 4096


class Worker:
    """One worker process, its two channels and its masks."""

    def __init__(self, config: EngineConfig, context: Context, rank: int) -> None:
        self._context = context
        self._rank = rank
        self._steps: StepChannel[ToWorker] = StepChannel.create(ToWorker, step_bytes(config))
        self._results: StepChannel[FromWorker] = StepChannel.create(
            FromWorker, result_bytes(config)
        )
        self.masks = MaskArea.create(max_draws(config), config.vocab_size)
        worker_config = WorkerConfig(
            model_path=config.model_path,
            model_impl=config.model_impl,
            dtype=config.dtype,
            quantization=config.quantization,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            kv_cache_dtype=config.kv_cache_dtype,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            step_fd=self._steps.fd,
            result_fd=self._results.fd,
            mask_fd=self.masks.fd,
        )
        self._process = spawn(
            Seat("worker", rank),
            worker_config,
            context.board,
            context.log_level,
            (self._steps.fd, self._results.fd, self.masks.fd),
        )

    def wait_ready(self) -> WorkerReady:
        """Wait until the worker has loaded its model."""
        result = self._receive()
        assert isinstance(result, WorkerReady)
        return result

    def start(self, step: Step) -> None:
        """Let the worker run a step; `finish` has to follow."""
        self._steps.send(step)

    def masks_written(self) -> None:
        """Say that the masks of the step that was started are there."""
        self._steps.send(Masks())

    def finish(self) -> StepResult:
        """Wait for the result of the step that was started."""
        result = self._receive()
        assert isinstance(result, StepResult)
        return result

    def _receive(self) -> FromWorker:
        while True:
            self._context.slot.beat()
            result = self._results.receive(WAIT_S)
            if result is not None:
                return result
            self.check()

    def check(self) -> None:
        """Raise `WorkerDied` if the worker has ended, with its last words."""
        code = self._process.poll()
        if code is not None:
            reason = "could not start" if code == START_FAILED else f"died, exit code {code}"
            why = self._context.board.slot("worker", self._rank).last_words
            raise WorkerDied(f"worker {self._rank} {reason}{f': {why}' if why else ''}")

    def stop(self) -> None:
        """End the worker at once: it holds nothing that is not rebuilt."""
        self._process.kill()
        self._process.wait()
