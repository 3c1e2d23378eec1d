"""OpenAI's responses: an object with items of output, whole or as a stream of events.

https://platform.openai.com/docs/api-reference/responses-streaming. A stream says what the whole
object says, an item after the other, and then the whole object.
"""

from collections.abc import Iterable, Iterator
from typing import Any, assert_never

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
    Answers,
    Object,
    TokenUsage,
)
from headrace.errors import RequestError
from headrace.ipc.messages import FinishReason, ReplyPlan, ResponsesForm
from headrace.protocol.response_parts import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    OutputText,
    ReasoningText,
    ResponseFailure,
    ResponseUsage,
)
from headrace.protocol.sse import event

DONE_STATUS = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete"}
IN_PROGRESS = "in_progress"


def usage_of(usage: TokenUsage) -> ResponseUsage:
    """Return the `usage` object."""
    return ResponseUsage(
        input_tokens=usage.num_prompt,
        input_tokens_details=InputDetails(cached_tokens=usage.num_cached, cache_write_tokens=0),
        output_tokens=usage.num_completion,
        output_tokens_details=OutputDetails(reasoning_tokens=usage.num_thought or 0),
        total_tokens=usage.num_prompt + usage.num_completion,
    )


class Item:
    """An item of output, which grows while it streams."""

    def __init__(self, begin: Content | Thought | ToolCallStart, id: str) -> None:
        """It is made of pieces like `begin`, whose text is yet to be added."""
        self.begin = begin
        self.id = id
        self.text = ""  # or the arguments of a call
        self.logprobs: list[Any] = []
        self.status = IN_PROGRESS

    def part(self) -> OutputText | ReasoningText:
        """Return the one part of its content. A call has none."""
        if isinstance(self.begin, Thought):
            return ReasoningText(text=self.text)
        return OutputText(text=self.text, annotations=[], logprobs=self.logprobs)

    def body(self) -> Object:
        """Return the item."""
        content = [self.part()] if self.text or self.status != IN_PROGRESS else []
        match self.begin:
            case Content():
                kind: Object = {"type": "message", "role": "assistant", "content": content}
            case Thought():
                kind = {"type": "reasoning", "summary": [], "content": content}
            case ToolCallStart(_, call_id, name, is_custom=True):
                call = {"call_id": call_id, "name": name, "input": self.text}
                kind = {"type": "custom_tool_call"} | call
            case ToolCallStart(_, call_id, name):
                call = {"call_id": call_id, "name": name, "arguments": self.text}
                kind = {"type": "function_call"} | call
            case _:
                assert_never(self.begin)
        return {"id": self.id, "status": self.status} | kind

    def begins(self) -> list[Object]:
        """Return the events with which it begins."""
        added: Object = {"type": "response.output_item.added", "item": self.body()}
        if isinstance(self.begin, ToolCallStart):
            return [added]
        part = {"type": "response.content_part.added", "content_index": 0, "part": self.part()}
        return [added, part]

    def grows(self, text: str, logprobs: list[Any]) -> Object:
        """Add text; return the event."""
        self.text += text
        self.logprobs += logprobs
        match self.begin:
            case Content():
                more = {"content_index": 0, "logprobs": logprobs}
                return {"type": "response.output_text.delta", "delta": text} | more
            case Thought():
                return {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}
            case ToolCallStart(is_custom=True):
                return {"type": "response.custom_tool_call_input.delta", "delta": text}
            case ToolCallStart():
                return {"type": "response.function_call_arguments.delta", "delta": text}
            case _:
                assert_never(self.begin)

    def ends(self, status: str) -> list[Object]:
        """Return the events with which it ends."""
        self.status = status
        item: Object = {"type": "response.output_item.done", "item": self.body()}
        if isinstance(self.begin, ToolCallStart) and self.begin.is_custom:
            return [{"type": "response.custom_tool_call_input.done", "input": self.text}, item]
        if isinstance(self.begin, ToolCallStart):
            call = {"name": self.begin.name, "arguments": self.text}
            return [{"type": "response.function_call_arguments.done"} | call, item]
        done: Object = {"content_index": 0, "text": self.text}
        if isinstance(self.begin, Thought):
            done |= {"type": "response.reasoning_text.done"}
        else:
            done |= {"type": "response.output_text.done", "logprobs": self.logprobs}
        part = {"type": "response.content_part.done", "content_index": 0, "part": self.part()}
        return [done, part, item]


