"""OpenAI's responses: the object, its items of output and its events, with fields in wire order.

https://platform.openai.com/docs/api-reference/responses/object
"""

from typing import Any, Literal

from headrace.response_bodies.base import Typed, Whole
from headrace.response_bodies.logprobs import ChatCompletionLogProbsContent
from headrace.response_bodies.response_options import (
    OfferedFunction,
    Reasoning,
    TextOptions,
    WantedFunction,
)

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Typed, tag="output_text"):
    """Text of the response."""

    text: str
    annotations: list[Any]
    logprobs: list[ChatCompletionLogProbsContent]


class ReasoningText(Typed, tag="reasoning_text"):
    """Thoughts."""

    text: str


class MessageItem(Typed, tag="message"):
    """The model's text."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Typed, tag="reasoning"):
    """The model's reasoning. There is no summary."""

    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class CallItem(Typed, tag="function_call"):
    """A tool call. `arguments` is JSON if the model wrote it correctly."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class CustomCallItem(Typed, tag="custom_tool_call"):
    """A call of a custom tool, with a text."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputTokensDetails(Whole):
    """Number of input tokens found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Whole):
    """Number of reasoning tokens of an output."""

    reasoning_tokens: int


class ResponseUsage(Whole):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Whole):
    """Why a response was cut off."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(Whole):
    """Why a response has failed."""

    code: str
    message: str


class StreamedResponse(Whole, kw_only=True):
    """A response so far. The last group repeats the request's."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None

    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | WantedFunction
    tools: list[OfferedFunction]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None


class Response(StreamedResponse, kw_only=True):
    """Response of `/v1/responses`."""

    error: None
    usage: ResponseUsage


# Events. Each has its number in the stream; those of an item have its index and id.


class ResponseState(Whole, kw_only=True):
    """The state of a response."""

    response: StreamedResponse
    sequence_number: int


class Created(ResponseState, tag_field="type", tag="response.created"):
    """The first event."""


class InProgress(ResponseState, tag_field="type", tag="response.in_progress"):
    """The second."""


class Completed(ResponseState, tag_field="type", tag="response.completed"):
    """The last."""


class Incomplete(ResponseState, tag_field="type", tag="response.incomplete"):
    """The last, where the response was cut off."""


class Failed(ResponseState, tag_field="type", tag="response.failed"):
    """The last of a response that fails."""


class ItemState(Whole, kw_only=True):
    """The state of an item."""

    item: OutputItem
    output_index: int
    sequence_number: int


class ItemAdded(ItemState, tag_field="type", tag="response.output_item.added"):
    """An item begins."""


class ItemDone(ItemState, tag_field="type", tag="response.output_item.done"):
    """An item is complete."""


class PartState(Whole, kw_only=True):
    """The state of the one part of an item."""

    content_index: int
    part: OutputText | ReasoningText
    output_index: int
    item_id: str
    sequence_number: int


class PartAdded(PartState, tag_field="type", tag="response.content_part.added"):
    """A part begins."""


class PartDone(PartState, tag_field="type", tag="response.content_part.done"):
    """A part is complete."""


class TextDelta(Typed, tag="response.output_text.delta"):
    """More text."""

    delta: str
    content_index: int
    logprobs: list[ChatCompletionLogProbsContent]
    output_index: int
    item_id: str
    sequence_number: int


class TextDone(Typed, tag="response.output_text.done"):
    """All text of a part."""

    content_index: int
    text: str
    logprobs: list[ChatCompletionLogProbsContent]
    output_index: int
    item_id: str
    sequence_number: int


class ReasoningDelta(Typed, tag="response.reasoning_text.delta"):
    """More thoughts."""

    content_index: int
    delta: str
    output_index: int
    item_id: str
    sequence_number: int


class ReasoningDone(Typed, tag="response.reasoning_text.done"):
    """All thoughts of a part."""

    content_index: int
    text: str
    output_index: int
    item_id: str
    sequence_number: int


class ArgumentsDelta(Typed, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str
    output_index: int
    item_id: str
    sequence_number: int


class ArgumentsDone(Typed, tag="response.function_call_arguments.done"):
    """All arguments of a call."""

    name: str
    arguments: str
    output_index: int
    item_id: str
    sequence_number: int


class InputDelta(Typed, tag="response.custom_tool_call_input.delta"):
    """More of a custom tool's input."""

    delta: str
    output_index: int
    item_id: str
    sequence_number: int


class InputDone(Typed, tag="response.custom_tool_call_input.done"):
    """All input of a custom tool."""

    input: str
    output_index: int
    item_id: str
    sequence_number: int


ResponseEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
)
