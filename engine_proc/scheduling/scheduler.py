"""The scheduler: chooses the tokens of the next step. Pure: no sockets, no clock, no torch.

Continuous batching with chunked prefill: one token budget per step covers prompts and decodes.
Running sequences are scheduled first, the highest priority at the head. Waiting sequences follow in
the order of the queue's policy. The first that does not fit ends the step: skipping it would let
short prompts starve a long one. When no page is free, the running sequence of the lowest priority
is preempted. Its pages are freed and its tokens are recomputed later, as in vLLM.

Async scheduling: a step may be chosen while the step before is in flight. Each sequence that
samples in the earlier step is assumed to gain one token. A sequence that proves to have ended is
ignored in the later step. Pages of a sequence in flight become available only when its step has
ended. So where pages are short, an ahead-of-time step waits; stages preempt what is in no step.

A prompt is computed up to its first image without an embedding. The sequence then leaves the
running set and keeps its pages until another sequence needs them.
"""

from array import array
from bisect import insort
from collections.abc import Callable, Iterator, KeysView
from dataclasses import replace
from itertools import islice

from headrace.engine_proc.images.encoder_queue import EncoderQueue
from headrace.engine_proc.kv_cache.cache_table import NO_CACHE
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.scheduling.adapter_pool import AdapterPool
from headrace.engine_proc.scheduling.crash_suspects import CrashSuspects
from headrace.engine_proc.scheduling.fair_share import FairShare
from headrace.engine_proc.scheduling.inflight_step import InflightStep, InflightSteps
from headrace.engine_proc.scheduling.micro_batches import share_of_step
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.scheduling.scheduler_limits import SchedulerLimits
from headrace.engine_proc.scheduling.scheduler_stats import SchedulerStats
from headrace.engine_proc.scheduling.sequence_pages import SequencePages
from headrace.engine_proc.scheduling.sequence_states import SequenceStates
from headrace.engine_proc.scheduling.speculation import Speculation
from headrace.engine_proc.scheduling.waiting_queue import Policy, WaitingQueue, make_turn
from headrace.engine_proc.sequence.chunk import NO_TOKENS, Chunk
from headrace.engine_proc.sequence.image_placeholder import whole_end
from headrace.engine_proc.sequence.pooled_adapter import PooledAdapter, slot_of
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.sequence.sequence_output import SequenceOutput
from headrace.ipc.messages import MAX_SEQUENCES, FinishReason, request_of

SHORT_SHARE = 4  # a prompt is short that takes no more than this part of a step
MAX_WATCHED = 64  # prompt tokens per chunk whose logits are looked at: they take memory


class MustWait(Exception):
    """The next step cannot be chosen before the step in flight has ended."""


