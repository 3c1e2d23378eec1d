"""Which tokens run in the next step. Pure: no sockets, no clock, no torch.

Every sequence's computed tokens catch up with its tokens under one token budget per step; a long
prompt is computed in chunks. Running sequences come first, in order of arrival; then waiting ones,
first come first served: the first that does not fit ends the step, since skipping it would let
short prompts starve a long one for ever. When pages run out the last arrived sequence gives its
pages back and is computed again later (recompute preemption, as in vLLM).
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.engine_proc.page_pool import PagePool, chain_digests
from headrace.engine_proc.sequence import Sequence
from headrace.messages import FinishReason, request_of


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to be computed in a step: `start`, then `count` of them."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the sequence's next token comes out of this step."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class News:
    """What a step brought for one sequence."""

    sequence: Sequence
    token: int | None
    finished: FinishReason | None


class Scheduler:
    """All sequences the engine has, running and waiting."""

    def __init__(self, pool: PagePool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._by_id: dict[int, Sequence] = {}
        self._by_request: dict[int, list[int]] = {}
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its prompt and max_tokens must fit the pool."""
        self.waiting.append(sequence)
        self._by_id[sequence.id] = sequence
        self._by_request.setdefault(request_of(sequence.id), []).append(sequence.id)

    def schedule(self) -> list[Chunk]:
        """Choose the chunks of the next step and give them pages; empty only without work."""
        budget = self._max_num_batched_tokens
        chunks = []
        for chunk in self._running_chunks(budget):
            chunks.append(chunk)
            budget -= chunk.count
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            self._reuse(sequence)
            count = min(sequence.num_missing, budget)
            if not self._can_hold(sequence, count):
                self._release(sequence)
                break
            self._hold(sequence, count)
            self.running.append(self.waiting.popleft())
            chunks.append(Chunk(sequence, sequence.num_computed, count))
            budget -= count
        return chunks

    def _reuse(self, sequence: Sequence) -> None:
        """Give a sequence the pages of its prefix that are remembered; one token stays to run."""
        end = (len(sequence.tokens) - 1) // self._pool.page_tokens
        chain_digests(sequence.digests, sequence.tokens, self._pool.page_tokens, end)
        sequence.pages = self._pool.share(sequence.digests[:end])
        sequence.num_computed = len(sequence.pages) * self._pool.page_tokens
        if not sequence.has_started:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)

    def _remember(self, sequence: Sequence, start: int) -> None:
        """Make the pages that were filled since `start` tokens findable for others."""
        first, end = (n // self._pool.page_tokens for n in (start, sequence.num_computed))
        chain_digests(sequence.digests, sequence.tokens, self._pool.page_tokens, end)
        for page in range(first, end):
            self._pool.remember(sequence.pages[page], sequence.digests[page])

    def _running_chunks(self, budget: int) -> Iterator[Chunk]:
        """Yield a chunk per running sequence; preempt the last one for want of pages."""
        place = 0
        while place < len(self.running) and budget > 0:
            sequence = self.running[place]
            count = min(sequence.num_missing, budget)
            while not self._can_hold(sequence, count):
                victim = self._preempt_last()
                if victim is sequence:
                    return
            self._hold(sequence, count)
            yield Chunk(sequence, sequence.num_computed, count)
            budget -= count
            place += 1

    def _missing_pages(self, sequence: Sequence, count: int) -> int:
        return self._pool.pages_for(sequence.num_computed + count) - len(sequence.pages)

    def _can_hold(self, sequence: Sequence, count: int) -> bool:
        return self._pool.can_take(self._missing_pages(sequence, count))

    def _hold(self, sequence: Sequence, count: int) -> None:
        missing = self._missing_pages(sequence, count)
        if missing > 0:
            sequence.pages += self._pool.take(missing)

    def _preempt_last(self) -> Sequence:
        victim = self.running.pop()
        self._release(victim)
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim

    def _release(self, sequence: Sequence) -> None:
        self._pool.give_back(sequence.pages)
        sequence.pages = []
        sequence.num_computed = 0

    def update(self, chunks: list[Chunk], sampled: list[int]) -> list[News]:
        """Account for a step. `sampled` has one token per chunk that samples, in order."""
        news = []
        tokens = iter(sampled)
        for chunk in chunks:
            sequence = chunk.sequence
            samples = chunk.samples
            sequence.num_computed += chunk.count
            self._remember(sequence, chunk.start)
            if not samples:
                continue
            token = next(tokens)
            sequence.tokens.append(token)
            finished = finish_reason(sequence, token)
            if finished is not None:
                self._forget(sequence)
            news.append(News(sequence, token, finished))
        return news

    def abort(self, request: int) -> list[Sequence]:
        """End all sequences of a request; return those there were."""
        ids = list(self._by_request.get(request, ()))
        return [sequence for id in ids if (sequence := self.end(id)) is not None]

    def end(self, id: int) -> Sequence | None:
        """End one sequence, if it is still here."""
        sequence = self._by_id.get(id)
        if sequence is not None:
            self._forget(sequence)
        return sequence

    def _forget(self, sequence: Sequence) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)
        del self._by_id[sequence.id]
        siblings = self._by_request[request_of(sequence.id)]
        siblings.remove(sequence.id)
        if not siblings:
            del self._by_request[request_of(sequence.id)]


def finish_reason(sequence: Sequence, token: int) -> FinishReason | None:
    """Return why a sequence ends with `token`, its newest, or None."""
    if token in sequence.request.stop_token_ids:
        return FinishReason.STOP
    if sequence.num_generated >= sequence.request.max_tokens:
        return FinishReason.LENGTH
    return None
