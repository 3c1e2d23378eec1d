"""OpenAI's chat completions and completions: bodies and chunks, with fields in wire order.

https://platform.openai.com/docs/api-reference/chat/streaming
"""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from headrace.response_bodies.base import Whole
from headrace.response_bodies.logprobs import (
    ChatCompletionLogProbs,
    CompletionLogProbs,
    PromptLogProbs,
)


class PromptTokensDetails(Whole):
    """Number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Whole):
    """Number of reasoning tokens in a response."""

    reasoning_tokens: int


class UsageInfo(Whole):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class FunctionCallBody(Whole):
    """A call of a function. `arguments` is JSON if the model wrote it correctly."""

    name: str
    arguments: str


class CustomCallBody(Whole):
    """A call of a custom tool, with a text."""

    name: str
    input: str


class ChatCompletionToolCall(Whole):
    """A tool call of a message."""

    id: str
    type: Literal["function", "custom"]
    function: FunctionCallBody | UnsetType = UNSET
    custom: CustomCallBody | UnsetType = UNSET  # in its place, of a custom tool


class ChatCompletionMessage(Whole):
    """The assistant's message. `content` is None if it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, under vLLM's newer name
    tool_calls: list[ChatCompletionToolCall] | UnsetType = UNSET
    function_call: FunctionCallBody | UnsetType = UNSET  # in their place, with `functions`


class ChatCompletionResponseChoice(Whole):
    """One of `n` responses."""

    index: int
    message: ChatCompletionMessage
    logprobs: ChatCompletionLogProbs | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponseChoice(Whole):
    """One of the continuations."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogProbs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class DeltaFunctionCall(Whole, kw_only=True):
    """More of a function's call: its name at first, then its arguments, piece by piece."""

    name: str | UnsetType = UNSET
    arguments: str


class DeltaCustomCall(Whole, kw_only=True):
    """More of a custom tool's call: its name at first, then its input."""

    name: str | UnsetType = UNSET
    input: str


class DeltaToolCall(Whole):
    """More of the `index`-th call of a response; the first has its id."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: DeltaFunctionCall | UnsetType = UNSET
    custom: DeltaCustomCall | UnsetType = UNSET  # in its place, of a custom tool


class DeltaMessage(Whole):
    """The new part of a message; empty at its end."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, under vLLM's newer name
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET
    function_call: DeltaFunctionCall | UnsetType = UNSET  # in their place, with `functions`


class ChatCompletionResponseStreamChoice(Whole):
    """The new part of one of `n` responses."""

    index: int
    delta: DeltaMessage
    logprobs: ChatCompletionLogProbs | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] | None
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponseStreamChoice(Whole):
    """The new part of one of the continuations."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionFields(Whole, kw_only=True):
    """Fields of all bodies and events of both APIs."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: None
    choices: list[Any]


class ChatCompletionResponse(CompletionFields, kw_only=True):
    """Response of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogProbs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(CompletionFields, kw_only=True):
    """Response of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionResponseChoice]
    usage: UsageInfo


class ChatCompletionStreamResponse(CompletionFields, kw_only=True):
    """An event of `/v1/chat/completions`; "[DONE]" follows the last. `usage` needs an option."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionStreamResponse(CompletionFields, kw_only=True):
    """An event of `/v1/completions`; "[DONE]" follows the last. `usage` needs an option."""

    object: Literal["text_completion"]
    choices: list[CompletionResponseStreamChoice]
    usage: UsageInfo | UnsetType | None = UNSET
