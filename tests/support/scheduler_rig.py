"""A scheduler with its pool and a stand-in for a worker, for tests."""

import math
from array import array
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice
from typing import Any

from page_rows import page_rows
from sampling_rows import sampling_rows

from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.scheduling.draft_model import DraftModel
from headrace.engine_proc.scheduling.oom_backoff import OomBackoff
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.scheduling.scheduler_limits import SchedulerLimits
from headrace.engine_proc.scheduling.speculation import Speculation
from headrace.engine_proc.sequence.chunk import Chunk
from headrace.engine_proc.sequence.sequence import NO_STATE, Sequence
from headrace.engine_proc.sequence.sequence_output import SequenceOutput
from headrace.engine_proc.step.step_builder import StepBuilder, build_step
from headrace.ipc.messages import FinishReason, GenerateRequest, Sampling, request_id
from headrace.ipc.token_logprobs import PAIR, ROW
from headrace.ipc.worker_messages import Step, StepResult

VOCABULARY = 11
END = 0
MAX_PROMPT, MAX_TOKENS = 20, 16
PLAIN = Sampling()
WATCHED = Sampling(prompt_logprobs=0)
TOLD = Sampling(logprobs=2)
PENALIZED = Sampling(repetition_penalty=2)
TEXT_PENALIZED = Sampling(presence_penalty=1)  # it looks at what is generated alone


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
    """Return the model's output for `prompt` without batch mates, and its finish reason."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == END:
            return tokens[len(prompt) :], FinishReason.STOP
    return tokens[len(prompt) :], FinishReason.LENGTH


class HalfRightProposer(Speculation):
    """Knows the model. Whether its guesses are right depends on the text."""

    def propose(self, sequence: Sequence, most: int) -> "array[int]":
        length = min(3, most, sequence.request.max_tokens - sequence.num_generated - 1)
        tokens, drafts = list(sequence.tokens), array("i")
        for _ in range(length):
            lies = sum(tokens) % 4 == 0
            drafts.append((next_token(tokens) + lies) % VOCABULARY)
            tokens.append(drafts[-1])
        return drafts


def from_text(pool: PagePool) -> Speculation:
    """Drafts what the text suggests."""
    return Speculation()


def half_right(pool: PagePool) -> Speculation:
    """Drafts with knowledge of the model."""
    return HalfRightProposer()


def by_model(pool: PagePool) -> Speculation:
    """Drafts by a model with pages of its own, which lies at times."""
    return Speculation(DraftModel(pool, VOCABULARY))


def by_model_in_its_pages(pool: PagePool) -> Speculation:
    """Drafts by a model that computes with the pages of the other."""
    return Speculation(DraftModel(pool, VOCABULARY, has_pages=False))


class Died(Exception):
    """A worker came to its deadly token."""


class FakeWorker:
    """A model that sees tokens only through pages and states, as a real one does.

    A sequence's results are found only at the pages and rows where they were put. A scheduler that
    shares, forgets or skips a page therefore gets other tokens.
    """

    def __init__(
        self, pool: PagePool, deadly: int | None = None, shares_pages: bool = False
    ) -> None:
        self.deadly = deadly
        self.shares_pages = shares_pages  # the draft model computes with the model's
        self._page_tokens = pool.page_tokens
        self.drafted = [[-1] * pool.page_tokens for _ in range(pool.num_pages)]
        self._cache = [[-1] * pool.page_tokens for _ in range(pool.num_pages)]
        if shares_pages:
            self.drafted = self._cache
        self._states: dict[int, list[int]] = {}  # the tokens behind which each slot's state is
        self.histories: dict[int, list[int]] = {}  # by slot
        self._drawn: list[int] = []  # in the last step

    def run(self, chunks: list[Chunk]) -> ResultReader:
        """Run a step that was chosen a moment ago."""
        return ResultReader(self.run_step(build_step(chunks)), 0)

    def run_step(self, step: Step) -> StepResult:
        """Draw a token for each row.

        The log probability of a watched token is the token in its place. Its rank is the number of
        tokens before it, as with a drawn token.
        """
        ids, positions, owners = (
            array("i", column) for column in (step.token_ids, step.positions, step.sequences)
        )
        pages = page_rows(step)
        for place, row in enumerate(array("i", step.token_sources)):
            if row >= 0:
                ids[place] = self._drawn[row]
        if self.deadly in ids:
            raise Died
        cache = self.drafted if step.is_draft else self._cache
        for token, position, owner in zip(ids, positions, owners, strict=True):
            page = pages[owner][position // self._page_tokens]
            cache[page][position % self._page_tokens] = token
        states = self._run_states(step, ids, positions, owners)
        self._update_histories(step)
        drawn, logprobs = [], b""
        rows = sampling_rows(step.rows)
        for place, row in zip(array("i", step.logit_rows), rows, strict=True):
            owner = owners[place]
            cached = [token for page in pages[owner] for token in cache[page]]
            seen = cached[: positions[place] + 1]
            assert owner not in states or states[owner][: len(seen)] == seen, "of another state"
            said = self.next_token(seen)
            if step.is_draft and sum(seen) % 4 == 0:  # it lies
                said = (said + 1) % VOCABULARY
            assert row.position == positions[place] + 1
            if row.num_history:
                own = self.histories[row.history_slot][: row.num_history]
                assert len(own) == row.num_history
                assert row.num_history == row.position or not row.num_prompt
                first = row.position - row.num_history
                assert step.is_draft or own == cached[first : row.position]
            drawn.append(said if row.target < 0 else row.target)
            if row.num_logprobs >= 0:
                logprob = math.log(0.5) if step.is_draft else said
                logprobs += ROW.pack(logprob, row.position) + PAIR.pack(said, 0) * row.num_logprobs
        self._drawn = drawn
        return StepResult(array("i", drawn).tobytes(), logprobs)

    def _update_histories(self, step: Step) -> None:
        """Put the tokens of a step into their slots; what was there from their start on goes."""
        tokens = iter(array("i", step.history))
        numbers = iter(array("i", step.history_updates))
        for slot, start, count in zip(numbers, numbers, numbers, strict=True):
            own = self.histories.setdefault(slot, [])
            assert start <= len(own), "a gap"
            new = [x if x >= 0 else self._drawn[-1 - x] for x in islice(tokens, count)]
            own[start:] = new
        assert not [*tokens]

    def _run_states(
        self, step: Step, ids: Items[int], positions: Items[int], owners: Items[int]
    ) -> dict[int, list[int]]:
        """Put each sequence's tokens behind its state; return those behind the new ones.

        A slot gets those that its state covers.
        """
        states_in, states_out = array("i", step.state_in), array("i", step.state_out)
        ends = array("i", step.state_ends) or [len(ids)] * len(states_in)
        covered = {}
        assert len({*states_out}) == len(states_out) and not {*states_in} & {*states_out}
        states = {}
        for owner, slot in enumerate(states_in):
            states[owner] = [] if slot == NO_STATE else [*self._states[slot]]
            first, end = owners.index(owner), len(owners) - owners[::-1].index(owner)
            assert len(states[owner]) == positions[first]
            assert not step.state_ends or first < ends[owner] <= end
            covered[states_out[owner]] = [*states[owner], *ids[first : min(ends[owner], end)]]
            states[owner] += ids[first:end]
        self._states |= covered
        return states

    def next_token(self, tokens: list[int]) -> int:
        return next_token(tokens)


@dataclass
class Rig:
    """A scheduler with its pool and worker, and its outputs."""

    pool: PagePool
    scheduler: Scheduler
    budget: int
    max_num_seqs: int
    depth: int = 1  # steps that are open at once; with 2, one is sent while another is run
    slots: StateSlots | None = None  # of a model with states
    copied: Callable[[], set[int]] = set  # the pages in use for copies, which steps may wait for
    copied_slots: Callable[[], list[int]] = list

    def __post_init__(self) -> None:
        self.worker = FakeWorker(self.pool)
        self.limit = OomBackoff()
        self.said: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason] = {}
        self.open: list[tuple[list[Chunk], Step]] = []
        self.builder = StepBuilder(self.max_num_seqs)

    @classmethod
    def make(
        cls,
        num_pages: int,
        page_tokens: int,
        budget: int,
        max_num_seqs: int,
        depth: int = 1,
        num_states: int = 0,
        speculation: "Callable[[PagePool], Speculation] | None" = None,
        num_stages: int = 1,
        num_reserved: int = 0,
        **options: Any,
    ) -> "Rig":
        slots = StateSlots(num_states, num_reserved=num_reserved)
        pool = PagePool(num_pages, page_tokens)
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, num_stages=num_stages
        )
        drafts = None if speculation is None else speculation(pool)
        scheduler = Scheduler(pool, limits, slots=slots, speculation=drafts, **options)
        rig = cls(pool, scheduler, budget, max_num_seqs, depth, slots)
        rig.worker = FakeWorker(pool, shares_pages=speculation is by_model_in_its_pages)
        return rig

    def add(self, sequence: Sequence) -> None:
        self.said[sequence.id] = []
        self.scheduler.add(sequence)

    def lose(self) -> None:
        """Lose the worker in the middle of a step, and with it all that was computed."""
        while self.scheduler.has_work and len(self.open) < self.depth and self.start():
            pass
        for _, step in self.open:
            self.worker.run_step(step)
        self.scheduler.lose_workers()
        self.scheduler.recompute()
        self.builder.start_over()
        self.open.clear()
        self.worker = self.worker.__class__(self.pool, shares_pages=self.worker.shares_pages)
        assert not self.scheduler.running
        assert self.pool.num_free == self.pool.num_pages
        self.check_pages()
        assert self.slots is None or len(self.slots._free) == self.slots.num_slots

    def replace_worker(self) -> None:
        """Lose the worker in the middle of a step; its pages are kept, with what it has written."""
        while self.scheduler.has_work and len(self.open) < self.depth and self.start():
            pass
        for _, step in self.open[:1]:
            self.worker.run_step(step)
        self.scheduler.lose_workers()
        self.builder.start_over()
        self.worker.histories.clear()
        self.open.clear()
        self.check_pages()

    def fail(self) -> None:
        """Have no memory for a step, of which something may have been written."""
        while self.scheduler.has_work and len(self.open) < self.depth and self.start():
            pass
        if not self.open:
            return
        chunks, step = self.open[0]
        self.worker.run_step(step)
        self.scheduler.retry()
        self.builder.start_over()
        self.worker.histories.clear()  # of some sequences it may have none of the last tokens
        self.open.clear()
        self.limit.failed(sum(chunk.num_tokens for chunk in chunks))
        self.check_pages()

    def start(self) -> bool:
        """Send a step, if one can be chosen now, and check what must hold of it."""
        chunks = self.scheduler.schedule(None, self.limit.num_tokens)
        has_reason = self.open or self.copied() or not self.scheduler.has_work
        assert chunks or has_reason, "a step without work"
        if not chunks:
            return False
        assert sum(chunk.num_tokens for chunk in chunks) <= self.budget
        assert all(
            0 < chunk.count <= chunk.sequence.num_computable - chunk.start for chunk in chunks
        )
        assert len({id(chunk.sequence) for chunk in chunks}) == len(chunks)
        step = self.builder.build(chunks)
        assert all(row.history_slot < self.max_num_seqs for row in sampling_rows(step.rows))
        self.open.append((chunks, step))
        self.check_pages()
        return True

    def step(self) -> list[SequenceOutput]:
        """Send a step, then take the result of the oldest unless another can be sent before."""
        started = not (self.open and not self.scheduler.has_work) and self.start()
        if not self.open or (started and len(self.open) < self.depth):
            return []
        chunks, step = self.open.pop(0)
        self.limit.worked()
        outcome = ResultReader(self.worker.run_step(step), 0)
        self.scheduler.observe(chunks, 0.001 if step.is_draft else 0.1)
        if step.is_draft:
            self.scheduler.take_drafts(chunks, outcome)
            return []
        news = self.scheduler.update(chunks, outcome)
        for item in news:
            assert item.tokens or not item.sequence.generates
            self.said[item.sequence.id] += item.tokens
            if not item.sequence.has_started and item.sequence.needs_prompt_logprobs:
                check_prompt_logprobs(item.sequence)
            item.sequence.has_started = True
            if item.finished is not None:
                self.finished[item.sequence.id] = item.finished
        self.check_pages()
        return news

    def check_pages(self) -> None:
        """Every page is free or used, and no two write to one, whenever they do."""
        used = {page for sequence in self.scheduler.running for page in sequence.pages}
        used |= self.copied()
        used |= {p for step in self.scheduler._open for pages in step.given_up for p in pages}
        assert len(used) + self.pool.num_free == self.pool.num_pages
        written = [
            page
            for sequence in self.scheduler.running
            for page in sequence.pages[sequence.num_computed // self.pool.page_tokens :]
        ]
        assert len(written) == len(set(written)), "a page is written by two"
        self.check_open_steps()
        self.check_states()
        assert len(self.scheduler.running) <= self.max_num_seqs
        for sequence in self.scheduler.running:
            assert len(sequence.pages) * self.pool.page_tokens >= sequence.num_computed
        waiting = self.scheduler.waiting
        assert waiting.num_tokens == sum(len(sequence.tokens) for sequence in waiting)
        for sequence in waiting:
            assert sequence.num_computed == 0 or self.open
            assert not sequence.pages or self.open

    def check_states(self) -> None:
        """Every slot in use has the users that there are; a written one has no other."""
        if self.slots is None:
            return
        sequences = [*self.scheduler.running, *self.scheduler.waiting]
        users = Counter(s.state for s in sequences if s.state != NO_STATE)
        users.update(self.copied_slots())
        for step in self.scheduler._open:
            users.update(c.state_in for c in step.chunks if c.state_in != NO_STATE)
            users.update(step.states_given_up)
        assert {s: n for s, n in enumerate(self.slots._num_users) if n} == users
        assert self.slots.num_free == self.slots.num_slots - len(users)
        for _, step in self.open:
            for slot in array("i", step.state_out):
                assert slot not in self.slots._digests, "a checkpoint is written"

    def check_open_steps(self) -> None:
        """Check that a page being written has one user, and gets no other before the step ends."""
        writers: dict[int, Sequence] = {}
        for chunks, step in self.open:
            if step.is_draft and not self.worker.shares_pages:  # in pages of its own
                continue
            for own, chunk in zip(page_rows(step), chunks, strict=True):
                pages = self.pool.page_tokens
                first, end = chunk.start // pages, (chunk.start + chunk.num_tokens - 1) // pages
                for page in own[first : end + 1]:
                    assert self.pool._num_users[page] == 1
                    assert writers.setdefault(page, chunk.sequence) is chunk.sequence

    def run(self) -> None:
        """Step until all sequences have ended."""
        while self.scheduler.has_work:
            self.step()


def check_prompt_logprobs(sequence: Sequence) -> None:
    prompt = sequence.tokens[: sequence.num_prompt]
    assert [*ROW.iter_unpack(sequence.prompt_logprobs)] == [
        (next_token(prompt[:position]), position) for position in range(1, len(prompt))
    ]
