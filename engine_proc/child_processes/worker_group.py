"""The engine's workers: their processes and channels, and their replacement after a death.

A worker's only state of a sequence is its keys and values, and what penalties look at. The first
outlive it in shared memory (`cache_memory.py`), or new workers recompute them. The second is sent
again.
"""

import logging
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from headrace.config.process_configs import EngineConfig, ExecutionConfig, WorkerConfig
from headrace.engine_proc.child_processes.child_process import END_S, ChildProcess, WorkerDied
from headrace.engine_proc.child_processes.worker_place import WorkerPlace, make_places
from headrace.engine_proc.collectives.control_page import ControlPage
from headrace.engine_proc.collectives.shm_all_reduce import WATCHER, ShmAllReduce
from headrace.engine_proc.scheduling.speculation import DRAFTS_PER_STEP, USUAL_LENGTH
from headrace.engine_proc.shm.cache_memory import clear, join_cache_ids
from headrace.engine_proc.shm.embedding_area import EmbeddingArea
from headrace.engine_proc.shm.grammar_bitmask import GrammarBitmask
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.ipc.messages import MAX_BIASES, MAX_LOGPROBS, AdapterSource
from headrace.ipc.worker_messages import (
    SAMPLING_ROW,
    AdapterLoaded,
    CacheLayout,
    CopyPages,
    FromWorker,
    LoadAdapter,
    Masks,
    PagesCopied,
    Rest,
    Resume,
    Step,
    StepFailed,
    StepResult,
    ToWorker,
    WorkerReady,
)
from headrace.runtime.process import Context
from headrace.supervision.crash_reports import CrashReports
from headrace.supervision.restart_backoff import RestartBackoff

HANG_S = 30.0  # for a step on GPUs, at least: kernels that a step is the first to use are compiled
WAIT_S = 0.2  # between looks at whether a silent worker is alive
MIN_PAGE_TOKENS = 16  # of any executor; bounds the page table in a step
RUN_BITS = 63
MAX_HIDDEN_SIZE = 1 << 15  # of any embedding model

Worker = ChildProcess[ToWorker, FromWorker]
Answer = TypeVar("Answer", AdapterLoaded, PagesCopied)  # to what goes on beside steps

log = logging.getLogger(__name__)