class ResponsesRenderer:
    """A `Renderer`. There is one sequence."""

    def __init__(self, plan: ReplyPlan) -> None:
        assert isinstance(plan.form, ResponsesForm)
        self._plan = plan
        self._echo: Object = msgspec.json.decode(plan.form.echo)
        self._items: list[Item] = []
        self._num_events = 0
        self._finished: FinishReason | None = None

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        return EVENT_STREAM if self._plan.stream else JSON

    def opening(
        self, index: int, usage: TokenUsage | None = None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """Return the events before any output."""
        body = self._response(IN_PROGRESS, None)
        names = ("response.created", "response.in_progress")
        return b"".join(self._event({"type": name, "response": body}) for name in names)

    def delta(
        self,
        index: int,
        pieces: list[Piece],
        finished: FinishReason | None,
        logprobs: Object | None = None,
        usage: TokenUsage | None = None,
        token_ids: list[int] | None = None,
        stopped_by: str | int | None = None,
    ) -> bytes:
        """Return the events of new text, and of the end of the item it ends."""
        told = logprobs["content"] if logprobs else []
        if told and not any(isinstance(piece, Content) for piece in pieces):
            pieces = [*pieces, Content("")]
        bodies = []
        for piece in pieces:
            bodies += self._piece(piece, told if isinstance(piece, Content) else [])
            told = [] if isinstance(piece, Content) else told  # told once
        if finished is not None:
            self._finished = finished
            bodies += [] if self._items else self._begin(Content(""))  # nothing has been said
            bodies += self._end(DONE_STATUS[finished])
        return b"".join(map(self._event, bodies))

    def _piece(self, piece: Piece, logprobs: list[Any]) -> list[Object]:
        """Return the events of a piece, which may begin an item."""
        if isinstance(piece, ToolCallStart):
            return self._begin(piece)
        kind = ToolCallStart if isinstance(piece, Arguments) else type(piece)
        begun = []
        if not (self._items and isinstance(self._items[-1].begin, kind)):
            assert not isinstance(piece, Arguments), "they follow the begin of their call"
            begun = self._begin(piece)
        return [*begun, self._placed(self._items[-1].grows(piece.text, logprobs))]

    def _begin(self, piece: Content | Thought | ToolCallStart) -> list[Object]:
        """Begin an item; return the events of that, and of the end of the one before."""
        ended = self._end("completed")
        self._items.append(Item(piece, item_id(piece, self._plan.response_id, len(self._items))))
        return ended + [self._placed(body) for body in self._items[-1].begins()]

    def _end(self, status: str) -> list[Object]:
        """Return the events of the end of the last item."""
        ended = self._items[-1].ends(status) if self._items else []
        return [self._placed(body) for body in ended]

    def _placed(self, body: Object) -> Object:
        """Return an event with the index of its item."""
        place: Object = {"output_index": len(self._items) - 1}
        if "item" not in body:
            place["item_id"] = self._items[-1].id
        return body | place

    def closing(self, usage: TokenUsage) -> bytes:
        """Return the last event of a stream."""
        assert self._finished is not None
        status = DONE_STATUS[self._finished]
        body = self._response(status, usage)
        return self._event({"type": f"response.{status}", "response": body})

    def failure(self, error: RequestError) -> bytes:
        """Return the last event of a stream that fails."""
        body = self._response("failed", None)
        body["error"] = ResponseFailure(code="server_error", message=str(error))
        return self._event({"type": "response.failed", "response": body})

    def whole(self, answers: Answers, usage: TokenUsage) -> Iterator[bytes]:
        """Return the body of an answer that does not stream, in slices."""
        (answer,) = answers
        if answer.thought:
            self._add(Thought(""), answer.thought)
        if answer.text or not (answer.thought or answer.calls):
            self._add(Content(""), answer.text, (answer.logprobs or {}).get("content", []))
        for index, call in enumerate(answer.calls):
            begin = ToolCallStart(index, call.id, call.name, call.is_custom)
            self._add(begin, call.arguments)
        status = DONE_STATUS[answer.finished]
        self._items[-1].status = status
        return slices(self._response(status, usage))

    def _add(
        self,
        begin: Content | Thought | ToolCallStart,
        text: str,
        logprobs: Iterable[Any] | None = None,
    ) -> None:
        """Add an item that is complete."""
        self._begin(begin)
        self._items[-1].grows(text, list(logprobs or ()))
        self._items[-1].status = "completed"

    def _response(self, status: str, usage: TokenUsage | None) -> Object:
        """Return the response with its output so far."""
        plan, is_cut = self._plan, status == "incomplete"
        return {
            "id": plan.response_id,
            "object": "response",
            "created_at": plan.created,
            "status": status,
            "error": None,
            "incomplete_details": IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            "model": plan.model,
            "output": [item.body() for item in self._items],
            "usage": None if usage is None else usage_of(usage),
        } | self._echo

    def _event(self, body: Object) -> bytes:
        numbered = body | {"sequence_number": self._num_events}
        self._num_events += 1
        return event(numbered, body["type"])


def item_id(piece: Content | Thought | ToolCallStart, response_id: str, index: int) -> str:
    """Return the id of an item. Nothing is stored, so it need not be found again."""
    prefix = {Content: "msg", Thought: "rs", ToolCallStart: "fc"}[type(piece)]
    if isinstance(piece, ToolCallStart) and piece.is_custom:
        prefix = "ctc"
    return f"{prefix}_{response_id.removeprefix('resp_')}{index:02x}"
