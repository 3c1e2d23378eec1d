"""Speculative decoding: chooses the drafts of each step of the model. Pure.

A draft is a token that the model is expected to draw. A step computes drafts behind a sequence's
newest token, and keeps those that equal the tokens drawn in their places. So drafts change no text.

Drafts come from the text itself (`ngram_proposer.py`) or from a draft model (`draft_model.py`). The
draft model works in steps of its own between those of the model. It draws with a sequence's own
random numbers, penalties and grammar. Each of its steps drafts one token for the sequences where
that pays (`draft_policy.py`).
"""

from array import array
from itertools import accumulate
from operator import mul

from headrace.config.config import MAX_DRAFTS
from headrace.engine_proc.drafts.draft_policy import (
    AcceptanceRate,
    ChanceTable,
    DraftPolicy,
    StepPlan,
)
from headrace.engine_proc.drafts.edited_copy import EditedCopy
from headrace.engine_proc.drafts.ngram_proposer import (
    COPY,
    MATCH_TOKENS,
    NO_MATCH,
    Match,
    RecentAnswers,
    look_up,
)
from headrace.engine_proc.scheduling.draft_model import DraftModel
from headrace.engine_proc.scheduling.result_reader import ResultReader
from headrace.engine_proc.sequence.chunk import NO_TOKENS, Chunk
from headrace.engine_proc.sequence.sequence import Sequence

USUAL_LENGTH = 4
# In place of how many tokens match: a copy goes on, and its last token was copied or not.
COPIED, EDITED = -1, -2
MAX_PENDING = 1 + MAX_DRAFTS  # tokens of a sequence that decodes
# The share of n-grams' drafts that are accepted, by the tokens of the match, before any was.
NGRAM_RATES = {COPIED: 0.8, EDITED: 0.5, 8: 0.8, 4: 0.6, 3: 0.5, 2: 0.3}
DRAFTS_PER_STEP = 64  # of all sequences
CLOSE_RATE = 0.85  # of unlikely drafts that are accepted, by the model in 4 bits
PROBE_STEPS = 48  # of a sequence without drafts, after which the draft model makes one
# Over so many drafts the cost of reading a text first is spread, or over half of the tokens left.
CATCH_UP_SHARE = 64


class DraftState:
    """A sequence's drafts, and what they have taught.

    Attributes:
        match: what the text suggests to follow the first `at` tokens.
        suggested: that part of it which is to be checked.
        num_bare: steps since the last one with drafts.
    """

    def __init__(self, shared: "DraftState | None" = None) -> None:
        self.ngram_rates: dict[int, AcceptanceRate] = {
            size: AcceptanceRate(None if shared is None else shared.ngram_rates[size], first)
            for size, first in NGRAM_RATES.items()
        }
        self.model_rate: AcceptanceRate = AcceptanceRate(
            None if shared is None else shared.model_rate
        )
        self.match: Match = NO_MATCH
        self.copy: EditedCopy = EditedCopy()
        self.at = 0
        self.suggested = NO_TOKENS
        self.num_bare = 0