def step_bytes(config: ExecutionConfig) -> int:
    """Return an upper bound of an encoded `Step`. The channel takes only the memory it uses."""
    table = config.max_num_seqs * -(-config.max_model_len // MIN_PAGE_TOKENS) * 4
    per_token = 16 + 20 + 4 + SAMPLING_ROW.size  # the second is of images, the third of relays
    num_tokens = max(config.max_num_batched_tokens, config.max_model_len)  # encoders cut nothing
    per_draw = 8 * MAX_BIASES + 4 + 4 + 4  # the last are of adapters and pages
    histories = (4 * config.max_model_len + 12) * config.max_num_seqs
    return table + per_token * num_tokens + per_draw * max_draws(config) + histories + 4096


def max_draws(config: ExecutionConfig) -> int:
    """Return an upper bound of the tokens a step draws."""
    return config.max_num_seqs + DRAFTS_PER_STEP


def result_bytes(config: ExecutionConfig) -> int:
    """Return an upper bound of an encoded `StepResult`."""
    per_token = 4 + 8 + 8 * MAX_LOGPROBS
    per_sequence = 4 * MAX_HIDDEN_SIZE
    return per_token * config.max_num_batched_tokens + per_sequence * config.max_num_seqs + 4096


def start_worker(
    config: EngineConfig,
    context: Context,
    place: WorkerPlace,
    masks: GrammarBitmask,
    embeddings: EmbeddingArea | None,
    control_fd: int | None,
    tower_bytes: int,
    num_pages: int,
    num_states: int,
    run: int = 0,
) -> Worker:
    """Start one of the workers, or the process in its seat where another machine has it."""
    steps: StepChannel[ToWorker] = StepChannel.create(ToWorker, step_bytes(config.execution))
    results: StepChannel[FromWorker] = StepChannel.create(
        FromWorker, result_bytes(config.execution)
    )
    embedding_fd = None if embeddings is None else embeddings.fd
    cache_fd = config.cache_fds[1 + place.index] if config.cache_fds else None
    worker_config = WorkerConfig(
        execution=config.execution,
        step_fd=steps.fd,
        result_fd=results.fd,
        mask_fd=masks.fd,
        rank=place.rank,
        stage=place.stage,
        before_fd=place.before_fd,
        after_fd=place.after_fd,
        group_fd=place.group_fd,
        control_fd=control_fd,
        cache_fd=cache_fd,
        embedding_fd=embedding_fd,
        tower_bytes=tower_bytes if place.index == 0 else 0,
        num_pages=num_pages,
        num_states=num_states,
        num_drafts=0 if config.execution.speculative == "off" else USUAL_LENGTH,
        remote=config.remote_stages if place.stage else None,
        run=run,
    )
    shared = (masks.fd, control_fd, cache_fd, embedding_fd)
    fds = place.fds + tuple(fd for fd in shared if fd is not None)
    slot = context.board.slot("worker", config.first_worker + place.index)
    return ChildProcess(
        context, slot, worker_config, (steps, results), fds, config.watchdog_timeout
    )


class WorkerGroup:
    """All workers: they start together, and end together when one dies.

    Args:
        tower_bytes: of the first one's GPU, that the vision worker has.
    """

    def __init__(
        self,
        config: EngineConfig,
        context: Context,
        embeddings: EmbeddingArea | None = None,
        tower_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._embeddings = embeddings
        self._tower_bytes = tower_bytes
        self._context = context
        self._clock = clock
        self._restarts = RestartBackoff()
        self._reconnects = RestartBackoff()  # after machines of stages were out of reach
        self._crash_reports = CrashReports(config.crash, context.board)
        self._start_at = 0.0  # while `_all` is empty
        self._num_computing = 0  # steps
        self.masks = GrammarBitmask.create(max_draws(config.execution), config.execution.vocab_size)
        self._page: ControlPage | None = None  # of the GPUs of several workers
        self._groups: list[ShmAllReduce] = []  # where those of a stage meet, to watch
        self._all: list[Worker] = []
        self._loading: list[Worker] = []
        self._readies: list[WorkerReady | None] = []  # by rank
        self._layout: WorkerReady | None = None
        self._adapters: list[deque[AdapterLoaded]] = []  # by rank, those not yet taken
        self._copies: list[deque[PagesCopied]] = []
        self._start()

    def _start(self) -> None:
        num_ranks = self._config.execution.tp
        places = make_places(self._config.execution.pp, num_ranks)
        run, control_fd = secrets.randbits(RUN_BITS), None
        if num_ranks > 1:
            self._page = ControlPage.create()
            control_fd = self._page.fd
        self._all = [
            start_worker(
                self._config,
                self._context,
                place,
                self.masks,
                self._embeddings,
                control_fd,
                self._tower_bytes,
                0 if self._layout is None else self._layout.num_pages,
                0 if self._layout is None else self._layout.num_states,
                run,
            )
            for place in places
        ]
        self._loading = list(self._all)
        self._readies = [None] * len(places)
        self._adapters = [deque() for _ in places]
        self._copies = [deque() for _ in places]
        group_fds = {place.group_fd for place in places if place.group_fd is not None}
        self._groups = [ShmAllReduce(fd, WATCHER, num_ranks) for fd in group_fds]
        shared = {fd for place in places for fd in place.fds}
        for fd in shared if control_fd is None else shared | {control_fd}:
            os.close(fd)

    def wait_ready(self) -> WorkerReady:
        """Wait until all have loaded the model for the first time.

        Raises:
            WorkerDied: one could not, and said why, or too many were killed in a row.
        """
        while True:
            try:
                for rank, worker in enumerate(self._all):
                    self._note_ready(rank, self._receive_from(worker))
            except WorkerDied as death:
                if death.has_reason:
                    raise
                self.replace(death, [], death.is_from_outside)
                time.sleep(max(0.0, self._start_at - self._clock()))
                self._start()
            else:
                self._loading = []
                assert self._layout is not None
                return self._layout

    def _note_ready(self, rank: int, message: FromWorker) -> None:
        """Note that a worker is ready. All have one layout of the cache, later ones, too."""
        assert isinstance(message, WorkerReady)
        self._readies[rank] = message
        own = {"cache_id": b"", "page_bytes": 0, "state_bytes": 0, "numerics": "", "gpu": ""}
        layout = msgspec.structs.replace(message, **own)
        assert self._layout in (None, layout), f"workers disagree: {self._layout}, {layout}"
        self._layout = layout

    @property
    def gpus(self) -> list[str]:
        """The names of the kinds of GPUs that compute; none on CPUs."""
        names = {ready.gpu for ready in self._readies if ready is not None}
        return sorted(names - {""})

    @property
    def cache_id(self) -> bytes:
        """What names the pages of workers that are ready; none, where pages die with them."""
        return join_cache_ids([b"" if ready is None else ready.cache_id for ready in self._readies])

    @property
    def cache_layout(self) -> CacheLayout:
        """The records of the memory that workers leave, of those that are ready."""
        assert self._layout is not None
        readies = [ready for ready in self._readies if ready is not None]
        return CacheLayout(
            self._layout.num_host_pages or self._layout.num_pages,
            self._layout.num_host_states or self._layout.num_states,
            [ready.page_bytes for ready in readies],
            [ready.state_bytes for ready in readies],
            [ready.eagle_bytes for ready in readies],
        )

    @property
    def numerics(self) -> str:
        """What decides about bits on GPUs with a host tier; there may be several kinds."""
        return ", ".join(dict.fromkeys(r.numerics for r in self._readies if r is not None))

    def are_ready(self) -> bool:
        """Whether steps can be run; otherwise new workers are on their way.

        Raises:
            WorkerDied: one of those has ended, too.
        """
        if not self._all and self._clock() >= self._start_at:
            self._start()
        for worker in list(self._loading):
            message = worker.receive(0)
            if message is not None:
                self._note_ready(self._all.index(worker), message)
                self._loading.remove(worker)
            else:
                self.check()
        return bool(self._all) and not self._loading

    def start(self, step: Step) -> None:
        """Have the workers run a step, after the one they may be at; `finish` has to follow."""
        self._num_computing += 1
        for worker in self._all:
            worker.send(step)

    def masks_written(self) -> None:
        """Signal that the masks of the oldest started step are written."""
        for worker in self._all:
            worker.send(Masks())

    def finish(self, patience_s: float | None = None) -> StepResult | StepFailed:
        """Wait for the result of the oldest step that was started.

        Args:
            patience_s: how long it may take; None is as long as hearts beat. A worker's heart beats
                while a GPU computes, whose kernels may hang. Other workers take their time.

        Raises:
            WorkerDied: there will be none.
        """
        is_bound = patience_s is not None and self._layout is not None and self._layout.looks_ahead
        result = self._receive(max(patience_s or 0.0, HANG_S) if is_bound else math.inf)
        self._num_computing -= 1
        if isinstance(result, StepResult):
            self._restarts.worked()
            self._reconnects.worked()
        assert isinstance(result, StepResult | StepFailed)
        return result

    def load_adapter(self, slot: int, source: AdapterSource) -> None:
        """Have the workers load an adapter while they run steps."""
        for worker in self._all:
            worker.send(LoadAdapter(slot, source.path, source.digest))

    def loaded_adapters(self) -> Iterator[AdapterLoaded]:
        """Yield the slots that all workers have answered for; one failure is that of all."""
        for answers in self._answers(self._adapters):
            yield next((answer for answer in answers if answer.why_not), answers[0])

    def copy_pages(self, copies: CopyPages) -> None:
        """Have the workers copy pages while they run steps."""
        for worker in self._all:
            worker.send(copies)

    def copied_pages(self) -> Iterator[float]:
        """Yield for each copy that all workers have made the seconds that it took."""
        for answers in self._answers(self._copies):
            yield max(answer.seconds for answer in answers)

    def _answers(self, waiting: list[deque[Answer]]) -> Iterator[list[Answer]]:
        """Yield what all workers have answered, by rank."""
        if not self._num_computing:  # else results come first
            for worker in self._all:
                while (message := worker.receive(0)) is not None:
                    is_answer = self._note_answer(worker, message)
                    assert is_answer, f"a message without a step: {message}"
        while waiting and all(waiting):
            yield [of_rank.popleft() for of_rank in waiting]

    def _note_answer(self, worker: Worker, message: FromWorker) -> bool:
        """Keep an answer to what goes on beside steps; return whether the message is one."""
        rank = self._all.index(worker)
        if isinstance(message, AdapterLoaded):
            self._adapters[rank].append(message)
        elif isinstance(message, PagesCopied):
            self._copies[rank].append(message)
        else:
            return False
        return True

    def rest(self) -> None:
        """Have the workers give back the memory of steps; none is computed."""
        for worker in self._all:
            worker.send(Rest())

    def resume(self) -> None:
        """Have the workers run steps again after one that has failed; all have answered all."""
        for group in self._groups:
            group.revive()
        for worker in self._all:
            worker.send(Resume())

    def _receive(self, patience_s: float) -> FromWorker:
        """Wait for a message from every worker; return that of the last stage.

        All of its workers must send the same, unless one of any stage reports a failure.
        """
        ends_at = self._clock() + patience_s
        messages = [self._receive_from(worker, ends_at) for worker in self._all]
        failures = dict.fromkeys(each.why for each in messages if isinstance(each, StepFailed))
        if failures:
            return StepFailed("; ".join(failures))
        first, *others = messages[-self._config.execution.tp :]
        assert all(other == first for other in others), "workers disagree"
        return first

    def _receive_from(self, worker: Worker, ends_at: float = math.inf) -> FromWorker:
        while True:
            self._context.slot.beat()
            result = worker.receive(WAIT_S)
            if result is None:
                self.check()
            elif not self._note_answer(worker, result):
                return result
            if self._clock() > ends_at:
                worker.give_up("is stuck in a step: its GPU may hang")

    def check(self) -> None:
        """Raise `WorkerDied` if one has ended; of several, the one that the others have lost."""
        lost = [worker for worker in self._all if worker.has_lost_a_peer]
        for worker in self._all:  # a lost peer had ended before
            worker.check(but_for_peers=True)
        for worker in lost:
            worker.check()

    def replace(self, death: WorkerDied, requests: list[int], is_explained: bool = False) -> None:
        """End the remaining workers after one has died, and restart all when their back-off ends.

        Args:
            requests: ids of the sequences that they were at.
            is_explained: it is known what they died of, and they will not have it again.

        Raises:
            WorkerDied: it is not the first in a row, and no work was done in between.
        """
        dead = self._all[death.rank - self._config.first_worker]
        dead.make_crash_report(self._crash_reports, death, requests)
        was_idle = not self._loading and not self._num_computing  # nothing they do was the reason
        if is_explained or was_idle:
            self._restarts.worked()
        self._num_computing = 0
        if death.has_lost_node:
            delay_s: float | None = self._reconnects.patient_delay_s()
        else:
            delay_s = self._restarts.delay_s()
        if delay_s is None:
            self._crash_reports.close()
            raise death
        log.warning("%s; starting again%s", death, f" in {delay_s:g} s" if delay_s else "")
        self.stop()
        if not death.keeps_pages:
            clear(self._config.cache_fds[1:])
        self._start_at = self._clock() + delay_s

    def stop(self) -> None:
        """End all workers, and first what their GPUs wait for."""
        if self._page is not None:
            self._page.abort()
        for worker in self._all:  # their GPUs wait for each other, and the kernel for their GPUs
            worker.kill()
        ends_at = time.monotonic() + END_S
        for worker in self._all:
            worker.join(max(0.0, ends_at - time.monotonic()))
        self._all, self._loading = [], []
        for group in self._groups:
            group.close()
        self._groups = []
