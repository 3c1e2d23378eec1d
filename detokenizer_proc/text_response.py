"""One response: its sequences' text so far, and the bytes it becomes."""

from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import assert_never

from headrace.detokenizer_proc.logprobs import LogprobForms, Object
from headrace.detokenizer_proc.parser_selection import parser_of
from headrace.detokenizer_proc.parsers.pieces import (
    Arguments,
    Content,
    OutputParser,
    Piece,
    ToolCallStart,
    gathered,
    joined,
)
from headrace.detokenizer_proc.renderers.json_slices import LazyList, eager
from headrace.detokenizer_proc.renderers.renderer import Choice, Logprobs, TokenUsage
from headrace.detokenizer_proc.renderers.renderer_selection import renderer_of
from headrace.detokenizer_proc.reported_tokens import ReportedTokens, rows_of
from headrace.detokenizer_proc.sequence_text import SequenceText
from headrace.detokenizer_proc.text import Vocabulary
from headrace.errors import RequestError
from headrace.ipc.messages import (
    ENDED,
    Api,
    FaultKind,
    FinishReason,
    Head,
    ResponsePlan,
    StepOutput,
    Times,
)
from headrace.metrics.tool_calls import reading_of

UNLIMITED: AbstractContextManager[None] = nullcontext()


class TextResponse:
    """The answer to one request, of one or more sequences."""

    def __init__(
        self,
        plan: ResponsePlan,
        vocabulary: Vocabulary,
        limit: AbstractContextManager[None] = UNLIMITED,
        stream_interval: int = 1,
        readings: Counter[int] | None = None,
    ) -> None:
        """Begin one.

        Args:
            limit: within what a parser works that does more than pass text on.
            stream_interval: tokens in each event of a stream, but for its first and last.
            readings: where it is counted how texts were read for calls of tools.
        """
        self._plan = plan
        self._readings = Counter[int]() if readings is None else readings
        self._interval = stream_interval
        self._limit = UNLIMITED if plan.parsing is None else limit
        self._vocabulary = vocabulary
        self._renderer = renderer_of(plan)
        self._forms = LogprobForms(vocabulary, plan.tokens_as_ids)
        self._sequences: dict[int, SequenceText] = {}
        self._parsers: dict[int, OutputParser] = {}
        self.head_sent = False
        self.has_begun = False  # elsewhere: the client has a part of it
        self.has_failed = False
        self.times: Times | None = None

    @property
    def plan(self) -> ResponsePlan:
        """How it is rendered."""
        return self._plan

    @property
    def request_id(self) -> str:
        """The id that the log has of the request."""
        return self._plan.request_id

    @property
    def streams(self) -> bool:
        """Whether it is streamed."""
        return self._plan.stream

    def head(self) -> Head:
        """Return the head of the response."""
        fault = self._plan.fault
        is_cut = fault is not None and fault.kind is FaultKind.CUT
        return Head(200, self._renderer.content_type, self.times, is_cut=is_cut)

    @property
    def is_complete(self) -> bool:
        """Whether all sequences have come and ended."""
        return len(self._sequences) == self._plan.num_sequences and all(
            s.finished is not None for s in self._sequences.values()
        )

    def has(self, index: int) -> bool:
        """Whether a sequence has been opened."""
        return index in self._sequences

    def open(self, plan: ResponsePlan, id: int, output: StepOutput) -> bytes:
        """Begin sequence `id`, of which `output` is the first news; return the bytes to write."""
        sequence = self._sequences[plan.index] = SequenceText.open(plan, self._vocabulary)
        self._parsers[plan.index] = parser_of(plan.parsing, marks=sequence.marks)
        sequence.num_cached = output.cached.get(id, 0)
        sequence.prompt = self._prompt_tokens(id, output)
        echoed = sequence.prompt if plan.echo and plan.logprobs is not None else ReportedTokens()
        if not plan.stream:
            sequence.pieces.append(Content(plan.echo))
            sequence.reported += echoed
            return b""
        usage = self._usage_so_far(sequence)
        prompt = sequence.prompt_token_ids
        ids = None if prompt is None else prompt.tolist()
        opening = self._renderer.opening(plan.index, usage, ids)
        if plan.echo:
            logprobs = eager(self._logprobs(plan, echoed))
            echo: list[Piece] = [Content(plan.echo)]
            opening += self._renderer.delta(plan.index, echo, None, logprobs, usage)
        return opening if plan.num_delivered is None else b""

    def _prompt_tokens(self, id: int, output: StepOutput) -> ReportedTokens:
        """Return a prompt's tokens where their likelihood was wanted, else nothing."""
        stream = self._vocabulary.stream(self._plan.skip_special_tokens)
        tokens = array("I", output.prompts.get(id, b""))
        rows = rows_of(output.prompt_logprobs.get(id, b""), len(tokens) - 1)
        reported, offset = ReportedTokens(), 0
        for token, row in zip(tokens, [memoryview(b""), *rows], strict=False):
            reported.append(token, row, offset)
            offset += len(stream.feed(token))
        return reported

    def feed(
        self,
        index: int,
        ids: list[int],
        finished: FinishReason | None,
        logprobs: bytes,
    ) -> tuple[bytes, bool]:
        """Take a sequence's outputs; `logprobs` has a row of `token_logprobs.py` per id, or is
        empty.

        Returns:
            The bytes to write of a stream, and whether a stop string has just ended the sequence,
            which the engine does not know yet. What does not stream is in `whole`.
        """
        sequence = self._sequences[index]
        if sequence.finished is not None:  # the engine had not heard of the stop string
            return b"", False
        sequence.generated.extend(ids)
        old, is_end_old = self._old_tokens(sequence, len(ids))
        row = len(logprobs) // max(1, len(ids))  # bytes
        # One by one: the client has received these in at most as many pieces.
        for place in range(old):
            end = finished if is_end_old and place == len(ids) - 1 else None
            self._take(sequence, [ids[place]], end, logprobs[place * row : (place + 1) * row])
            if sequence.has_news:
                self._event(index, sequence)
        if sequence.finished is None and (old < len(ids) or finished is not None):
            self._take(sequence, ids[old:], finished, logprobs[old * row :])
        stopped_here = sequence.finished is not None and finished is None
        if not self._plan.stream:
            return b"", stopped_here
        data = b""
        if sequence.is_due(self._interval):
            event = self._event(index, sequence)
            data = b"" if is_end_old else event
        if self.is_complete:
            data += self._renderer.closing(self._usage())
        return data, stopped_here

    def _old_tokens(self, sequence: SequenceText, num_new: int) -> tuple[int, bool]:
        """Return how many of a sequence's new tokens the client has, and whether it has the end."""
        delivered = sequence.plan.num_delivered or 0
        count = min(max((delivered & ~ENDED) - sequence.num_tokens, 0), num_new)
        return count, bool(delivered & ENDED)

    def num_delivered(self, index: int) -> int:
        """Return the delivered tokens of a sequence, as `ResponseFrames` has them."""
        sequence = self._sequences[index]
        return sequence.num_taken | (ENDED if sequence.finished is not None else 0)

    def _take(
        self,
        sequence: SequenceText,
        ids: list[int],
        finished: FinishReason | None,
        logprobs: bytes,
    ) -> None:
        """Keep the reported values of new tokens."""
        parser = self._parsers[sequence.plan.index]
        num_before = sequence.num_tokens
        text, reported = sequence.feed(ids, finished, logprobs)
        with self._limit:
            pieces = parser.feed(text)
            if sequence.finished is not None:
                pieces += parser.flush()
        sequence.thought = parser.thought
        # All that was computed, the stop token included: as many as the usage says.
        new = ids[: sequence.num_tokens - num_before] if self._plan.return_token_ids else None
        if self._plan.api is Api.GENERATE:
            reported = ReportedTokens()
            for id, row in zip(
                ids[: sequence.num_tokens - num_before], rows_of(logprobs, len(ids)), strict=False
            ):
                reported.append(id, row, 0)
        sequence.add(pieces, reported, new or [])

    def _event(self, index: int, sequence: SequenceText) -> bytes:
        """Return the events since the last ones."""
        pieces, reported, token_ids = sequence.take()
        self._count_reading(pieces)
        return self._renderer.delta(
            index,
            joined(pieces),
            sequence.finished,
            eager(self._logprobs(sequence.plan, reported)),
            self._usage_so_far(sequence),
            token_ids if self._plan.return_token_ids else None,
            sequence.stopped_by,
        )

    def _count_reading(self, pieces: list[Piece]) -> None:
        """Count the tool-call parse of a response that may have calls."""
        if self._plan.parsing is not None and self._plan.parsing.tools is not None:
            calls = any(isinstance(piece, ToolCallStart | Arguments) for piece in pieces)
            self._readings[reading_of(self._plan.api, self._plan.stream, calls)] += 1

    @property
    def generated(self) -> "dict[int, array[int]]":
        """All tokens of each sequence, by index."""
        return {index: sequence.generated for index, sequence in self._sequences.items()}

    def end(self, index: int, finished: FinishReason | None) -> None:
        """Record the end of a sequence of a failed response."""
        if finished is not None:
            self._sequences[index].finished = finished

    def failure(self, error: RequestError) -> bytes:
        """Return the end of a stream that fails with `error`."""
        return self._renderer.failure(error)

    def _logprobs(self, plan: ResponsePlan, reported: ReportedTokens) -> Logprobs | None:
        """Return `logprobs` of a choice, or of a piece of it."""
        if not reported or plan.logprobs is None:
            return None
        match plan.api:
            case Api.CHAT | Api.RESPONSES | Api.MESSAGES:
                return self._forms.chat(reported, plan.logprobs)
            case Api.COMPLETION:
                return self._forms.completion(reported, plan.logprobs)
            case Api.GENERATE:
                return self._forms.generate(reported, plan.logprobs)
            case _:
                assert_never(plan.api)

    def _prompt_logprobs(self, sequence: SequenceText) -> LazyList | Object | None:
        """Return the log probabilities of a prompt."""
        num_top = sequence.plan.prompt_logprobs
        if num_top is None:
            return None
        if self._plan.api is Api.GENERATE:
            return self._forms.generate(sequence.prompt, num_top)
        return self._forms.prompt(sequence.prompt, num_top)

    def _usage_so_far(self, sequence: SequenceText) -> TokenUsage | None:
        """Return the usage for an event that is not the last, where that is wanted."""
        return sequence.usage if self._plan.continuous_usage else None

    def _usage(self) -> TokenUsage:
        sequences = self._sequences.values()
        prompts = [s for s in sequences if not s.plan.shares_prompt]
        thought = [s.num_thought for s in sequences]
        return TokenUsage(
            sum(s.plan.num_prompt_tokens for s in prompts),
            sum(s.num_tokens for s in sequences),
            sum(s.num_cached for s in prompts),
            None if None in thought else sum(filter(None, thought)),
        )

    def whole(self) -> Iterator[bytes]:
        """Return the body of an answer that does not stream, complete now, in slices."""
        ordered = [self._sequences[index] for index in sorted(self._sequences)]
        best_of, n = self._plan.best_of, self._plan.n
        best: list[SequenceText] = []
        for first in range(0, len(ordered), best_of):
            group = ordered[first : first + best_of]
            if n < best_of:
                group.sort(key=lambda sequence: sequence.mean_logprob, reverse=True)
            best += group[:n]
        for sequence in best:
            self._count_reading(sequence.pieces)
        return self._renderer.whole(LazyList(best, self._choice), self._usage())

    @property
    def num_reported_bytes(self) -> int:
        """Size of the log probabilities of all sequences, bytes."""
        return sum(s.reported.num_bytes + s.prompt.num_bytes for s in self._sequences.values())

    def _choice(self, sequence: SequenceText) -> Choice:
        assert sequence.finished is not None
        text, thought, calls = gathered(sequence.pieces)
        return Choice(
            text,
            sequence.finished,
            self._logprobs(sequence.plan, sequence.reported),
            self._prompt_logprobs(sequence),
            sequence.token_ids if self._plan.return_token_ids else None,
            sequence.prompt_token_ids,
            thought,
            calls,
            sequence.stopped_by,
            sequence.usage,
        )
