"""OpenAI's responses: an object with items of output, whole or as a stream of events.

https://platform.openai.com/docs/api-reference/responses-streaming. A stream says what the whole
object says, an item after the other, and then the whole object.
"""

from collections.abc import Iterator
from itertools import count
from typing import Any, TypeVar, assert_never

import msgspec

from headrace.detokenizer_proc.parsers.pieces import (
    Arguments,
    Content,
    Piece,
    Thought,
    ToolCallStart,
)
from headrace.detokenizer_proc.renderers.json_slices import slices
from headrace.detokenizer_proc.renderers.renderer import (
    EVENT_STREAM,
    JSON,
    Choices,
    Logprobs,
    Object,
    TokenUsage,
)
from headrace.errors import RequestError
from headrace.ipc.messages import FinishReason, ResponsePlan, ResponsesForm
from headrace.response_bodies.logprobs import ChatCompletionLogProbs
from headrace.response_bodies.openai_responses import (
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    Completed,
    Created,
    CustomCallItem,
    Failed,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputDelta,
    InputDone,
    InputTokensDetails,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseEvent,
    ResponseFailure,
    ResponseUsage,
    Status,
    StreamedResponse,
    TextDelta,
    TextDone,
)
from headrace.sse import event

R = TypeVar("R", bound=StreamedResponse)
DONE_STATUS: dict[FinishReason, Status] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
}


def usage_of(usage: TokenUsage) -> ResponseUsage:
    """Return the `usage` object."""
    details = InputTokensDetails(cached_tokens=usage.num_cached, cache_write_tokens=0)
    return ResponseUsage(
        input_tokens=usage.num_prompt,
        input_tokens_details=details,
        output_tokens=usage.num_completion,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.num_thought or 0),
        total_tokens=usage.num_prompt + usage.num_completion,
    )


class Item:
    """An item of output, which grows while it streams.

    Args:
        begin: the kind of its pieces. Their text is added by `add`.
        index: its place in the response.
        numbers: of the events of the stream.
    """

    def __init__(
        self,
        begin: Content | Thought | ToolCallStart,
        id: str,
        index: int,
        numbers: Iterator[int],
    ) -> None:
        self.begin = begin
        self.id = id
        self.index = index
        self.text = ""  # or the arguments of a call
        self.logprobs: list[Any] = []
        self.status: Status = "in_progress"
        self._numbers = numbers

    def add(self, text: str, logprobs: list[Any]) -> None:
        """Add text."""
        self.text += text
        self.logprobs += logprobs

    def part(self) -> OutputText | ReasoningText:
        """Return the one part of its content. A call has none."""
        if isinstance(self.begin, Thought):
            return ReasoningText(text=self.text)
        return OutputText(text=self.text, annotations=[], logprobs=self.logprobs)

    def body(self) -> OutputItem:
        """Return the item."""
        id, status = self.id, self.status
        content: list[Any] = [self.part()] if self.text or status != "in_progress" else []
        match self.begin:
            case Content():
                return MessageItem(id=id, status=status, role="assistant", content=content)
            case Thought():
                return ReasoningItem(id=id, status=status, summary=[], content=content)
            case ToolCallStart(_, call, name, is_custom=True):
                return CustomCallItem(
                    id=id, status=status, call_id=call, name=name, input=self.text
                )
            case ToolCallStart(_, call, name):
                return CallItem(id=id, status=status, call_id=call, name=name, arguments=self.text)
            case _:
                assert_never(self.begin)

    def begins(self) -> list[ResponseEvent]:
        """Return the events with which it begins."""
        added = ItemAdded(
            item=self.body(), output_index=self.index, sequence_number=next(self._numbers)
        )
        if isinstance(self.begin, ToolCallStart):
            return [added]
        return [added, PartAdded(content_index=0, part=self.part(), **self._place())]

    def grows(self, text: str, logprobs: list[Any]) -> ResponseEvent:
        """Add text; return the event."""
        self.add(text, logprobs)
        place = self._place()
        match self.begin:
            case Content():
                return TextDelta(delta=text, content_index=0, logprobs=logprobs, **place)
            case Thought():
                return ReasoningDelta(content_index=0, delta=text, **place)
            case ToolCallStart(is_custom=True):
                return InputDelta(delta=text, **place)
            case ToolCallStart():
                return ArgumentsDelta(delta=text, **place)
            case _:
                assert_never(self.begin)

    def ends(self, status: Status) -> list[ResponseEvent]:
        """Return the events with which it ends."""
        self.status = status
        found = self._content_ends()
        done = ItemDone(
            item=self.body(), output_index=self.index, sequence_number=next(self._numbers)
        )
        return [*found, done]

    def _content_ends(self) -> list[ResponseEvent]:
        """Return the events that repeat the whole text."""
        text, place = self.text, self._place()
        match self.begin:
            case ToolCallStart(is_custom=True):
                return [InputDone(input=text, **place)]
            case ToolCallStart(name=name):
                return [ArgumentsDone(name=name, arguments=text, **place)]
            case Thought():
                done: ResponseEvent = ReasoningDone(content_index=0, text=text, **place)
            case Content():
                done = TextDone(content_index=0, text=text, logprobs=self.logprobs, **place)
            case _:
                assert_never(self.begin)
        return [done, PartDone(content_index=0, part=self.part(), **self._place())]

    def _place(self) -> Object:
        """Return the fields of an event that name the item, and the event's number."""
        return {
            "output_index": self.index,
            "item_id": self.id,
            "sequence_number": next(self._numbers),
        }


