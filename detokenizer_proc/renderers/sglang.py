"""SGLang's `/generate`: text and `meta_info`, per sequence.

https://docs.sglang.ai/basic_usage/native_api.html. As there, each event of a stream has all of the
text so far.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headrace.detokenizer_proc.parsers.pieces import Content, Piece
from headrace.detokenizer_proc.renderers.json_slices import LazyList, parts, slices
from headrace.detokenizer_proc.renderers.renderer import (
    EVENT_STREAM,
    JSON,
    Choice,
    Choices,
    Logprobs,
    Object,
    TokenUsage,
)
from headrace.errors import RequestError
from headrace.ipc.messages import FinishReason, GenerateForm, ResponsePlan
from headrace.response_bodies.errors import openai_error
from headrace.response_bodies.sglang_generate import (
    Cut,
    GeneratedText,
    GenerateEvent,
    MetaInfo,
    MetaSoFar,
    Stopped,
)
from headrace.sse import DONE, event

NO_LOGPROBS: Object = {"token_logprobs": [], "top_logprobs": []}
Columns = dict[str, Any]  # of JSON values


@dataclass(slots=True)
class Grown:
    """A JSON string or list that grows. Each part is encoded once, however often the value is
    sent."""

    marks: bytes  # the first and the last
    data: bytearray = field(default_factory=bytearray)

    def extend(self, value: Any) -> None:
        """Add a text or a list."""
        data = b"".join(parts(value))[1:-1]
        if self.data and data and self.marks == b"[]":
            self.data += b","
        self.data += data

    @property
    def raw(self) -> msgspec.Raw:
        """All of it."""
        return msgspec.Raw(self.marks[:1] + self.data + self.marks[1:])


@dataclass(slots=True)
class SentText:
    """The part of a sequence that a stream has sent."""

    text: Grown = field(default_factory=lambda: Grown(b'""'))
    token_ids: Grown = field(default_factory=lambda: Grown(b"[]"))
    columns: dict[str, Grown] = field(default_factory=dict)  # of its log probabilities


class GenerateRenderer:
    """A `Renderer`."""

    def __init__(self, plan: ResponsePlan, clock: Callable[[], float]) -> None:
        """`clock` returns seconds since the epoch."""
        assert isinstance(plan.form, GenerateForm)
        self._plan = plan
        self._form = plan.form
        self._clock = clock
        self._sent: dict[int, SentText] = {}

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        return EVENT_STREAM if self._plan.stream else JSON

    def opening(
        self, index: int, usage: TokenUsage | None = None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """Return nothing: this API has no event before the first token."""
        self._sent[index] = SentText()
        return b""

    def delta(
        self,
        index: int,
        pieces: list[Piece],
        finished: FinishReason | None,
        logprobs: Logprobs | None = None,
        usage: TokenUsage | None = None,
        token_ids: list[int] | None = None,
        stopped_by: str | int | None = None,
    ) -> bytes:
        """Return the event of new text or tokens, of the end, or of both."""
        assert usage is not None, "every event has it"
        sent = self._sent[index]
        sent.text.extend("".join(piece.text for piece in pieces if isinstance(piece, Content)))
        sent.token_ids.extend(token_ids or [])
        num_top = self._of(self._form.num_logprobs, index)
        if num_top is not None:
            new = self._columns("output", logprobs or NO_LOGPROBS, num_top)
            for name, column in new.items():
                sent.columns.setdefault(name, Grown(b"[]")).extend(column)
        columns: Columns = {name: grown.raw for name, grown in sent.columns.items()}
        meta = MetaSoFar(
            id=self._id(index),
            **columns,
            **self._ending(finished, stopped_by, usage),
        )
        text: Any = sent.text.raw
        ids: Any = sent.token_ids.raw
        place = index if self._form.is_list else UNSET
        return event(GenerateEvent(text=text, output_ids=ids, meta_info=meta, index=place))

    def closing(self, usage: TokenUsage) -> bytes:
        """Return the last event of a stream."""
        return DONE

    def failure(self, error: RequestError) -> bytes:
        """Return the last events of a stream that fails."""
        return event(openai_error(error)) + DONE

    def whole(self, choices: Choices, usage: TokenUsage) -> Iterator[bytes]:
        """Return the body of an answer that does not stream, in slices."""
        if not self._form.is_list:
            return slices(self._generated(0, choices[0]))
        return slices(
            LazyList(
                range(len(choices)), lambda index: self._generated(index, choices[index]), True
            )
        )

    def _generated(self, index: int, choice: Choice) -> GeneratedText:
        assert choice.usage is not None and choice.token_ids is not None
        num_top = self._of(self._form.num_logprobs, index)
        columns: Columns = {}
        if num_top is not None:
            columns = self._columns("output", choice.logprobs or NO_LOGPROBS, num_top)
            of_prompt = self._of_prompt(index, choice.prompt_logprobs)
            columns |= self._columns("input", of_prompt, num_top)
        ending = self._ending(choice.finished, choice.stopped_by, choice.usage)
        meta = MetaInfo(id=self._id(index), **columns, **ending)
        return GeneratedText(text=choice.text, output_ids=choice.token_ids, meta_info=meta)

    def _id(self, index: int) -> str:
        """Return the client's id of a sequence; ids of several have a suffix."""
        form = self._form
        id = form.ids[index // form.num_each] if form.ids else self._plan.response_id
        number = index % form.num_each if form.ids else index
        return f"{id}_{number}" if form.is_list and (not form.ids or form.num_each > 1) else id

    def _ending(
        self, finished: FinishReason | None, stopped_by: str | int | None, usage: TokenUsage
    ) -> Object:
        """Return the finish reason and token counts of a sequence."""
        count = usage.num_completion
        reason: Stopped | Cut | None = None
        latency: float | UnsetType = UNSET
        if finished is not None:
            is_cut = finished is FinishReason.LENGTH
            reason = Cut(length=count) if is_cut else Stopped(matched=stopped_by)
            latency = max(0.0, self._clock() - self._form.received_at)
        return {
            "finish_reason": reason,
            "prompt_tokens": usage.num_prompt,
            "completion_tokens": count,
            "cached_tokens": usage.num_cached,
            "e2e_latency": latency,
        }

    def _of(self, values: list[int | None], index: int) -> int | None:
        """Return the requested value for the prompt of a sequence."""
        return values[index // self._form.num_each if len(values) > 1 else 0]

    def _of_prompt(self, index: int, logprobs: object) -> Object:
        """Return the fields about a prompt. The first reported token has no known predecessor."""
        first = self._of(self._form.first_logprob, index)
        if first is None or not isinstance(logprobs, dict):
            return NO_LOGPROBS
        tokens, tops = (logprobs[name] for name in NO_LOGPROBS)
        places = range(first, len(tokens))

        def token_of(place: int) -> list[Any]:
            token: list[Any] = tokens[place]
            return [None, *token[1:]] if place == first else token

        def top_of(place: int) -> list[Any] | None:
            top: list[Any] | None = tops[place]
            return None if place == first else top

        return {
            "token_logprobs": LazyList(places, token_of),
            "top_logprobs": LazyList(places, top_of),
        }

    def _columns(self, of: str, logprobs: Logprobs, num_top: int | None) -> Columns:
        """Return the log probabilities of the `input` or the `output`, as they are called."""
        assert isinstance(logprobs, dict)
        columns: Columns = {
            f"{of}_token_logprobs": LazyList(logprobs["token_logprobs"], self._spelled)
        }
        if num_top:
            columns[f"{of}_top_logprobs"] = LazyList(logprobs["top_logprobs"], self._spelled_top)
        return columns

    def _spelled_top(self, top: list[Any] | None) -> list[Any] | None:
        return top and [self._spelled(one) for one in top]

    def _spelled(self, token: list[Any]) -> list[Any]:
        return token if self._form.tells_token_text else [*token[:2], None]
