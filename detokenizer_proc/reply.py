"""One reply: its sequences' text so far, and the bytes it becomes."""

from dataclasses import dataclass, field

from headrace.detokenizer_proc.openai_responses import Renderer, Usage
from headrace.detokenizer_proc.stops import StopMatcher
from headrace.detokenizer_proc.text import TextStream, Vocabulary
from headrace.messages import FinishReason, ReplyPlan


@dataclass(slots=True)
class SequenceText:
    """The text of one sequence."""

    plan: ReplyPlan
    stream: TextStream
    stops: StopMatcher
    num_tokens: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache
    finished: FinishReason | None = None
    parts: list[str] = field(default_factory=list)  # kept where the reply does not stream

    @classmethod
    def open(cls, plan: ReplyPlan, vocabulary: Vocabulary) -> "SequenceText":
        """Begin as `plan` says."""
        stops = StopMatcher(plan.stop, plan.include_stop)
        return cls(plan, vocabulary.stream(plan.skip_special_tokens), stops)

    def feed(self, ids: list[int], finished: FinishReason | None) -> str:
        """Take new tokens and return the text that became certain.

        A stop token ends the text without being part of it. A stop string sets `finished`, and
        what comes after it is not looked at.
        """
        text = ""
        for position, id in enumerate(ids):
            self.num_tokens += 1
            is_stop_token = finished is FinishReason.STOP and position == len(ids) - 1
            if is_stop_token and not self.plan.include_stop:
                break
            text += self.stops.feed(self.stream.feed(id))
            if self.stops.stopped:
                self.finished = FinishReason.STOP
                return text
        if finished is not None:
            text += self.stops.feed(self.stream.flush())
            text += "" if self.stops.stopped else self.stops.flush()
            self.finished = FinishReason.STOP if self.stops.stopped else finished
        return text


class Reply:
    """The answer to one request, of one or more sequences."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan = plan
        self._renderer = Renderer(plan)
        self._sequences: dict[int, SequenceText] = {}
        self.head_sent = False

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        return self._renderer.content_type

    @property
    def is_complete(self) -> bool:
        """Whether all sequences have come and ended."""
        return len(self._sequences) == self._plan.num_sequences and all(
            s.finished is not None for s in self._sequences.values()
        )

    def open(self, plan: ReplyPlan, vocabulary: Vocabulary, num_cached: int = 0) -> bytes:
        """Begin a sequence; return the bytes to write."""
        sequence = self._sequences[plan.index] = SequenceText.open(plan, vocabulary)
        sequence.num_cached = num_cached
        if not self._plan.stream:
            sequence.parts.append(plan.echo)
            return b""
        opening = self._renderer.opening(plan.index)
        if plan.echo:
            opening += self._renderer.delta(plan.index, plan.echo, None)
        return opening

    def feed(self, index: int, ids: list[int], finished: FinishReason | None) -> tuple[bytes, bool]:
        """Take a sequence's news.

        Returns:
            The bytes to write, and whether a stop string has just ended the sequence, which the
            engine does not know yet.
        """
        sequence = self._sequences[index]
        if sequence.finished is not None:  # the engine had not heard of the stop string
            return b"", False
        text = sequence.feed(ids, finished)
        stopped_here = sequence.finished is not None and finished is None
        if not self._plan.stream:
            sequence.parts.append(text)
            return (self._whole() if self.is_complete else b""), stopped_here
        data = b""
        if text or sequence.finished is not None:
            data = self._renderer.delta(index, text, sequence.finished)
        if self.is_complete:
            data += self._renderer.closing(self._usage())
        return data, stopped_here

    def _usage(self) -> Usage:
        sequences = self._sequences.values()
        prompts = [s for s in sequences if not s.plan.shares_prompt]
        return Usage(
            sum(s.plan.num_prompt_tokens for s in prompts),
            sum(s.num_tokens for s in sequences),
            sum(s.num_cached for s in prompts),
        )

    def _whole(self) -> bytes:
        ordered = [self._sequences[index] for index in sorted(self._sequences)]
        texts = ["".join(s.parts) for s in ordered]
        finished = [s.finished for s in ordered if s.finished is not None]
        return self._renderer.whole(texts, finished, self._usage())