class ResponsesRenderer:
    """A `Renderer`. There is one sequence."""

    def __init__(self, plan: ResponsePlan) -> None:
        assert isinstance(plan.form, ResponsesForm)
        self._plan = plan
        self._echo: Object = dict(msgspec.json.decode(plan.form.echo, type=dict[str, msgspec.Raw]))
        self._items: list[Item] = []
        self._numbers = count()  # of events
        self._finished: FinishReason | None = None

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        return EVENT_STREAM if self._plan.stream else JSON

    def opening(
        self, index: int, usage: TokenUsage | None = None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """Return the events before any output."""
        body = self._response(StreamedResponse, "in_progress", None)
        created = Created(response=body, sequence_number=next(self._numbers))
        return typed(created) + typed(
            InProgress(response=body, sequence_number=next(self._numbers))
        )

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
        """Return the events of new text, and of the end of the item it ends."""
        new = entries_of(logprobs)
        if new and not any(isinstance(piece, Content) for piece in pieces):
            pieces = [*pieces, Content("")]
        events: list[ResponseEvent] = []
        for piece in pieces:
            events += self._piece(piece, new if isinstance(piece, Content) else [])
            new = [] if isinstance(piece, Content) else new  # reported once
        if finished is not None:
            self._finished = finished
            events += [] if self._items else self._begin(Content(""))  # there is no text
            events += self._items[-1].ends(DONE_STATUS[finished])
        return b"".join(map(typed, events))

    def _piece(self, piece: Piece, logprobs: list[Any]) -> list[ResponseEvent]:
        """Return the events of a piece, which may begin an item."""
        if isinstance(piece, ToolCallStart):
            return self._begin(piece)
        kind = ToolCallStart if isinstance(piece, Arguments) else type(piece)
        begun = []
        if not (self._items and isinstance(self._items[-1].begin, kind)):
            assert not isinstance(piece, Arguments), "they follow the begin of their call"
            begun = self._begin(piece)
        return [*begun, self._items[-1].grows(piece.text, logprobs)]

    def _begin(self, piece: Content | Thought | ToolCallStart) -> list[ResponseEvent]:
        """Begin an item; return the events of that, and of the end of the one before."""
        ended = self._items[-1].ends("completed") if self._items else []
        return ended + self._append(piece).begins()

    def _append(self, piece: Content | Thought | ToolCallStart) -> Item:
        """Return a new item."""
        index = len(self._items)
        id = item_id(piece, self._plan.response_id, index)
        self._items.append(Item(piece, id, index, self._numbers))
        return self._items[-1]

    def closing(self, usage: TokenUsage) -> bytes:
        """Return the last event of a stream."""
        assert self._finished is not None
        status = DONE_STATUS[self._finished]
        kind = Completed if status == "completed" else Incomplete
        body = self._response(StreamedResponse, status, usage)
        return typed(kind(response=body, sequence_number=next(self._numbers)))

    def failure(self, error: RequestError) -> bytes:
        """Return the last event of a stream that fails."""
        body = self._response(StreamedResponse, "failed", None)
        body.error = ResponseFailure(code="server_error", message=str(error))
        return typed(Failed(response=body, sequence_number=next(self._numbers)))

    def whole(self, choices: Choices, usage: TokenUsage) -> Iterator[bytes]:
        """Return the body of an answer that does not stream, in slices."""
        (choice,) = choices
        if choice.thought:
            self._add(Thought(""), choice.thought, [])
        if choice.text or not (choice.thought or choice.calls):
            self._add(Content(""), choice.text, entries_of(choice.logprobs))
        for index, call in enumerate(choice.calls):
            begin = ToolCallStart(index, call.id, call.name, call.is_custom)
            self._add(begin, call.arguments, [])
        status = DONE_STATUS[choice.finished]
        self._items[-1].status = status
        return slices(self._response(Response, status, usage))

    def _add(
        self, begin: Content | Thought | ToolCallStart, text: str, logprobs: list[Any]
    ) -> None:
        """Add an item that is complete."""
        item = self._append(begin)
        item.add(text, logprobs)
        item.status = "completed"

    def _response(self, kind: type[R], status: Status, usage: TokenUsage | None) -> R:
        """Return the response with its output so far."""
        plan, is_cut = self._plan, status == "incomplete"
        return kind(
            id=plan.response_id,
            object="response",
            created_at=plan.created,
            status=status,
            error=None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            model=plan.model,
            output=[item.body() for item in self._items],
            usage=None if usage is None else usage_of(usage),
            **self._echo,
        )


def entries_of(logprobs: Logprobs | None) -> list[Any]:
    """Return the entries of log probabilities."""
    if logprobs is None:
        return []
    assert isinstance(logprobs, ChatCompletionLogProbs)
    return list(logprobs.content)


def typed(body: ResponseEvent) -> bytes:
    """Return an event that is named as its type."""
    return event(body, str(body.__struct_config__.tag))


def item_id(piece: Content | Thought | ToolCallStart, response_id: str, index: int) -> str:
    """Return the id of an item. Nothing is stored, so it need not be found again."""
    prefix = {Content: "msg", Thought: "rs", ToolCallStart: "fc"}[type(piece)]
    if isinstance(piece, ToolCallStart) and piece.is_custom:
        prefix = "ctc"
    return f"{prefix}_{response_id.removeprefix('resp_')}{index:02x}"
