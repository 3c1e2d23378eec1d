"""Speculative decoding: chooses the drafts of each step of the model. Pure.

A draft is a token that the model is expected to draw. A step computes drafts behind a sequence's
newest token, and keeps those that equal the tokens drawn in their places. So drafts change no text.

Drafts come from the text itself (`ngram_proposer.py`) or from a draft model (`draft_model.py`). The
draft model works in steps of its own between those of the model. It draws with a sequence's own
random numbers, penalties and grammar. Each of its steps drafts one token for the sequences where
that pays (`draft_policy.py`).
"""

from array import array
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter, mul

from headrace.config.config import MAX_DRAFTS
from headrace.engine_proc.drafts.draft_policy import (
    AcceptanceRate,
    ChanceTable,
    DraftPolicy,
    StepPlan,
    growths_of,
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
from headrace.engine_proc.drafts.trials import Trials
from headrace.engine_proc.scheduling.draft_model import CATCH_UP_TOKENS, DraftModel
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
MAX_AHEAD = 16  # steps that are chosen without a look at the texts
# Over so many drafts the cost of reading a text first is spread, or over half of the tokens left.
CATCH_UP_SHARE = 64


class DraftState:
    """A sequence's drafts, and what they have taught.

    Attributes:
        match: what the text suggests to follow the first `at` tokens.
        suggested: that part of it which is to be checked.
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
        self._plan = self.policy.plan(1)
        self._num_free = 0  # drafts that the plan has room for
        self._drafting: list[Sequence] | None = None  # None: there is no plan
        self._trials = Trials()
        self._num_ahead = 0  # steps since the last plan

    def next_chunks(self, running: list[Sequence], budget: int) -> list[Chunk]:
        """Return the draft model's next step; nothing, where that of the model is due.

        Args:
            budget: tokens of a step, less those of prompts that begin with it.
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
        self._plan.spent += self._plan.draft_costs[len(chunks)]
        self._drafting = [chunk.sequence for chunk in chunks if chunk.is_last] if chunks else None
        return chunks

    def needs_no_answer(self, running: list[Sequence], budget: int) -> bool:
        """Whether the step behind one without drafts has none, whatever that one draws.

        Prompts leave no room for any, or none could pay, or the texts have suggested none for twice
        as many steps.
        """
        if room_beside(running, budget) <= 0:
            return True
        plan = self._bare_plan(running)
        if self._trials.has_drafts or self._is_trial(plan):
            return False
        if not self.policy.could_pay(plan):
            return True
        self._num_ahead += 1
        return self._num_ahead <= min(MAX_AHEAD, self._trials.num_alike // 2)

    def _begin(self, running: list[Sequence], budget: int) -> None:
        """Begin a plan with what the texts suggest."""
        self._plan = self._bare_plan(running)
        self._num_free = min(DRAFTS_PER_STEP, room_beside(running, budget))
        self._drafting, self._num_ahead = [], 0
        if self._num_free <= 0:
            return
        if self._is_trial(self._plan):
            if self._trials.has_drafts:
                return
            self._plan.demand = 0.0
            self._trials.attempt()
        elif not self.policy.could_pay(self._plan):
            return
        suggestions: list[tuple[float, Sequence]] = []  # the growth of each draft
        for sequence in filter(is_decoding, running):
            state = self._state(sequence)
            self._look_up(sequence, state)
            growths = self._suggested_growths(sequence, state)
            if self._model is not None and can_draft(sequence):
                self._model.settle(sequence)
                self._add(len(sequence.drafts))
                rate = state.model_rate.value
                if not growths or not self.policy.is_faster(self._plan, growths, rate):
                    self._drafting.append(sequence)
                    continue
            suggestions += [(growth, sequence) for growth in growths]
        self._choose(suggestions)

    def _bare_plan(self, running: list[Sequence]) -> StepPlan:
        """Return a step of the model without drafts."""
        return self.policy.plan(max(1, len(running)))

    def _is_trial(self, plan: StepPlan) -> bool:
        return self._trials.is_due(self.policy.costs.num_steps(plan.num_rows))

    def _suggested_growths(self, sequence: Sequence, state: DraftState) -> list[float]:
        """Return the growths of what a text suggests, if all of it were checked."""
        state.suggested = NO_TOKENS
        most = 1 if self._plan.demand == 0.0 else self._max_length
        room = min(most, self._room(sequence), len(state.match.tokens))
        if not room:
            return []
        rate = state.ngram_rates[state.match.size].value
        return growths_of(rate**place for place in range(1, room + 1))

    def _choose(self, suggestions: list[tuple[float, Sequence]]) -> None:
        """Add to the plan what pays of the texts' suggestions."""
        suggestions.sort(key=itemgetter(0), reverse=True)  # of a sequence, the first ones first
        suggestions = suggestions[: self._num_free]
        count = self.policy.num_checked(self._plan, [growth for growth, _ in suggestions])
        for _, sequence in suggestions[:count]:
            state = self._state(sequence)
            state.suggested = state.match.tokens[: len(state.suggested) + 1]
        self._add(count)

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

    def _add(self, num_drafts: int) -> None:
        """Add drafts to the plan."""
        self._plan.num_rows += num_drafts
        self._num_free -= num_drafts

    def _gains(self, sequence: Sequence) -> list[float]:
        """Return the tokens that each draft of the draft model is expected to give."""
        return [*accumulate((self._chances[chance] for chance in sequence.draft_chances), mul)]

    def _room(self, sequence: Sequence) -> int:
        """Return how many more drafts a sequence may have."""
        left = sequence.request.max_tokens - sequence.num_generated - 1 - sequence.num_uncovered
        return max(0, min(min(self._max_length, left) - len(sequence.drafts), self._num_free))

    def _worth_drafting(self) -> list[Sequence]:
        """Return the sequences of which another draft pays."""
        growths: dict[Sequence, list[float]] = {}  # of the next drafts
        behind: dict[Sequence, float] = {}  # what it costs to read the texts first
        for sequence in self._drafting or ():
            if self._model is None or sequence.has_ended or not self._room(sequence):
                continue
            gains, rate = self._gains(sequence), self._state(sequence).model_rate.value
            num_made, last = len(gains), [1.0, *gains][-1]
            gains += [last * rate**place for place in range(1, self._room(sequence) + 1)]
            growths[sequence] = growths_of(gains)[num_made:]
            behind[sequence] = self._plan.draft_costs[self._model.num_behind(sequence)]
        order = sorted(growths, key=growths.__getitem__, reverse=True)[: self._num_free]
        if self._plan.demand == 0.0:
            return self._affordable(order)
        count = self.policy.num_drafted(
            self._plan, [growths[s] for s in order], [behind[s] / share_of(s) for s in order]
        )
        return order[:count]

    def _affordable(self, sequences: list[Sequence]) -> list[Sequence]:
        """Return the sequences that a trial drafts for: one draft each, unless that costs much.

        A trial of what texts suggest goes first.
        """
        if self._model is None or self._num_free < DRAFTS_PER_STEP:
            return []
        chosen, room = [], CATCH_UP_TOKENS
        for sequence in sorted(sequences, key=self._model.num_behind):
            num_tokens = min(self._model.num_behind(sequence), CATCH_UP_TOKENS)
            cost = self._plan.draft_costs[num_tokens]
            if cost > self._trials.credit or num_tokens > room:
                break
            room -= num_tokens
            self._trials.credit -= cost
            chosen.append(sequence)
        return chosen

    def observe(self, chunks: list[Chunk], seconds: float) -> None:
        """Note what a step took, the draft model's or the model's. Prompts are left out."""
        num_rows = sum(chunk.num_tokens for chunk in chunks)
        is_draft = chunks[0].is_draft
        if not is_draft:
            has_drafts = any(chunk.drafts for chunk in chunks)
            self._trials.count(has_drafts=has_drafts)
        if is_draft or all(chunk.count <= MAX_PENDING for chunk in chunks):
            self.policy.costs.observe(num_rows, seconds, is_draft=is_draft)

    def take(self, chunks: list[Chunk], outcome: ResultReader) -> None:
        """Read what a step of the draft model has drafted."""
        assert self._model is not None
        for chunk in chunks:
            num_drafts = len(chunk.sequence.drafts)
            self._model.take(chunk, outcome)
            num_new = len(chunk.sequence.drafts) - num_drafts
            self._add(num_new)
            if chunk.is_last and not num_new and self._drafting:
                self._drafting.remove(chunk.sequence)  # it would draw the same again

    def propose(self, sequence: Sequence, most: int) -> "array[int]":
        """Return a sequence's drafts in the step of the model that is due, at most `most`."""
        state = self._state(sequence)
        if state.at != len(sequence.tokens):  # there is no plan
            return NO_TOKENS
        if state.suggested or len(sequence.tokens) != sequence.first_draft:
            return state.suggested[:most]
        growths = growths_of(self._gains(sequence))
        rest = replace(self._plan, num_rows=max(1, self._plan.num_rows - len(growths)))
        count = min(most, self.policy.num_checked(rest, growths))
        for chance in sequence.draft_chances[count : count + 1]:
            state.model_rate.learn_chance(self._chances[chance])
        return sequence.drafts[:count]

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


def is_decoding(sequence: Sequence) -> bool:
    """Whether a sequence gets a token in each step."""
    return sequence.generates and not sequence.is_prefilling


def room_beside(running: list[Sequence], budget: int) -> int:
    """Return how many drafts a step has room for. Prompts come first: drafts slow them."""
    return budget - sum(sequence.num_pending for sequence in running)


def share_of(sequence: Sequence) -> int:
    """Return over how many drafts of a sequence the cost of reading its text is spread."""
    num_left = sequence.request.max_tokens - sequence.num_generated
    return max(1, min(CATCH_UP_SHARE, num_left // 2))


def can_draft(sequence: Sequence) -> bool:
    """Whether a draft model may draft for a sequence."""
    has_matcher = sequence.matcher is not None or not sequence.request.grammar
    return sequence.may_be_drafted and has_matcher and not sequence.images
