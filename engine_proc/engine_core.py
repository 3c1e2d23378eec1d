"""The engine core: takes requests, schedules steps, and publishes results to detokenizers."""

import logging
import time
from array import array
from collections.abc import Callable, Iterable
from itertools import chain
from typing import assert_never

from headrace.board.backlog import Backlog
from headrace.board.board import Slot, Timing
from headrace.board.fields import CommonField, EngineField
from headrace.config.process_configs import EngineConfig
from headrace.engine_proc.adapter_loads import AdapterLoads, Failure
from headrace.engine_proc.board_counts import write_counts
from headrace.engine_proc.child_processes.child_process import WorkerDied
from headrace.engine_proc.child_processes.store_client import StoreClient
from headrace.engine_proc.child_processes.vision_client import VisionClient
from headrace.engine_proc.child_processes.worker_group import WorkerGroup
from headrace.engine_proc.grammars import MatcherQueue
from headrace.engine_proc.images.encoder_queue import EncoderQueue
from headrace.engine_proc.kv_cache.cache_table import NO_CACHE
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.page_copies import PageCopies
from headrace.engine_proc.request_io.detokenizer_links import DetokenizerLinks
from headrace.engine_proc.request_io.intake import Intake, IntakeDecision
from headrace.engine_proc.request_io.interrupted_streams import InterruptedStreams
from headrace.engine_proc.request_io.prefill_rate import PrefillRate
from headrace.engine_proc.request_io.resume_cache import ResumeCache
from headrace.engine_proc.request_io.sequence_stats import SequenceStats
from headrace.engine_proc.request_io.step_output import step_output
from headrace.engine_proc.request_io.turn import EngineInbox, messages_of_turn
from headrace.engine_proc.scheduling.oom_backoff import OomBackoff
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.scheduling.step_time_model import StepTimeModel
from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.sequence.sequence_output import SequenceOutput
from headrace.engine_proc.step.step_builder import StepBuilder, fill_masks
from headrace.exit_status import ExitStatus
from headrace.ipc.messages import (
    Abort,
    FinishReason,
    GeneratedTokens,
    GenerateRequest,
    RenewLeases,
    StepOutput,
    StopSequence,
    ToEngine,
    detokenizer_of,
    request_of,
)
from headrace.ipc.sockets import Frame
from headrace.ipc.worker_messages import ITEM_BYTES, Step, StepFailed
from headrace.logs import about

IDLE_MS = 500
QUIET_S = 2.0  # without work, before what is seldom needed is loaded
LOADING_MS = 20  # between looks at whether new workers are ready
STUCK = (  # the text of an error
    "the grammar could not be followed after {} tokens: it is too ambiguous or too large; a "
    "simpler one may work"
)
NO_TOKEN = "allowed_token_ids allow no token that the grammar allows after {} tokens"
BESIDE_MS = 1  # between looks at what is made beside steps, grammars and embeddings, without any

log = logging.getLogger(__name__)


