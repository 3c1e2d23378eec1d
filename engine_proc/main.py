"""Engine process: token ids in, token ids out, one step after the other.
In: ToEngine (tokenizer_proc, frontend, detokenizer_proc).  Out: ToWorker, ToDetokenizer."""

import logging
from array import array
from collections import OrderedDict
from typing import assert_never

from headrace.board import Field, State
from headrace.config import EngineConfig
from headrace.engine_proc.batch import build_step
from headrace.engine_proc.page_pool import PagePool
from headrace.engine_proc.scheduler import News, Scheduler
from headrace.engine_proc.sequence import Sequence
from headrace.engine_proc.workers import Worker
from headrace.errors import ConfigError
from headrace.messages import (
    Abort,
    FinishReason,
    GenerateRequest,
    StepOutput,
    Stop,
    ToEngine,
    WorkerReady,
    request_of,
)
from headrace.process import Context
from headrace.sockets import Frame, Inbox, Outbox, address

IDLE_MS = 500
MAX_EARLY_ABORTS = 4096  # requests aborted before they came; older ones are forgotten

log = logging.getLogger(__name__)


def main(config: EngineConfig, context: Context) -> None:
    """Run until SIGTERM; end when a worker does."""
    inbox: Inbox[ToEngine] = Inbox(address(config.run_dir, "engine"), ToEngine)
    worker = Worker(config, context, rank=0)
    try:
        pool = make_pool(worker.wait_ready(), config)
        scheduler = Scheduler(pool, config.max_num_seqs, config.max_num_batched_tokens)
        engine = Engine(config, context, scheduler, pool)
        context.slot.enter(State.READY)
        while True:
            context.slot.beat()
            engine.receive_all(inbox)
            if scheduler.has_work:
                engine.step(worker)
            else:
                worker.check()
    finally:
        worker.stop()


def make_pool(ready: WorkerReady, config: EngineConfig) -> PagePool:
    """Return the pool of the worker's pages.

    Raises:
        ConfigError: it cannot hold even one sequence of full length.
    """
    num_tokens = ready.num_pages * ready.page_tokens
    if num_tokens < config.max_model_len:
        raise ConfigError(
            f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes} holds {num_tokens} tokens, "
            f"less than one sequence of --max-model-len {config.max_model_len}"
        )
    return PagePool(ready.num_pages, ready.page_tokens)


class Engine:
    """What the loop has between steps."""

    def __init__(
        self, config: EngineConfig, context: Context, scheduler: Scheduler, pool: PagePool
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._slot = context.slot
        self._detokenizers = [
            Outbox(address(config.run_dir, "detokenizer", i))
            for i in range(config.num_detokenizers)
        ]
        self._early_aborts: OrderedDict[int, None] = OrderedDict()
        self._show()

    def receive_all(self, inbox: Inbox[ToEngine]) -> None:
        """Take all messages there are; wait for one where there is nothing else to do."""
        received = inbox.receive(0 if self._scheduler.has_work else IDLE_MS)
        while received is not None:
            self._take(*received)
            received = inbox.receive(0)

    def _take(self, message: ToEngine, bulk: Frame) -> None:
        match message:
            case GenerateRequest():
                if request_of(message.id) not in self._early_aborts:
                    self._scheduler.add(Sequence.of(message, bulk))
            case Abort(request):
                self._early_aborts[request] = None
                if len(self._early_aborts) > MAX_EARLY_ABORTS:
                    self._early_aborts.popitem(last=False)
                self._abort(request)
            case Stop(id):
                self._slot.add(Field.FINISHED, self._scheduler.end(id) is not None)
            case _:
                assert_never(message)
        self._show()

    def _abort(self, request: int) -> None:
        ended = self._scheduler.abort(request)
        self._slot.add(Field.ABORTED, len(ended))
        self._send([News(s, None, FinishReason.ABORT) for s in ended if s.has_started])

    def step(self, worker: Worker) -> None:
        """Compute one step and send what it brought."""
        chunks = self._scheduler.schedule()
        result = worker.run(build_step(chunks))
        sampled = array("i", result.token_ids)
        news = self._scheduler.update(chunks, sampled.tolist())
        self._slot.add(Field.STEPS)
        self._slot.add(Field.COMPUTED_TOKENS, sum(chunk.count for chunk in chunks))
        self._slot.add(Field.GENERATED_TOKENS, len(sampled))
        self._slot.add(Field.FINISHED, sum(n.finished is not None for n in news))
        self._show()
        self._send(news)

    def _send(self, news: list[News]) -> None:
        """Send each detokenizer what concerns it, in one message."""
        for index, outbox in enumerate(self._detokenizers):
            mine = [n for n in news if n.sequence.request.detokenizer == index]
            if mine:
                outbox.send(*step_output(mine))

    def _show(self) -> None:
        """Bring the board up to date."""
        self._slot[Field.RUNNING] = len(self._scheduler.running)
        self._slot[Field.WAITING] = len(self._scheduler.waiting)
        self._slot[Field.PAGES_TOTAL] = self._pool.num_pages
        self._slot[Field.PAGES_FREE] = self._pool.num_free
        self._slot[Field.PREEMPTIONS] = self._scheduler.num_preemptions


def step_output(news: list[News]) -> tuple[StepOutput, bytes]:
    """Return the message and its token ids; sequences in it count as started from here on."""
    started = {n.sequence.id: n.sequence.request.plan for n in news if not n.sequence.has_started}
    cached = {n.sequence.id: n.sequence.num_cached for n in news if n.sequence.id in started}
    for n in news:
        n.sequence.has_started = True
    tokens = array("I", (n.token for n in news if n.token is not None))
    output = StepOutput(
        started,
        [n.sequence.id for n in news],
        [int(n.token is not None) for n in news],
        [n.finished for n in news],
        cached,
    )
    return output, tokens.tobytes()
