"""Anthropic's messages: a message of blocks, whole or as a stream of events.

https://docs.anthropic.com/en/api/messages-streaming. Tokens found in the prefix cache are told as
`cache_read_input_tokens`, and not among the `input_tokens`. The signature of thoughts is the
message's id: clients drop those that have none, and it is not looked at when they come back.
"""

from collections.abc import Iterator
from typing import assert_never

import msgspec

from headrace.detokenizer_proc.parsers.pieces import (
    Arguments,
    Call,
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
from headrace.detokenizer_proc.renderers.sse import event
from headrace.errors import RequestError
from headrace.ipc.messages import FinishReason, ReplyPlan


def end_of(finished: FinishReason | None, stopped_by: str | int | None, calls: bool) -> Object:
    """Return why a message has ended; `calls` is whether it calls tools."""
    reason, found = None, None
    if finished is FinishReason.LENGTH:
        reason = "max_tokens"
    elif finished is not None:
        reason = "tool_use" if calls else "end_turn"
        if isinstance(stopped_by, str):
            reason, found = "stop_sequence", stopped_by
    return {"stop_reason": reason, "stop_sequence": found}


def usage_body(usage: TokenUsage) -> Object:
    """Return the `usage` object."""
    body: Object = {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_completion,
    }
    if usage.num_thought is not None:
        body["output_tokens_details"] = {"thinking_tokens": usage.num_thought}
    return body


def text_block(text: str) -> Object:
    """Return a block of words to the reader."""
    return {"type": "text", "text": text}


def thinking_block(text: str, signature: str) -> Object:
    """Return a block of thoughts."""
    return {"type": "thinking", "thinking": text, "signature": signature}


def tool_use_block(call: Call) -> Object:
    """Return a `tool_use` block. Truncated arguments, which are invalid JSON, become {}."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        arguments = {}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def delta_of(piece: Piece) -> Object | None:
    """Return what a piece adds to its block; the begin of a call adds nothing."""
    match piece:
        case Content(text):
            return {"type": "text_delta", "text": text}
        case Thought(text):
            return {"type": "thinking_delta", "thinking": text}
        case Arguments(_, text):
            return {"type": "input_json_delta", "partial_json": text}
        case ToolCallStart():
            return None
        case _:
            assert_never(piece)


def block_of(piece: Piece) -> Object:
    """Return the block, empty, that a piece begins."""
    match piece:
        case Content():
            return text_block("")
        case Thought():
            return thinking_block("", "")
        case ToolCallStart(_, id, name):
            return tool_use_block(Call(id, name, ""))
        case _:
            raise AssertionError("arguments follow the begin of their call")


def typed(body: Object) -> bytes:
    """Return an event that is named as its type."""
    return event(body, body["type"])


class MessagesRenderer:
    """A `Renderer`. There is one sequence."""

    def __init__(self, plan: ReplyPlan) -> None:
        self._plan = plan
        self._num_blocks = 0
        self._open: type[Piece] | None = None  # of what the block is that is not complete
        self._calls = False
        self._end = end_of(None, None, calls=False)

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        return EVENT_STREAM if self._plan.stream else JSON

    def opening(
        self, index: int, usage: TokenUsage | None = None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """Return the begin of the message."""
        assert usage is not None, "every event may have it"
        return typed({"type": "message_start", "message": self._message([], self._end, usage)})

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
        """Return the events of new text; of the end, that of the last block."""
        data = b"".join(map(self._piece, pieces))
        if finished is not None:
            self._end = end_of(finished, stopped_by, self._calls)
            data += self._block_end()
        return data

    def _piece(self, piece: Piece) -> bytes:
        """Return the events of a piece, which may begin a block."""
        self._calls = self._calls or isinstance(piece, ToolCallStart)
        kind = ToolCallStart if isinstance(piece, Arguments) else type(piece)
        data = b""
        if kind is not self._open or isinstance(piece, ToolCallStart):
            data = self._block_end()
            self._open = kind
            body = {"type": "content_block_start", "index": self._num_blocks}
            data += typed(body | {"content_block": block_of(piece)})
        delta = delta_of(piece)
        return data if delta is None else data + self._block_delta(delta)

    def _block_delta(self, delta: Object) -> bytes:
        return typed({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _block_end(self) -> bytes:
        if self._open is None:
            return b""
        data = b""
        if self._open is Thought:
            data = self._block_delta(
                {"type": "signature_delta", "signature": self._plan.response_id}
            )
        self._open = None
        self._num_blocks += 1
        return data + typed({"type": "content_block_stop", "index": self._num_blocks - 1})

    def closing(self, usage: TokenUsage) -> bytes:
        """Return the last events of a stream."""
        body = {"type": "message_delta", "delta": self._end, "usage": usage_body(usage)}
        return typed(body) + typed({"type": "message_stop"})

    def whole(self, answers: Answers, usage: TokenUsage) -> Iterator[bytes]:
        """Return the body of an answer that does not stream, in slices."""
        (answer,) = answers
        signature = self._plan.response_id
        content = [thinking_block(answer.thought, signature)] if answer.thought else []
        content += [text_block(answer.text)] if answer.text else []
        content += map(tool_use_block, answer.calls)
        end = end_of(answer.finished, answer.stopped_by, bool(answer.calls))
        return slices(self._message(content, end, usage))

    def failure(self, error: RequestError) -> bytes:
        """Return the last event of a stream that fails."""
        return event(error.anthropic_body(), "error")

    def _message(self, content: list[Object], end: Object, usage: TokenUsage) -> Object:
        plan = self._plan
        kind = {"id": plan.response_id, "type": "message", "role": "assistant"}
        body = {"model": plan.model, "content": content} | end
        return kind | body | {"usage": usage_body(usage)}