class Speculation:
    """The drafts of all sequences.

    Args:
        model: drafts what the text itself does not suggest.
        max_length: the most drafts of a sequence.
    """

    def __init__(self, model: DraftModel | None = None, max_length: int = MAX_DRAFTS) -> None:
        self.policy = DraftPolicy()
        self._model = model
        self._max_length = max_length
        self._shared = DraftState()
        self._states: dict[Sequence, DraftState] = {}
        is_close = model is not None and not model.has_pages
        self._chances = ChanceTable(CLOSE_RATE) if is_close else ChanceTable()
        self._answers = RecentAnswers()
        self._plan = StepPlan(1, 1)
        self._num_free = 0  # drafts that the plan has room for
        self._drafting: list[Sequence] | None = None  # None: there is no plan

    def next_chunks(self, running: list[Sequence], budget: int) -> list[Chunk]:
        """Return the draft model's next step; nothing, where that of the model is due.

        Args:
            budget: tokens of a step.
        """
        if self._drafting is None:
            self._begin(running, budget)
        chunks = []
        for sequence in self._worth_drafting():
            assert self._model is not None
            chunk = self._model.next_chunk(sequence, budget)
            if chunk is not None:
                budget -= chunk.count
                chunks.append(chunk)
        self._plan.spent_s += self.policy.draft_model.seconds(len(chunks))
        self._drafting = [chunk.sequence for chunk in chunks if chunk.is_last] if chunks else None
        return chunks

    def _begin(self, running: list[Sequence], budget: int) -> None:
        """Begin a plan with what the texts suggest."""
        decoding = [s for s in running if s.generates and not s.is_prefilling]
        num_rows = min(budget, sum(sequence.num_pending for sequence in running))
        self._plan = StepPlan(max(1, num_rows), max(1, len(decoding)))
        self._num_free = DRAFTS_PER_STEP
        self._drafting = []
        for sequence in decoding:
            state = self._state(sequence)
            self._look_up(sequence, state)
            is_drafted = self._model is not None and can_draft(sequence)
            if self._model is not None and is_drafted:
                self._model.settle(sequence)
                self._add(self._gains(sequence))
            room = min(self._room(sequence), len(state.match.tokens))
            rate = state.ngram_rates[state.match.size].value if room else 0.0
            gains = [rate**place for place in range(1, room + 1)]
            count = self.policy.num_checked(self._plan, gains)
            if is_drafted and not self.policy.is_faster(self._plan, gains, state.model_rate.value):
                count = 0
            state.suggested = state.match.tokens[:count]
            self._add(gains[:count])
            if is_drafted and not count:
                self._drafting.append(sequence)

    def _look_up(self, sequence: Sequence, state: DraftState) -> None:
        """Learn how a match has fared, and find the next one."""
        told = sequence.tokens[state.at : state.at + len(state.match.tokens)]
        if told:
            pairs = enumerate(zip(told, state.match.tokens, strict=False))
            num_right = next((i for i, (a, b) in pairs if a != b), len(told))
            state.ngram_rates[state.match.size].learn(len(told), num_right)
        if state.at != len(sequence.tokens):
            state.copy.follow(sequence.tokens, state.at)
            state.at = len(sequence.tokens)
            state.match = self._find(sequence, state.copy)

    def _find(self, sequence: Sequence, copy: EditedCopy) -> Match:
        """Return what a text suggests: the copy that it makes, or else what its last tokens do."""
        tokens, most = sequence.tokens, self._max_length
        match = NO_MATCH
        if copy.is_edited or not copy.goes_on:
            match = look_up(tokens, most)
            if match.size < MATCH_TOKENS[0] and not copy.goes_on:
                found = self._answers.look_up(sequence.request.salt, tokens, most)
                match = found if found.size else match
        if copy.goes_on and match.size < MATCH_TOKENS[0]:
            return Match(EDITED if copy.is_edited else COPIED, copy.suggest(tokens, most))
        if match.end and match.size >= COPY:
            copy.begin(match.end, match.size)
        return match

    def _add(self, gains: list[float]) -> None:
        """Add drafts to the plan."""
        self._plan.num_rows += len(gains)
        self._plan.num_tokens += sum(gains)
        self._num_free -= len(gains)

    def _gains(self, sequence: Sequence) -> list[float]:
        """Return the tokens that each draft of the draft model is expected to give."""
        return [*accumulate((self._chances[chance] for chance in sequence.draft_chances), mul)]

    def _room(self, sequence: Sequence) -> int:
        """Return how many more drafts a sequence may have."""
        left = sequence.request.max_tokens - sequence.num_generated - 1 - sequence.num_uncovered
        return max(0, min(min(self._max_length, left) - len(sequence.drafts), self._num_free))

    def _worth_drafting(self) -> list[Sequence]:
        """Return the sequences of which another draft pays."""
        gains: dict[Sequence, float] = {}
        behind_s: dict[Sequence, float] = {}
        for sequence in self._drafting or ():
            if self._model is None or sequence.has_ended or not self._room(sequence):
                continue
            chance = [1.0, *self._gains(sequence)][-1]
            gains[sequence] = chance * self._state(sequence).model_rate.value
            num_behind = self._model.num_behind(sequence)
            num_left = sequence.request.max_tokens - sequence.num_generated
            share = max(1, min(CATCH_UP_SHARE, num_left // 2))
            behind_s[sequence] = self.policy.draft_model.seconds(num_behind) / share
        order = sorted(gains, key=gains.__getitem__, reverse=True)[: self._num_free]
        count = self.policy.num_drafted(
            self._plan, [gains[s] for s in order], [behind_s[s] for s in order]
        )
        probed = [s for s in order[count:] if self._state(s).num_bare >= PROBE_STEPS]
        return order[:count] + probed[:1]

    def observe(self, chunks: list[Chunk], seconds: float) -> None:
        """Note what a step took, the draft model's or the model's. Prompts are left out."""
        if any(chunk.count > MAX_PENDING for chunk in chunks):
            return
        costs = self.policy.draft_model if chunks[0].is_draft else self.policy.model
        costs.observe(sum(chunk.num_tokens for chunk in chunks), seconds)

    def take(self, chunks: list[Chunk], outcome: ResultReader) -> None:
        """Read what a step of the draft model has drafted."""
        assert self._model is not None
        for chunk in chunks:
            num_drafts = len(chunk.sequence.drafts)
            self._model.take(chunk, outcome)
            self._add(self._gains(chunk.sequence)[num_drafts:])

    def propose(self, sequence: Sequence, most: int) -> "array[int]":
        """Return a sequence's drafts in the step of the model that is due, at most `most`."""
        state = self._state(sequence)
        if state.at != len(sequence.tokens):  # there is no plan
            return NO_TOKENS
        drafts = state.suggested[:most]
        if not drafts and len(sequence.tokens) == sequence.first_draft:
            gains = self._gains(sequence)
            rest = StepPlan(
                max(1, self._plan.num_rows - len(gains)),
                max(1, self._plan.num_tokens - sum(gains)),
                self._plan.spent_s,
            )
            count = self.policy.num_checked(rest, gains)
            if state.num_bare >= PROBE_STEPS:
                count = max(count, 1)
            drafts = sequence.drafts[: min(most, count)]
        state.num_bare = 0 if drafts else state.num_bare + 1
        return drafts

    def learn(self, sequence: Sequence, num_drafts: int, num_right: int) -> None:
        """Note how many of a sequence's drafts proved right."""
        state = self._state(sequence)
        if not state.suggested:
            state.model_rate.learn(num_drafts, num_right)
            self._chances.learn(sequence.draft_chances[:num_drafts], num_right)

    def forget(self, sequence: Sequence) -> None:
        """Note that a sequence has ended."""
        self._answers.add(sequence.request.salt, sequence.generated)
        self._states.pop(sequence, None)

    def drop_plan(self) -> None:
        """Note that a step has failed: what it should have drafted is not there."""
        self._drafting = None

    def lose_pages(self) -> None:
        """Note that the pages of the draft model are lost."""
        if self._model is not None:
            self._model.lose_pages()

    def _state(self, sequence: Sequence) -> DraftState:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = DraftState(self._shared)
        return state


def can_draft(sequence: Sequence) -> bool:
    """Whether a draft model may draft for a sequence."""
    has_matcher = sequence.matcher is not None or not sequence.request.grammar
    return sequence.may_be_drafted and has_matcher and not sequence.images