class EngineCore:
    """The engine's state between steps: requests, the scheduler, steps in flight."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        pool: PagePool,
        detokenizers: DetokenizerLinks,
        slot: Slot,
        grammars: MatcherQueue,
        images: EncoderQueue | None = None,
        vision: VisionClient | None = None,
        frontends: Iterable[Slot] = (),
        clock: Callable[[], float] = time.monotonic,
        ahead_s: float = 0.0,
        prompts: Backlog | None = None,
        store: StoreClient | None = None,
        adapters: AdapterLoads | None = None,
        copies: PageCopies | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._detokenizers = detokenizers
        self._slot = slot
        self._slot[EngineField.PAGE_TOKENS] = pool.page_tokens
        self._sequence_stats = SequenceStats(slot)
        self._max_num_batched_tokens = config.execution.max_num_batched_tokens
        self._max_num_seqs = config.execution.max_num_seqs
        self._num_micro_batches = config.num_micro_batches
        # Of a step: between two tokens of a sequence are as many as are in flight.
        self._target_itl_s = config.target_itl_ms / 1000 / self._num_micro_batches
        self._step_time = StepTimeModel()
        self._prefill_rate = PrefillRate(slot, clock)
        self._ahead_s = ahead_s
        self._sends_full_ahead = (
            config.embedding_size is not None and config.async_scheduling is None
        )
        self._builder = StepBuilder(config.execution.max_num_seqs)
        self._sent: list[tuple[list[Chunk], Step]] = []  # that have no result yet, the oldest first
        self._began_at = 0.0  # when the workers were free for the oldest
        self._step_limit = OomBackoff()
        self._clock = clock
        self._grammars = grammars
        self._generates = config.embedding_size is None
        self._images = images
        self._vision = vision
        self._store = store
        self._adapters = adapters
        self._copies = copies
        self._intake = Intake()
        self._resume_cache = ResumeCache()
        self._interrupted = InterruptedStreams()
        self._frontends = list(frontends)
        self._prompts = prompts
        self._may_have_replicas = bool(config.prefix_fds)
        self._can_step = True
        self._has_new_workers = False
        self._quiet_since = clock()
        self._slot.add(EngineField.RECOVERED_PAGES, pool.num_cached)  # of the engine before
        self._update_board()

    def receive(self, inbox: EngineInbox) -> None:
        """Handle messages that have arrived, up to a limit; others wait for the next turn.

        Wait for one only if there is no other work.
        """
        wait_ms = 0
        self._prefill_rate.expire()
        if not (self._scheduler.has_work and self._can_step):
            self._detokenizers.flush()
            self._slot[EngineField.IS_BUSY] = self._is_busy
            self._sequence_stats.settle()
            wait_ms = BESIDE_MS if self._is_busy_beside else IDLE_MS
            wait_ms = wait_ms if self._can_step else LOADING_MS
        received = inbox.receive(wait_ms)
        if self._grammars.is_busy:
            for sequence in self._grammars.ready():
                self._scheduler.add(sequence)
        if received is None:
            if wait_ms and self._prompts is not None:
                self._prompts.settle_idle()
            if wait_ms < IDLE_MS:
                self._quiet_since = self._clock()
            elif self._generates and self._clock() - self._quiet_since >= QUIET_S:
                self._grammars.begin()
            return
        self._quiet_since = self._clock()
        for message, bulk in messages_of_turn(inbox, received):
            self._take(message, bulk)
        self._update_board()

    @property
    def _is_busy_beside(self) -> bool:
        """Whether sequences wait for grammars, images, adapters or pages."""
        has_images = self._images is not None and self._images.num_waiting > 0
        is_loading = self._adapters is not None and self._adapters.is_busy
        is_fetching = self._store is not None and self._store.is_busy
        is_copying = self._copies is not None and self._copies.is_busy
        return self._grammars.is_busy or has_images or is_loading or is_fetching or is_copying

    def _take(self, message: ToEngine, bulk: Frame) -> None:
        match message:
            case GenerateRequest():
                self._slot[EngineField.IS_BUSY] = 1  # before it counts as taken
                self._slot.add(EngineField.TAKEN_TOKENS, len(bulk) // ITEM_BYTES)
                self._add(Sequence.of(message, bulk, time.monotonic_ns()))
            case Abort(request):
                self._abort(request)
            case RenewLeases():
                self._intake.renew(memoryview(bulk).cast("B").cast("Q"), self._clock())
            case StopSequence(id):
                self._stop(id)
            case GeneratedTokens():
                for begun in self._resume_cache.keep(message, bulk, self._clock()):
                    self._catch_up(begun)
            case _:
                assert_never(message)

    def _stop(self, id: int) -> None:
        ended = self._scheduler.end(id)
        if ended is not None:
            self._slot.add(EngineField.FINISHED)
            self._sequence_stats.stop(ended)
            self._resume_cache.keep_ended(ended, self._clock())

    def _abort(self, request: int) -> None:
        self._intake.drop(request)
        ended = self._drop(request)
        self._slot.add(EngineField.ABORTED, len(ended))
        if ended:
            self._publish([SequenceOutput(ended[0], [], FinishReason.ABORT)])  # one is enough
        else:  # its answer may still be being written
            output = StepOutput.of({}, [request], [0], [FinishReason.ABORT])
            detokenizer = detokenizer_of(request, len(self._detokenizers))
            self._detokenizers.hold(detokenizer, output, b"")

    def _drop(self, request: int) -> list[Sequence]:
        """Remove all sequences of a request; return them."""
        compiling = self._grammars.abort(request)
        for sequence in compiling:
            self._dismiss(sequence)
        return self._scheduler.abort(request) + compiling

    def _dismiss(self, sequence: Sequence) -> None:
        """Release the images of a sequence that the scheduler does not have."""
        if self._images is not None:
            self._images.dismiss(sequence.request.images)

    def poll_images(self) -> None:
        """Take embeddings from the vision worker, and send it the next images.

        Raises:
            WorkerDied: too many died in a row.
        """
        if self._vision is None or self._images is None:
            return
        losses = self._vision.take(self._images)
        for sequence in losses.gone:  # it is on its way once more, under another id
            self._abort(request_of(sequence.id))
        for sequence, why in losses.failed:
            if sequence.images:  # else it has failed, for another image or with another sequence
                self._fail(sequence, why)
        fingerprint = "" if self._store is None else self._store.fingerprint
        self._vision.ask(self._images, fingerprint)

    def poll_store(self) -> None:
        """Take what the KV store has fetched, and ask for more.

        It does not while a suspect gets all pages, and while new workers may have other pages.

        Raises:
            WorkerDied: too many died in a row.
        """
        if self._store is not None:
            self._store.poll(may_ask=not (self._scheduler.has_suspects or self._has_new_workers))

    def abort_expired(self) -> None:
        """Abort the requests whose leases have expired or whose frontend was replaced."""
        requests = chain(self._scheduler.requests, self._grammars.requests)
        starts = [slot[CommonField.STARTS] for slot in self._frontends]
        for request in self._intake.expired(requests, self._clock(), starts):
            self._slot.add(EngineField.LAPSED)
            self._abort(request)
        self._resume_cache.forget_old(self._clock(), self._detokenizers.are_serving)

    def _add(self, sequence: Sequence) -> None:
        # A resumed request was admitted before: it is not refused when all come back at once.
        is_full = self._scheduler.is_full and not sequence.request.resumes
        match self._intake.judge(sequence.id, is_full):
            case IntakeDecision.TAKEN:
                if sequence.request.resumes:
                    self._resume(sequence)
                if not sequence.request.grammar or self._grammars.prepare(sequence):
                    self._scheduler.add(sequence)
            case IntakeDecision.REFUSED:
                self._slot.add(EngineField.QUEUE_REFUSALS)
                self._dismiss(sequence)
                self._publish([SequenceOutput(sequence, [], FinishReason.REFUSED)])
            case IntakeDecision.DROPPED:
                self._dismiss(sequence)

    def _resume(self, sequence: Sequence) -> None:
        """Continue from the tokens of the same sequence, if they are still here under an old id.

        A sequence with log probabilities starts again, since no process keeps those.
        """
        ids = [sequence.request.resumes, *sequence.request.earlier]
        generated = self._resume_cache.take(ids)
        for before in reversed(ids):
            self._intake.drop(request_of(before))
            for compiling in self._grammars.abort(request_of(before)):
                self._dismiss(compiling)
            old = self._scheduler.end(before) or self._resume_cache.take_ended(before)
            if old is not None:
                self._publish([SequenceOutput(old, [], FinishReason.ABORT)])
                sequence.take_after(old)
                generated = max(generated, old.generated, key=len)
        sampling = sequence.request.sampling
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            return
        # Pixels of images are there for one sequence, so such a one begins once.
        if not self._go_on_after(generated, sequence) and not sequence.request.images:
            self._resume_cache.begin(ids, sequence.id, self._clock())

    def _catch_up(self, id: int) -> None:
        """Have a sequence that has begun anew go on after its tokens, which came later."""
        if (compiling := self._grammars.find(id)) is not None:
            self._go_on_after(self._late_tokens(compiling), compiling)
            return
        begun = self._scheduler.find(id)
        if begun is None:
            return
        self._sequence_stats.settle()
        generated, num_known = self._late_tokens(begun), begun.num_generated
        if len(generated) <= num_known or generated[:num_known] != begun.generated:
            return
        sequence = Sequence.of(begun.request, begun.tokens[: begun.num_prompt].tobytes())
        sequence.take_after(begun)
        sequence.has_started = begun.has_started
        self._scheduler.end(id)
        self._go_on_after(generated, sequence, num_known)
        if not sequence.request.grammar or self._grammars.prepare(sequence):
            self._scheduler.add(sequence, begun.turn)

    def _late_tokens(self, sequence: Sequence) -> "array[int]":
        ids = [sequence.request.resumes, *sequence.request.earlier]
        return self._resume_cache.take(ids)[: sequence.request.max_tokens - 1]

    def _go_on_after(
        self, generated: "array[int]", sequence: Sequence, num_published: int = 0
    ) -> bool:
        """Give a sequence tokens that were generated before; return whether it takes any."""
        generated = generated[: sequence.request.max_tokens - 1]  # an end comes with the last one
        if generated and generated[-1] in sequence.request.stop_token_ids:
            generated.pop()
        sequence.tokens.extend(generated)
        if len(generated) > num_published:
            self._publish([SequenceOutput(sequence, generated[num_published:].tolist())])
        if generated:
            self._interrupted.add(sequence, self._clock())
        return bool(generated)

    def run_once(self, workers: WorkerGroup) -> None:
        """Compute a step if there is work. If a worker died, go on with new ones.

        Raises:
            WorkerDied: too many died in a row.
        """
        try:
            self._can_step = workers.are_ready()
            if not self._can_step:
                return
            self._tend(workers)
            if self._scheduler.has_work:
                self.step(workers)
            else:
                workers.check()
        except WorkerDied as death:
            self._replace_workers(workers, death)

    def _tend(self, workers: WorkerGroup) -> None:
        """Look after what workers do beside steps, and first after pages of new ones."""
        if self._has_new_workers:
            self._take_pages(workers.cache_id)
        if self._adapters is not None:
            self._fail_all(self._adapters.tend(workers))
        if self._copies is not None:  # a suspect gets all pages
            self._copies.tend(workers, may_begin=not self._scheduler.has_suspects)

    def _replace_workers(self, workers: WorkerGroup, death: WorkerDied) -> None:
        """Roll back what the workers were at, and start others."""
        if self._store is not None:  # it may write to what is about to be cleared
            self._store.settle()
        if self._copies is not None:
            self._copies.lose_workers()
        ids = self._scheduler.ids_in_step
        is_for_memory = death.exit_status is ExitStatus.SHORT_OF and bool(ids)
        if is_for_memory and (num_tokens := self._scheduler.tokens_in_step):
            self._step_limit.failed(num_tokens)
        deadly = self._scheduler.lose_workers(blames=not (is_for_memory or death.is_from_outside))
        self._builder.start_over()
        self._sent.clear()
        self._set_step_deadline()
        if deadly is not None:
            self._fail(deadly, "workers have died twice while they were at it alone")
        is_explained = is_for_memory or death.is_from_outside or deadly is not None
        workers.replace(death, ids, is_explained)
        self._can_step, self._has_new_workers = False, True
        if self._adapters is not None:
            self._fail_all(self._adapters.lose_workers())
        self._update_board()

    def _take_pages(self, cache_id: bytes) -> None:
        """Go on with the pages of new workers; recompute all sequences if they have others."""
        self._has_new_workers = False
        if self._copies is not None:
            self._scheduler.recompute()
            self._copies.take_workers(cache_id)
        elif cache_id and cache_id == self._pool.cache_id:
            self._slot.add(EngineField.RECOVERED_PAGES, self._pool.num_cached)
        else:
            self._scheduler.recompute(cache_id or NO_CACHE)
        self._update_board()

    def _without_stuck(self, news: list[SequenceOutput]) -> list[SequenceOutput]:
        """Fail the requests whose grammars allow no token; return the outputs of all others."""
        stuck = {
            request_of(n.sequence.id): n.sequence for n in news if n.finished is FinishReason.ABORT
        }
        for sequence in stuck.values():
            error, reason = "it was not compiled", STUCK
            if sequence.has_no_token:
                error, reason = "allowed_token_ids allow none of its tokens", NO_TOKEN
            elif sequence.matcher is not None:
                error = sequence.matcher.error
            num = sequence.num_generated
            self._fail(sequence, f"its grammar, after {num} tokens: {error}", reason.format(num))
        if not stuck:  # nearly always
            return news
        return [n for n in news if request_of(n.sequence.id) not in stuck]

    def _fail_all(self, failures: list[Failure]) -> None:
        """End the requests of sequences whose adapters cannot be loaded."""
        for sequence, why in failures:
            if not sequence.has_ended:  # with another of its request
                self._fail(sequence, why, why, is_invalid=True)

    def _fail(
        self, sequence: Sequence, why: str, reason: str = "", is_invalid: bool = False
    ) -> None:
        """End a sequence's request with an error. `why` is logged; `reason` goes to the client.

        Args:
            is_invalid: the client has asked for what cannot be done.
        """
        request = request_of(sequence.id)
        log.error("request %x fails: %s", request, why, extra=about(sequence.request.request_id))
        self._intake.drop(request)
        self._slot.add(EngineField.ABORTED, len(self._drop(request)))
        news = [SequenceOutput(sequence, [], FinishReason.ABORT)]
        failed, reasons = {request: sequence.request.plan}, {request: reason} if reason else {}
        output, tokens = step_output(news, failed, reasons, [request] if is_invalid else [])
        self._detokenizers.hold(sequence.request.detokenizer, output, tokens)

    def step(self, workers: WorkerGroup) -> None:
        """Send a step, then take the result of the oldest, unless another can be sent before.

        The previous step's results are published while the workers compute.
        """
        if self._send(workers) and self._looks_ahead():
            return
        if self._sent:
            self._detokenizers.send_ready()
            self._sequence_stats.settle()
            self._take_result(workers)

    def _looks_ahead(self) -> bool:
        """Whether another step is to be sent before the result of the one that is computed."""
        if len(self._sent) < self._num_micro_batches:
            return True
        if len(self._sent) != 1:
            return False
        chunks, step = self._sent[0]
        if self._step_time.mean_s(step.num_tokens, len(chunks)) <= self._ahead_s:
            return True
        return self._sends_full_ahead and self._can_fill_step

    @property
    def _can_fill_step(self) -> bool:
        """Whether the next step is full: texts that come before it begins would not join it."""
        has_seats = 2 * len(self._scheduler.running) <= self._max_num_seqs  # as many are free
        return has_seats and self._scheduler.waiting.num_tokens >= self._max_num_batched_tokens

    def _send(self, workers: WorkerGroup) -> bool:
        """Send a step if one can be chosen now."""
        if not self._sent:
            self._began_at = self._clock()
        chunks = self._scheduler.schedule(self._budget(), self._step_limit.num_tokens)
        if not chunks:  # all wait for images, or for the step that is being computed
            return False
        now_ns = time.monotonic_ns()
        for chunk in chunks:
            if not chunk.is_decode:
                chunk.sequence.scheduled_ns = chunk.sequence.scheduled_ns or now_ns
        step = self._builder.build(chunks)
        workers.start(step)
        self._sent.append((chunks, step))
        if len(self._sent) == 1:
            self._set_step_deadline()
            self._make_masks(workers)
        return True

    def _set_step_deadline(self) -> None:
        """Write to the board when the oldest step becomes overdue, for the hang watchdog."""
        patience_s = self._step_patience_s() if self._sent else None
        due_ns = 0 if patience_s is None else time.monotonic_ns() + round(1e9 * patience_s)
        self._slot[EngineField.STEP_DUE_NS] = due_ns

    def _step_patience_s(self) -> float | None:
        """Return how long the oldest step may take. It goes through stages; a time is of one."""
        patience_s = self._step_time.patience_s(self._sent[0][1].num_tokens)
        return None if patience_s is None else patience_s * self._num_micro_batches

    def _make_masks(self, workers: WorkerGroup) -> None:
        """Fill the grammar bitmasks of the oldest step: all of its input tokens are known."""
        chunks, step = self._sent[0]
        if step.masked_rows:
            fill_masks(chunks, workers.masks)
            workers.masks_written()

    def _take_result(self, workers: WorkerGroup) -> None:
        """Wait for the oldest step, and update the scheduler with its result."""
        result = workers.finish(self._step_patience_s())
        if isinstance(result, StepFailed):
            self._retry(workers, result.why)
            return
        chunks, step = self._sent.pop(0)
        began_at, self._began_at = self._began_at, self._clock()
        num_tokens = step.num_tokens
        seconds = self._began_at - began_at
        self._scheduler.observe(chunks, seconds)
        if step.is_draft:
            self._scheduler.take_drafts(chunks, ResultReader(result, 0))
            self._set_step_deadline()
            return
        self._step_limit.worked()
        self._step_time.observe(num_tokens, seconds, len(chunks))
        if num_tokens > len(chunks) and any(chunk.is_prefill for chunk in chunks):
            self._prefill_rate.observe(num_tokens, seconds)
        self._slot[EngineField.STEPPED_NS] = time.monotonic_ns()
        self._set_step_deadline()
        news = self._scheduler.update(
            chunks, ResultReader(result, len(step.pooled_rows) // ITEM_BYTES)
        )
        news = self._without_stuck(news)
        if self._sent:
            self._make_masks(workers)
        self._slot.add(EngineField.COMPUTED_TOKENS, num_tokens)
        self._slot.histogram(Timing.STEP).observe(num_tokens)
        self._slot.add(EngineField.GENERATED_TOKENS, sum([len(n.tokens) for n in news]))
        ended = [n.sequence for n in news if n.finished is not None]
        self._slot.add(EngineField.FINISHED, len(ended))
        for sequence in ended:
            self._resume_cache.keep_ended(sequence, self._clock())
        self._publish(news)
        self._update_board()
        self._sequence_stats.take(news, time.monotonic_ns())

    def _retry(self, workers: WorkerGroup, why: str) -> None:
        """Reschedule the oldest step, which ran out of memory, as smaller ones.

        The step sent after it fails, too. A sequence alone in a step that cannot be split (a whole
        image, or an encoder's text) fails for good.
        """
        chunks, step = self._sent[0]
        for _ in self._sent[1:]:
            workers.finish()
        self._builder.start_over()
        self._sent.clear()
        self._set_step_deadline()
        self._scheduler.retry()
        workers.resume()
        if step.is_draft:
            log.warning("%s; its sequences get no more drafts", why)
            return
        limit, num_tokens = self._step_limit.num_tokens, step.num_tokens
        self._step_limit.failed(num_tokens)
        log.warning("%s; at most %s in the next", why, self._step_limit.num_tokens)
        sequence = chunks[0].sequence
        is_whole = len(chunks) == 1 and limit is not None and num_tokens > limit
        if is_whole and not sequence.has_ended:
            self._fail(sequence, "its tokens have to be in one step, which is too large")
        self._update_board()

    def prompt_s(self, num_tokens: int) -> float:
        """Return how long so many tokens of a prompt take; infinity before any step is known."""
        return self._step_time.prompt_s(num_tokens, self._max_num_batched_tokens)

    def step_s(self) -> float:
        """Return how long a step of the sequences that run takes; 0 where none runs."""
        num_running = len(self._scheduler.running)
        return self._step_time.mean_s(num_running, num_running) if num_running else 0.0

    def _budget(self) -> int | None:
        """Return the token budget that keeps decodes within the target inter-token latency."""
        if not self._target_itl_s or not self._scheduler.is_generating:
            return None
        target_s = self._interrupted.target_s(self._target_itl_s, self._clock())
        spare = self._step_time.tokens_within(target_s, self._max_num_batched_tokens)
        return len(self._scheduler.running) + spare

    def _publish(self, news: list[SequenceOutput]) -> None:
        """Hand outputs to the link of each detokenizer; sent while the next step is computed."""
        for index in range(len(self._detokenizers)):
            mine = [n for n in news if n.sequence.request.detokenizer == index]
            if mine:
                self._detokenizers.hold(index, *step_output(mine))

    @property
    def _is_busy(self) -> bool:
        """Whether there are requests, in whatever state, or outputs that are not sent."""
        has_requests = bool(self._scheduler.requests or self._grammars.requests)
        return has_requests or self._detokenizers.are_holding

    def _update_board(self) -> None:
        """Bring the board up to date."""
        write_counts(self._slot, self._scheduler, self._pool, self._images)
        if self._may_have_replicas:
            self._slot[EngineField.PENDING_TOKENS] = self._scheduler.num_pending
