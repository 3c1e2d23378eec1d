"""The text of one sequence, and how likely its tokens were."""

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field

from headrace.detokenizer_proc.parser_selection import marks_of
from headrace.detokenizer_proc.parsers.pieces import Piece
from headrace.detokenizer_proc.parsers.special_marks import SpecialMarks
from headrace.detokenizer_proc.parsers.stops import StopMatcher
from headrace.detokenizer_proc.renderers.renderer import TokenUsage
from headrace.detokenizer_proc.reported_tokens import ReportedTokens, rows_of
from headrace.detokenizer_proc.text import TextStream, Vocabulary
from headrace.ipc.messages import FinishReason, ResponsePlan
from headrace.ipc.token_logprobs import ROW


@dataclass(slots=True)
class SequenceText:
    """The text of one sequence."""

    plan: ResponsePlan
    stream: TextStream
    stops: StopMatcher
    marks: SpecialMarks  # of what parses the text
    num_tokens: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache
    sum_logprobs: float = 0.0
    prompt: ReportedTokens = field(default_factory=ReportedTokens)  # where its likelihood is wanted
    finished: FinishReason | None = None
    stopped_by: str | int | None = None  # the stop string, or the stop token
    pieces: list[Piece] = field(default_factory=list)  # since the last event, if there was one
    reported: ReportedTokens = field(default_factory=ReportedTokens)  # the same
    token_ids: list[int] = field(default_factory=list)  # the same
    num_taken: int = 0  # tokens when there was one
    generated: "array[int]" = field(default_factory=lambda: array("I"))  # all tokens
    thought: range = range(0)  # where in the text it is
    _starts: "array[int] | None" = None  # of all tokens in the text, where there may be a thought
    _num_decoded: int = 0  # characters, the echo among them
    _num_given: int = 0  # the same, without what is held back
    _held: ReportedTokens = field(default_factory=ReportedTokens)  # tokens whose text is held back

    @classmethod
    def open(cls, plan: ResponsePlan, vocabulary: Vocabulary) -> "SequenceText":
        """Create the text state for a `plan`."""
        stops = StopMatcher(plan.stop, plan.include_stop)
        kept = marks_of(plan.parsing)
        stream = vocabulary.stream(
            plan.skip_special_tokens, plan.spaces_between_special_tokens, kept
        )
        marks = SpecialMarks(vocabulary.special_tokens(kept) if kept else None)
        length = len(plan.echo)
        starts = array("I") if plan.parsing is not None and plan.parsing.thoughts else None
        assert starts is None or not length, "a parser sees no echo"
        return cls(
            plan, stream, stops, marks, _starts=starts, _num_decoded=length, _num_given=length
        )

    def add(self, pieces: list[Piece], reported: ReportedTokens, token_ids: list[int]) -> None:
        """Keep tokens for the next event."""
        self.pieces += pieces
        self.reported += reported
        self.token_ids += token_ids

    def is_due(self, interval: int) -> bool:
        """Whether an event is due: every `interval` tokens, at the first token and at the end."""
        if self.finished is not None:
            return True
        is_first = not self.num_taken
        return self.has_news and (is_first or self.num_tokens - self.num_taken >= interval)

    @property
    def has_news(self) -> bool:
        """Whether something is kept."""
        return bool(self.pieces or self.reported or self.token_ids)

    def take(self) -> tuple[list[Piece], ReportedTokens, list[int]]:
        """Return the kept tokens and clear them."""
        taken = self.pieces, self.reported, self.token_ids
        self.pieces, self.reported, self.token_ids = [], ReportedTokens(), []
        self.num_taken = self.num_tokens
        return taken

    @property
    def prompt_token_ids(self) -> "array[int] | None":
        """The prompt, if token ids are reported."""
        if not self.plan.return_token_ids:
            return None
        return array("I", self.plan.prompt_token_ids)

    @property
    def usage(self) -> TokenUsage:
        """Token counts of this sequence."""
        return TokenUsage(
            self.plan.num_prompt_tokens, self.num_tokens, self.num_cached, self.num_thought
        )

    @property
    def num_thought(self) -> int | None:
        """Number of tokens that begin in reasoning; None without a reasoning parser."""
        if self._starts is None:
            return None
        before = bisect_left(self._starts, self.thought.start)
        return bisect_left(self._starts, self.thought.stop) - before

    @property
    def mean_logprob(self) -> float:
        """Mean log probability per token."""
        return self.sum_logprobs / max(1, self.num_tokens)

    def feed(
        self, ids: list[int], finished: FinishReason | None, logprobs: bytes
    ) -> tuple[str, ReportedTokens]:
        """Take new tokens; return the text that became final and, if requested, the tokens that
        begin in it.

        A stop token ends the text without being part of it. A stop string sets `finished`, and
        what comes after it is not looked at.

        Args:
            logprobs: a row of `token_logprobs.py` for each, or nothing.
        """
        text = ""
        rows = rows_of(logprobs, len(ids))
        for position, id in enumerate(ids):
            self.num_tokens += 1
            row = rows[position] if rows else None
            self.sum_logprobs += 0.0 if row is None else ROW.unpack_from(row)[0]
            is_stop_token = finished is FinishReason.STOP and position == len(ids) - 1
            if is_stop_token:
                self.stopped_by = id
                if not self.plan.include_stop:
                    break
            if row is not None and self.plan.logprobs is not None:
                self._held.append(id, row, self._num_decoded)
            if self._starts is not None:
                self._starts.append(self._num_decoded)
            decoded = self.stream.feed(id)
            text += self._certain(decoded)
            self.marks.note(id, self._num_decoded, decoded)
            if self.stops.stopped:
                self.finished = FinishReason.STOP
                break
        if finished is not None and not self.stops.stopped:
            text += self._certain(self.stream.flush())
            text += "" if self.stops.stopped else self.stops.flush()
            self.finished = FinishReason.STOP if self.stops.stopped else finished
        if self.stops.stopped:
            self.stopped_by = self.stops.found
        self._num_given += len(text)
        return text, self._released()

    def _released(self) -> ReportedTokens:
        """Return the tokens that begin in the text given; at its end all, but those cut off."""
        count = len(self._held)
        if self.finished is None or self.stops.stopped:
            count = self._held.num_before(self._num_given)
        if not count and not self._held:
            return self._held
        released, self._held = self._held[:count], self._held[count:]
        return released

    def _certain(self, text: str) -> str:
        """Return what cannot be part of a stop string; before min_tokens, nothing is."""
        self._num_decoded += len(text)
        return text if self.num_tokens <= self.plan.min_tokens else self.stops.feed(text)