class Scheduler:
    """All sequences of the engine, running and waiting.

    `schedule` chooses a step; `update` takes its result. Steps end in the order of their start.

    Args:
        fetch: has a queued sequence wait for pages, if the KV store may have some.
        copy_in: has one that is to run wait for pages of a GPU's host tier.
    """

    def __init__(
        self,
        pool: PagePool,
        limits: SchedulerLimits,
        policy: Policy = Policy.FCFS,
        speculation: Speculation | None = None,
        reuses_prefixes: bool = True,
        images: EncoderQueue | None = None,
        slots: StateSlots | None = None,
        adapters: AdapterPool | None = None,
        fetch: Callable[[Sequence], None] | None = None,
        copy_in: Callable[[Sequence], None] | None = None,
    ) -> None:
        self._pool = pool
        self._images = images
        self._adapters = adapters
        self._speculation = speculation
        caches = reuses_prefixes and not limits.whole_prompts
        self.slots = slots or StateSlots(0)
        self._states = SequenceStates(self.slots, pool, caches)
        self._pages = SequencePages(pool, self._states, caches, self._give_back, fetch, copy_in)
        self._relays = limits.num_stages == 1  # a step may have tokens of the one before
        self._limits = replace(limits, max_num_seqs=self._states.limit(limits.max_num_seqs))
        self.running: list[Sequence] = []  # the most important first
        self._shares = FairShare()
        self.waiting = WaitingQueue(policy, pool, self._shares)
        self._by_id: dict[int, Sequence] = {}
        self._by_request: dict[int, list[int]] = {}
        self._num_requests = self._num_sequences = 0  # that have come
        self._open = InflightSteps()  # one, two with the next, or one for each stage
        self._suspects = CrashSuspects()
        self.counts = SchedulerStats()
        self._spare = 0  # tokens that a step has room for beyond its budget,
        self._prompt_spare = 0  # and those that there is memory for, as far as is known

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything, or is being computed."""
        return bool(self.running or self._open) or self.waiting.has_ready

    @property
    def has_suspects(self) -> bool:
        """Whether a sequence runs alone that may be what workers died of."""
        return bool(self._suspects)

    @property
    def requests(self) -> KeysView[int]:
        """The ids of all requests that have sequences here."""
        return self._by_request.keys()

    def users_of(self, adapter: PooledAdapter) -> list[Sequence]:
        """Return the sequences of an adapter."""
        return [sequence for sequence in self._by_id.values() if sequence.adapter is adapter]

    @property
    def is_full(self) -> bool:
        """Whether no more requests are to be added."""
        return len(self.waiting) >= self._limits.max_num_queued

    @property
    def ids_in_step(self) -> list[int]:
        """The sequences of the steps that are being computed."""
        return list({chunk.sequence.id: None for chunk in self._open.chunks})

    @property
    def tokens_in_step(self) -> int:
        """The number of tokens of the largest step in flight, but for the draft model's."""
        return self._open.num_tokens

    @property
    def is_generating(self) -> bool:
        """Whether any running sequence is decoding; in stages its step may be in flight."""
        draws = not self._relays and any(chunk.is_last for chunk in self._open.chunks)
        return draws or any(s.num_pending and not s.is_prefilling for s in self.running)

    @property
    def num_pending(self) -> int:
        """Tokens to compute for all sequences before each has another token."""
        return sum([s.num_pending for s in self.running]) + self.waiting.num_tokens

    def add(self, sequence: Sequence, turn: int | None = None) -> None:
        """Queue a sequence, with the turn that it had. Its prompt and max_tokens must fit."""
        request, index = divmod(sequence.id, MAX_SEQUENCES)
        siblings = self._by_request.setdefault(request * MAX_SEQUENCES, [])
        self._num_requests += not siblings
        own = make_turn(self._num_requests, index, self._num_sequences)
        sequence.turn = own if turn is None else turn
        self._num_sequences += 1
        if sequence.request.images:
            assert self._images is not None
            self._images.enter(sequence)
        if (source := sequence.request.adapter) is not None:
            assert self._adapters is not None
            sequence.adapter = self._adapters.enter(source)
        sees_all = self._limits.whole_prompts and not sequence.request.embeds
        sequence.num_prefix = sequence.num_prompt if sees_all else 0
        self._shares.enter(sequence.request.key)
        self._queue(sequence)
        self.counts.prefix_queries += len(sequence.tokens)
        self._by_id[sequence.id] = sequence
        siblings.append(sequence.id)
        self._pages.fetch(sequence)

    def _queue(self, sequence: Sequence) -> None:
        sequence.queued_at = self.counts.steps
        sequence.num_expected = len(sequence.tokens)
        self._pages.digest(sequence, len(sequence.tokens) - 1)
        self.waiting.add(sequence)

    def schedule(self, budget: int | None = None, most: int | None = None) -> list[Chunk]:
        """Choose the chunks of the next step and give them pages.

        The result is empty in three cases. There is no work. All of it waits for images that are
        not encoded yet, or for pages. The choice depends on the result of the step in flight.

        Args:
            budget: the most tokens that keep decodes quick. With less than one per running
                sequence the last wait.
            most: the most that there is memory for.
        """
        limit = self._limits.max_num_batched_tokens
        most = limit if most is None else min(most, limit)
        budget = most if budget is None else min(budget, most)
        if self._open and not self._can_look_ahead(budget):
            return []
        self._spare, self._prompt_spare = limit - budget, most - budget
        speculation = None if self._open or self._suspects else self._speculation
        if speculation and (drafting := speculation.next_chunks(self.running, self._room(budget))):
            self._open.append(InflightStep(drafting))
            return drafting
        try:
            chunks = self._schedule_suspect(budget) or self._schedule_all(budget)
        except MustWait:
            return []
        if self._adapters is not None:  # the products of an adapter are those of adjacent rows
            chunks.sort(key=lambda chunk: slot_of(chunk.sequence.adapter))
        if not self._states.have_room(len(chunks)):
            self._strip_waiting()
        if chunks:
            self.counts.steps += 1
            self.counts.steps_ahead += bool(self._open)
            self._open.append(InflightStep(chunks))
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.start + chunk.count
            if chunk.is_last and self._relays and sequence.num_expected < sequence.num_computable:
                sequence.num_expected += 1
        self._states.begin(chunks)
        return chunks

    def _can_look_ahead(self, budget: int) -> bool:
        """Whether a step can be chosen while another is being computed."""
        if not self._relays:
            return len(self._open) < self._limits.num_stages and not self._suspects
        admits = len(self.running) < self._limits.max_num_seqs and self.waiting.has_ready
        is_known = self._open[-1].is_foreseeable and not self._suspects
        if not (is_known and self._have_slots(admits, admits)):
            return False
        own = self._speculation
        return own is None or own.needs_no_answer(self.running, self._room(budget))

    def _room(self, budget: int) -> int:
        """Return what prompts that may begin with a step leave of its budget."""
        admits = len(self.running) < self._limits.max_num_seqs
        return budget - (self.waiting.num_admissible if admits else 0)

    def _have_slots(self, num_new: int, num_adopting: int) -> bool:
        """Whether a step may admit so many sequences, or have so many adopt checkpoints."""
        return not self._open or self._states.have_room(len(self.running) + num_new, num_adopting)

    def _schedule_all(self, budget: int) -> list[Chunk]:
        """Return the chunks of a step: running sequences first, then admitted ones."""
        num_preemptions = self.counts.preemptions
        share = share_of_step(self.running, len(self.waiting), len(self._open), self._limits)
        chunks = list(islice(self._running_chunks(budget - self._kept_free(budget)), share))
        if self.waiting and self.counts.preemptions == num_preemptions:
            left = budget - sum(c.num_tokens for c in chunks)
            chunks += islice(self._admitted_chunks(left), share - len(chunks))
        return chunks

    def _kept_free(self, budget: int) -> int:
        """Return the tokens reserved for a short prompt that is next in the waiting queue.

        Without the reserve, it would start only after the running prompts are computed.
        """
        waits = self.waiting and len(self.running) < self._limits.max_num_seqs
        if not waits or self._limits.whole_prompts:
            return 0
        room = (budget - len(self.running)) // SHORT_SHARE
        if room <= 0 or not any(sequence.is_prefilling for sequence in self.running):
            return 0
        first = self.waiting.first(self.counts.steps)
        return first.num_pending if first is not None and first.num_pending <= room else 0

    def _schedule_suspect(self, budget: int) -> list[Chunk]:
        """Return the chunk of the first suspect that waits for no image.

        Others give it pages; no copies have some, since the engine begins none meanwhile.
        """
        for suspect in self._suspects:
            if suspect in self.running:
                self.running.remove(suspect)
            else:
                self.waiting.remove(suspect)
            self._count_hits(suspect, self._pages.reuse(suspect))
            count = 0 if suspect.is_blocked else self._chunk_length(suspect, budget)
            if count <= 0:
                self.waiting.add(suspect)
                continue
            insort(self.running, suspect, key=self.waiting.importance)
            while not self._can_hold(suspect, count):
                self._preempt(next(s for s in reversed(self.running) if s is not suspect))
            self._pages.allocate(suspect, count)
            return [Chunk.of(suspect, suspect.num_computed, count)]
        return []

    def _running_chunks(self, budget: int) -> Iterator[Chunk]:
        """Yield a chunk per running sequence; preempt the last one for want of pages."""
        place, page_tokens = 0, self._pool.page_tokens
        while place < len(self.running) and budget > 0:
            sequence = self.running[place]
            if sequence.is_blocked:
                self.waiting.add(self.running.pop(place))
                continue
            drafts = NO_TOKENS
            speculation = None if self._open else self._speculation
            if speculation and sequence.generates and not sequence.is_prefilling:
                room = budget - (len(self.running) - place - 1) - sequence.num_pending
                drafts = speculation.propose(sequence, max(0, room))
            start = sequence.num_computed
            has_page = start % page_tokens != 0
            is_decode = sequence.is_plain and sequence.num_expected - start == 1
            if is_decode and has_page and not drafts and start >= sequence.num_prompt:
                place += 1
                budget -= 1
                yield Chunk(sequence, start, 1, NO_TOKENS, is_last=True, is_decode=True)
                continue
            if sequence.is_prefilling and self._have_slots(0, 1):
                self._count_hits(sequence, self._pages.reuse(sequence))  # others may have cached it
            count = self._chunk_length(sequence, self._left_to(sequence, place, budget))
            if count <= 0:  # it waits for an image or room for a whole one, or is about to end
                place += 1
                continue
            while not self._can_hold(sequence, count):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return
            if not self._can_hold(sequence, count + len(drafts)):
                drafts = NO_TOKENS
            place += 1
            self._pages.allocate(sequence, count + len(drafts))
            yield Chunk.of(sequence, sequence.num_computed, count, drafts)
            budget -= count + len(drafts)

    def _left_to(self, sequence: Sequence, place: int, budget: int) -> int:
        """Return the largest number of tokens that a running sequence may take in a step.

        A prompt leaves each decode behind it the tokens that this needs. Otherwise a long prompt
        would stall them until it is computed.
        """
        if not sequence.is_prefilling:
            return budget
        if place and self._exceeds(sequence, budget):
            return 0
        others = self.running[place + 1 :]
        num_texts = sum(other.num_pending for other in others if not other.is_prefilling)
        return max(1, budget - num_texts)

    def _admitted_chunks(self, budget: int) -> Iterator[Chunk]:
        """Yield a chunk per sequence that begins to run."""
        while self.waiting and budget > 0 and len(self.running) < self._limits.max_num_seqs:
            sequence = self.waiting.first(self.counts.steps)
            if sequence is None or not self._have_slots(1, 1):
                return
            if self.running and self._exceeds(sequence, budget):
                return
            if self._pages.waits_for_pages(sequence):
                continue
            num_reused = self._pages.reuse(sequence)
            if sequence.is_blocked:  # the pages that were found end within an image
                self._count_hits(sequence, num_reused)
                continue
            count = self._chunk_length(sequence, budget)
            if not count:
                return
            if not self._can_hold(sequence, count):
                self._reset(sequence)
                return
            self._count_hits(sequence, num_reused)
            self._pages.allocate(sequence, count)
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=self.waiting.importance)
            yield Chunk.of(sequence, sequence.num_computed, count)
            budget -= count

    def _exceeds(self, sequence: Sequence, budget: int) -> bool:
        """Whether a whole prompt waits for another step. That of a prefix LM may delay decodes."""
        room = budget + (self._prompt_spare if sequence.num_prefix else 0)
        return self._limits.whole_prompts and sequence.num_pending > room

    def _chunk_length(self, sequence: Sequence, budget: int) -> int:
        if self._limits.whole_prompts:
            return sequence.num_pending if budget > 0 else 0
        count = min(sequence.num_pending, budget)
        if sequence.needs_prompt_logprobs:
            count = min(count, MAX_WATCHED)
        start = sequence.num_computed
        if not sequence.images:
            return self._states.chunk_end(sequence, start + count) - start
        end = min(start + count, sequence.computable_end)
        return whole_end(sequence.images, start, end, budget + self._spare) - start

    def _count_hits(self, sequence: Sequence, num_tokens: int) -> None:
        if not sequence.has_started:
            self.counts.prefix_hits += num_tokens
            sequence.num_cached += num_tokens

    def _can_hold(self, sequence: Sequence, count: int) -> bool:
        """Whether there are pages for `count` more tokens.

        Sequences that wait for an image are stripped of their pages where that is needed.
        """
        num_new = self._pages.num_missing(sequence, count)
        if not self._pool.can_allocate(num_new):
            self._strip_waiting(sequence)
        return self._pool.can_allocate(num_new)

    def _strip_waiting(self, kept: Sequence | None = None) -> None:
        """Free the pages and states of all sequences that wait for an image, but of one."""
        for other in self.waiting:
            if other.pages and other is not kept:
                self._reset(other)

    def _preempt(self, victim: Sequence) -> None:
        if self._open and (self._relays or self._open.last_with(victim) is not None):
            raise MustWait
        self.running.remove(victim)
        self._reset(victim)
        victim.num_preemptions += 1
        self._queue(victim)
        self.counts.preemptions += 1

    def retry(self) -> None:
        """Roll back the steps in flight: their chunks are scheduled again."""
        while self._open:
            step = self._open.pop()
            for chunk in step.chunks:
                sequence = chunk.sequence
                sequence.may_be_drafted &= not chunk.is_draft
                if not (sequence.has_ended or chunk.is_draft):
                    if sequence.num_computed >= chunk.start:
                        self._states.take_back(chunk)
                    sequence.num_computed = min(sequence.num_computed, chunk.start)
                    sequence.num_expected = len(sequence.tokens)
            self._close(step)
        if self._speculation is not None:
            self._speculation.drop_plan()

    def lose_workers(self, blames: bool = True) -> Sequence | None:
        """Roll back the steps in flight, at which workers died.

        Args:
            blames: whether the sequences of these steps become crash suspects.

        Returns:
            A sequence at which workers die, if one is known.
        """
        deadly = self._suspects.accuse(self._open.chunks) if blames else None
        self.retry()
        return deadly

    def recompute(self, cache_id: bytes = NO_CACHE) -> None:
        """Recompute all sequences from their tokens: the KV cache is that of another id."""
        while self.running:
            self._preempt(self.running[-1])
        for sequence in self.waiting:
            self._reset(sequence)
        self._pool.reset(cache_id)
        self._states.reset(cache_id)
        if self._speculation is not None:
            self._speculation.lose_pages()

    def _reset(self, sequence: Sequence) -> None:
        """Free a sequence's pages and state, so that all of its tokens are recomputed."""
        sequence.seeks_pages |= bool(sequence.pages)
        self._release(sequence)
        if not sequence.has_started:
            sequence.prompt_logprobs.clear()
            sequence.num_cached = 0

    def _release(self, sequence: Sequence) -> None:
        self._give_back(sequence, sequence.pages, self._states.remove(sequence))
        sequence.pages = array("i")
        sequence.num_computed = 0
        sequence.drop_drafts()

    def _give_back(self, owner: Sequence, pages: "array[int]", states: "array[int]") -> None:
        """Let go of a sequence's pages and state slots, once no open step may write to them."""
        if (step := self._open.last_with(owner)) is not None:
            step.given_up.append(pages)
            step.states_given_up += states
        else:
            self._pool.free(pages)
            self._states.free(states)

    def _close(self, step: InflightStep) -> None:
        for pages in step.given_up:
            self._pool.free(pages)
        self._states.free(step.states_given_up)
        self._states.close(step.chunks)

    def take_drafts(self, chunks: list[Chunk], outcome: ResultReader) -> None:
        """Do what `update` does for a step of the draft model, which draws no tokens of texts."""
        assert self._speculation is not None
        step = self._open.pop(0)
        assert step.chunks is chunks, "steps end in their order"
        self._speculation.take(chunks, outcome)
        self._close(step)

    def observe(self, chunks: list[Chunk], seconds: float) -> None:
        """Note what the oldest step took."""
        if self._speculation is not None:
            self._speculation.observe(chunks, seconds)

    def update(self, chunks: list[Chunk], outcome: ResultReader) -> list[SequenceOutput]:
        """Account for the oldest step, which has ended; return the outputs."""
        step = self._open.pop(0)
        assert step.chunks is chunks, "steps end in their order"
        news = []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.has_ended:
                outcome.pass_over(chunk)
                continue
            if chunk.is_decode:
                news.append(self._advance(chunk, outcome.token()))
                continue
            sequence.prompt_logprobs += outcome.prompt_logprobs(chunk)
            self._shares.charge(sequence.request.key, chunk.count)
            end = chunk.end
            if chunk.is_last and sequence.request.embeds:
                news.append(
                    SequenceOutput(sequence, [], FinishReason.STOP, embedding=outcome.embedding())
                )
            elif chunk.is_last and not sequence.generates:
                news.append(SequenceOutput(sequence, [], FinishReason.LENGTH))
            elif chunk.is_last:
                news.append(self._accept_tokens(chunk, outcome))
                end += max(0, len(news[-1].tokens) - 1)
            self._pages.remember(chunk, end)
            if chunk.is_last and news[-1].finished is not None:
                self._forget(sequence)
        self._close(step)
        if self._suspects:
            self._suspects.look(chunks[0].sequence)
        return news

    def _advance(self, chunk: Chunk, token: int) -> SequenceOutput:
        """Do what `update` does for a chunk, for one that `is_decode`."""
        sequence = chunk.sequence
        sequence.tokens.append(token)
        if not self._relays:
            sequence.num_expected += 1
        self._shares.charge(sequence.request.key, 1)
        finished = sequence.finish_reason(token)
        end = len(sequence.tokens) - 1
        if not end % self._pool.page_tokens:
            self._pages.remember(chunk, end)
        if finished is not None:
            self._forget(sequence)
        return SequenceOutput(sequence, [token], finished)

    def _accept_tokens(self, chunk: Chunk, outcome: ResultReader) -> SequenceOutput:
        """Read the tokens that a step drew: one, and one more for every accepted draft.

        Tokens drawn without their required grammar are not sent. The sequence ends as if aborted,
        and its request must fail.
        """
        sequence = chunk.sequence
        num_top = sequence.request.sampling.logprobs
        news = SequenceOutput(sequence, [], FinishReason.ABORT if sequence.is_stuck else None)
        logprobs = bytearray()
        is_right = True
        for place in range(len(chunk.drafts) + 1):
            token = outcome.token()
            logprob = b"" if num_top is None else outcome.logprob(num_top)
            if not is_right or news.finished is not None:
                continue
            sequence.tokens.append(token)
            news.tokens.append(token)
            logprobs += logprob
            news.finished = sequence.finish_reason(token)
            is_right = place < len(chunk.drafts) and token == chunk.drafts[place]
        news.logprobs = bytes(logprobs)
        num_right = max(0, len(news.tokens) - 1)
        self._states.accept(chunk, num_right)
        sequence.num_expected += num_right if self._relays else 1
        if chunk.drafts and self._speculation is not None:
            self._speculation.learn(sequence, len(chunk.drafts), num_right)
            self.counts.check_drafts(len(chunk.drafts), num_right)
        return news

    def abort(self, request: int) -> list[Sequence]:
        """End all sequences of a request; return those there were."""
        return [s for id in [*self._by_request.get(request, ())] if (s := self.end(id)) is not None]

    def find(self, id: int) -> Sequence | None:
        """Return a sequence, if it is still here."""
        return self._by_id.get(id)

    def end(self, id: int) -> Sequence | None:
        """End one sequence, if it is still here."""
        if (sequence := self._by_id.get(id)) is not None:
            self._forget(sequence)
        return sequence

    def _forget(self, sequence: Sequence) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)
        sequence.has_ended = True
        self._suspects.forget(sequence)
        if self._speculation is not None:
            self._speculation.forget(sequence)
        if sequence.images:
            assert self._images is not None
            self._images.leave(sequence)
        if sequence.adapter is not None:
            assert self._adapters is not None
            self._adapters.leave(sequence.adapter)
        self._shares.leave(sequence.request.key)
        del self._by_id[sequence.id]
        siblings = self._by_request[request_of(sequence.id)]
        siblings.remove(sequence.id)
        if not siblings:
            del self._by_request[request_of(sequence.id)]
