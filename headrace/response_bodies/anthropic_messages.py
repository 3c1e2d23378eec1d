"""Anthropic's messages: bodies and events, with their fields in the order that clients see.

https://docs.anthropic.com/en/api/messages-streaming
"""

from typing import Any, Literal

import msgspec

from headrace.response_bodies.base import Typed, Whole
from headrace.response_bodies.errors import AnthropicError


class TextBlock(Typed, tag="text"):
    """Words to the reader."""

    text: str


class ThinkingBlock(Typed, tag="thinking"):
    """Thoughts. The signature is the message's id."""

    thinking: str
    signature: str


class ToolUseBlock(Typed, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: Any  # an object, if the model got it right


MessageBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingDetails(Whole):
    """How many of the tokens are thoughts."""

    thinking_tokens: int


class MessageUsage(Whole):
    """How many tokens a message took; `input_tokens` are those that were not in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingDetails | msgspec.UnsetType = msgspec.UNSET


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageFields(Whole, kw_only=True):
    """What a message has, whole or not."""

    id: str
    type: Literal["message"]  # not a tag, which would come before the id
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessagesResponse(MessageFields, kw_only=True):
    """What `/v1/messages` answers."""

    stop_reason: StopReason


class BegunMessage(MessageFields, kw_only=True):
    """A message that has yet to say something."""

    stop_reason: None


class MessageStart(Typed, tag="message_start"):
    """The first event."""

    message: BegunMessage


class BlockStart(Typed, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: MessageBlock


class MoreText(Typed, tag="text_delta"):
    """More words to the reader."""

    text: str


class MoreThoughts(Typed, tag="thinking_delta"):
    """More thoughts."""

    thinking: str


class Signature(Typed, tag="signature_delta"):
    """The end of thoughts."""

    signature: str


class MoreInput(Typed, tag="input_json_delta"):
    """More of a call's input."""

    partial_json: str


BlockNews = MoreText | MoreThoughts | Signature | MoreInput


class BlockDelta(Typed, tag="content_block_delta"):
    """A block goes on."""

    index: int
    delta: BlockNews


class BlockStop(Typed, tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageEnd(Whole):
    """Why a message has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Typed, tag="message_delta"):
    """A message has ended."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Typed, tag="message_stop"):
    """The last event."""


MessageEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | AnthropicError
)
