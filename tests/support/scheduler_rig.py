"""A scheduler with its pool and a stand-in for a worker, for tests."""

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from headrace.engine_proc.chunk import Chunk
from headrace.engine_proc.outcome import ROW, Outcome
from headrace.engine_proc.page_pool import PagePool
from headrace.engine_proc.scheduler import Limits, News, Scheduler
from headrace.engine_proc.sequence import Sequence
from headrace.messages import (
    FinishReason,
    GenerateRequest,
    Sampling,
    StepResult,
    request_id,
)

VOCABULARY = 11
END = 0
MAX_PROMPT, MAX_TOKENS = 20, 16
PLAIN = Sampling()
WATCHED = Sampling(prompt_logprobs=0)


def next_token(tokens: Items[int]) -> int:
    """Stand in for a model: a token that depends on every token before it and on their order."""
    state = 7
    for token in tokens:
        state = (state * 31 + token + 1) % 1000003
    return state % VOCABULARY


def make_sequence(
    prompt: list[int],
    max_tokens: int,
    id: int = request_id(0, 1),
    stop_token_ids: list[int] | None = None,
    sampling: Sampling = PLAIN,
    **options: Any,
) -> Sequence:
    request = GenerateRequest(
        id=id,
        detokenizer=0,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=[END] if stop_token_ids is None else stop_token_ids,
        plan=b"",
        **options,
    )
    return Sequence.of(request, array("I", prompt).tobytes())


def generate_alone(prompt: list[int], max_tokens: int) -> tuple[list[int], FinishReason]:
    """Return what the model says to `prompt` with nobody else around, and why it ends."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == END:
            return tokens[len(prompt) :], FinishReason.STOP
    return tokens[len(prompt) :], FinishReason.LENGTH


class FakeWorker:
    """A model that sees tokens only through pages, as a real one does.

    What has been computed for one sequence is found only at the pages and rows where it was put,
    so a scheduler that shares, forgets or skips a page gets other tokens.
    """

    def __init__(self, pool: PagePool) -> None:
        self._page_tokens = pool.page_tokens
        self._cache = [[-1] * pool.page_tokens for _ in range(pool.num_pages)]

    def run(self, chunks: list[Chunk]) -> Outcome:
        """Draw a token for each chunk that reaches the end, and for each guess behind it.

        The log probability of a watched token is what would have been said in its place, and how
        many tokens come before it is its rank.
        """
        for chunk in chunks:
            known = chunk.sequence.tokens + chunk.drafts
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                page = chunk.sequence.pages[position // self._page_tokens]
                self._cache[page][position % self._page_tokens] = known[position]
        tokens, logprobs = array("i"), b""
        for chunk in chunks:
            cached = [token for page in chunk.sequence.pages for token in self._cache[page]]
            for position in chunk.watched:
                tokens.append(chunk.sequence.tokens[position + 1])
                logprobs += ROW.pack(next_token(cached[: position + 1]), position + 1)
            if chunk.is_last:
                ends = range(chunk.start + chunk.count, chunk.start + chunk.num_tokens + 1)
                tokens.extend(next_token(cached[:end]) for end in ends)
        return Outcome(StepResult(tokens.tobytes(), logprobs), 0)


@dataclass
class Rig:
    """A scheduler with its pool and worker, and what has come out of it."""

    pool: PagePool
    scheduler: Scheduler
    budget: int
    max_num_seqs: int

    def __post_init__(self) -> None:
        self.worker = FakeWorker(self.pool)
        self.said: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}

    @classmethod
    def make(
        cls, num_pages: int, page_tokens: int, budget: int, max_num_seqs: int, **options: Any
    ) -> "Rig":
        pool = PagePool(num_pages, page_tokens)
        limits = Limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        return cls(pool, Scheduler(pool, limits, **options), budget, max_num_seqs)

    def add(self, sequence: Sequence) -> None:
        self.said[sequence.id] = []
        self.scheduler.add(sequence)

    def lose(self) -> None:
        """Lose the worker in the middle of a step, and with it all that was computed."""
        if self.scheduler.has_work:
            self.worker.run(self.scheduler.schedule())
        self.scheduler.recompute()
        self.worker = FakeWorker(self.pool)
        assert not self.scheduler.running
        assert self.pool.num_free == self.pool.num_pages
        self.check_pages()

    def step(self) -> list[News]:
        """Run one step and check what must hold after each."""
        chunks = self.scheduler.schedule()
        assert chunks, "a step without work"
        assert sum(chunk.num_tokens for chunk in chunks) <= self.budget
        assert all(chunk.count > 0 for chunk in chunks)
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        self.check_pages()
        news = self.scheduler.update(chunks, self.worker.run(chunks))
        for item in news:
            assert item.tokens
            self.said[item.sequence.id] += item.tokens
            if not item.sequence.has_started and item.sequence.is_watched:
                check_prompt_logprobs(item.sequence)
            item.sequence.has_started = True
            if item.finished is not None:
                self.finished[item.sequence.id] = item.finished
        self.check_pages()
        return news

    def check_pages(self) -> None:
        """Every page is free or used; only pages behind what is computed are shared."""
        owned = {page for sequence in self.scheduler.running for page in sequence.pages}
        assert len(owned) + self.pool.num_free == self.pool.num_pages
        written = [
            page
            for sequence in self.scheduler.running
            for page in sequence.pages[sequence.num_computed // self.pool.page_tokens :]
        ]
        assert len(written) == len(set(written)), "a page is written by two"
        assert len(self.scheduler.running) <= self.max_num_seqs
        for sequence in self.scheduler.running:
            assert len(sequence.pages) * self.pool.page_tokens >= sequence.num_computed
        waiting = self.scheduler.waiting
        assert waiting.num_tokens == sum(len(sequence.tokens) for sequence in waiting)
        for sequence in waiting:
            assert not sequence.pages
            assert sequence.num_computed == 0

    def run(self) -> None:
        """Step until all is said."""
        while self.scheduler.has_work:
            self.step()


def check_prompt_logprobs(sequence: Sequence) -> None:
    prompt = sequence.tokens[: sequence.num_prompt]
    assert [(one.logprob, one.rank) for one in sequence.prompt_logprobs] == [
        (next_token(prompt[:position]), position) for position in range(1, len(prompt))
    ]
