"""Anthropic's messages: a message of blocks, whole or as a stream of events.

https://docs.anthropic.com/en/api/messages-streaming. Tokens of the prefix cache are
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
    Choices,
    Logprobs,
    TokenUsage,
)
from headrace.errors import RequestError
from headrace.ipc.messages import FinishReason, ResponsePlan
from headrace.response_bodies.anthropic_messages import (
    BegunMessage,
    BlockDelta,
    BlockNews,
    BlockStart,
    BlockStop,
    MessageBlock,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessagesResponse,
    MessageStart,
    MessageStop,
    MessageUsage,
    MoreInput,
    MoreText,
    MoreThoughts,
    Signature,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ThinkingDetails,
    ToolUseBlock,
)
from headrace.response_bodies.errors import anthropic_error
from headrace.sse import event


def end_of(finished: FinishReason, stopped_by: str | int | None, calls: bool) -> MessageEnd:
    """Return why a message has ended; `calls` is whether it calls tools."""
    match finished:
        case FinishReason.LENGTH:
            return MessageEnd(stop_reason="max_tokens", stop_sequence=None)
        case _ if isinstance(stopped_by, str):
            return MessageEnd(stop_reason="stop_sequence", stop_sequence=stopped_by)
        case _:
            reason: StopReason = "tool_use" if calls else "end_turn"
            return MessageEnd(stop_reason=reason, stop_sequence=None)


def usage_of(usage: TokenUsage) -> MessageUsage:
    """Return the `usage` object."""
    details: ThinkingDetails | msgspec.UnsetType = msgspec.UNSET
    if usage.num_thought is not None:
        details = ThinkingDetails(thinking_tokens=usage.num_thought)
    return MessageUsage(
        input_tokens=usage.num_prompt - usage.num_cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.num_cached,
        output_tokens=usage.num_completion,
        output_tokens_details=details,
    )


def tool_use_block(call: Call) -> ToolUseBlock:
    """Return a block that calls a tool. Arguments that were cut off are no JSON, and left out."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except msgspec.DecodeError:
        arguments = {}
    return ToolUseBlock(id=call.id, name=call.name, input=arguments)


def delta_of(piece: Piece) -> BlockNews | None:
    """Return what a piece adds to its block; the begin of a call adds nothing."""
    match piece:
        case Content(text):
            return MoreText(text=text)
        case Thought(text):
            return MoreThoughts(thinking=text)
        case Arguments(_, text):
            return MoreInput(partial_json=text)
        case ToolCallStart():
            return None
        case _:
            assert_never(piece)


def block_of(piece: Piece) -> MessageBlock:
    """Return the block, empty, that a piece begins."""
    match piece:
        case Content():
            return TextBlock(text="")
        case Thought():
            return ThinkingBlock(thinking="", signature="")
        case ToolCallStart(_, id, name):
            return tool_use_block(Call(id, name, ""))
        case _:
            raise AssertionError("arguments follow the begin of their call")


def typed(body: MessageEvent) -> bytes:
    """Return an event that is named as its type."""
    return event(body, str(body.__struct_config__.tag))


class MessagesRenderer:
    """A `Renderer`. There is one sequence."""

    def __init__(self, plan: ResponsePlan) -> None:
        self._plan = plan
        self._num_blocks = 0
        self._open: type[Piece] | None = None  # of what the block is that is not complete
        self._calls = False
        self._end: MessageEnd | None = None

    @property
    def content_type(self) -> str:
        """The content type of the response."""
        return EVENT_STREAM if self._plan.stream else JSON

    def opening(
        self, index: int, usage: TokenUsage | None = None, prompt_token_ids: list[int] | None = None
    ) -> bytes:
        """Return the begin of the message."""
        assert usage is not None, "every event may have it"
        message = BegunMessage(
            id=self._plan.response_id,
            type="message",
            role="assistant",
            model=self._plan.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=usage_of(usage),
        )
        return typed(MessageStart(message=message))

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
            data += typed(BlockStart(index=self._num_blocks, content_block=block_of(piece)))
        delta = delta_of(piece)
        return data if delta is None else data + self._block_delta(delta)

    def _block_delta(self, delta: BlockNews) -> bytes:
        return typed(BlockDelta(index=self._num_blocks, delta=delta))

    def _block_end(self) -> bytes:
        if self._open is None:
            return b""
        data = b""
        if self._open is Thought:
            data = self._block_delta(Signature(signature=self._plan.response_id))
        self._open = None
        self._num_blocks += 1
        return data + typed(BlockStop(index=self._num_blocks - 1))

    def closing(self, usage: TokenUsage) -> bytes:
        """Return the last events of a stream."""
        assert self._end is not None
        return typed(MessageDelta(delta=self._end, usage=usage_of(usage))) + typed(MessageStop())

    def whole(self, choices: Choices, usage: TokenUsage) -> Iterator[bytes]:
        """Return the body of an answer that does not stream, in slices."""
        (choice,) = choices
        plan = self._plan
        content: list[MessageBlock] = []
        if choice.thought:
            content.append(ThinkingBlock(thinking=choice.thought, signature=plan.response_id))
        if choice.text:
            content.append(TextBlock(text=choice.text))
        content += map(tool_use_block, choice.calls)
        end = end_of(choice.finished, choice.stopped_by, bool(choice.calls))
        body = MessagesResponse(
            id=plan.response_id,
            type="message",
            role="assistant",
            model=plan.model,
            content=content,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=usage_of(usage),
        )
        return slices(body)

    def failure(self, error: RequestError) -> bytes:
        """Return the last event of a stream that fails."""
        return typed(anthropic_error(error))
