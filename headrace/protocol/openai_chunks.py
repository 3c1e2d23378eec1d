"""Choices of OpenAI's chunks, with their fields in the order that clients see.

https://platform.openai.com/docs/api-reference/chat/streaming
"""

from typing import Literal

from msgspec import UNSET, UnsetType

from headrace.client.responses import ChatLogprobs, TextLogprobs
from headrace.protocol.base import Whole


class ToldFunction(Whole, kw_only=True):
    """More of a function's call: its name at first, then its arguments, piece by piece."""

    name: str | UnsetType = UNSET
    arguments: str


class ToldInput(Whole, kw_only=True):
    """More of a custom tool's call: its name at first, then its input."""

    name: str | UnsetType = UNSET
    input: str


class ToldCall(Whole):
    """News of the `index`-th call of an answer; the first has its id."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: ToldFunction | UnsetType = UNSET
    custom: ToldInput | UnsetType = UNSET  # in its place, of a custom tool


class ToldDelta(Whole):
    """What is new in a message; nothing, where it only ends."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, under vLLM's newer name
    tool_calls: list[ToldCall] | UnsetType = UNSET
    function_call: ToldFunction | UnsetType = UNSET  # in their place, where `functions` were sent


class ChatEventChoice(Whole):
    """What is new in one of `n` answers."""

    index: int
    delta: ToldDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] | None
    token_ids: list[int] | UnsetType = UNSET


class TextEventChoice(Whole):
    """What is new in one of the continuations."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
