"""Stream events in `/openapi.json`, with all of their fields."""

from typing import Literal

from msgspec import UNSET, UnsetType

from headrace.client.responses import ChatLogprobs, ChosenToken, TextLogprobs, Usage
from headrace.tokenizer_proc.openapi.response_schemas import (
    CallItem,
    CustomCallItem,
    Cut,
    GeneratedFields,
    MessageFields,
    MessageItem,
    MessageUsage,
    MetaFields,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseFields,
    ResponseUsage,
    Stopped,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    Typed,
    Whole,
)

# OpenAI's chat completions and completions


class ToldFunction(Whole):
    """More of a function's call: its name at first, then its arguments, piece by piece."""

    arguments: str
    name: str | UnsetType = UNSET


class ToldInput(Whole):
    """More of a custom tool's call: its name at first, then its input."""

    input: str
    name: str | UnsetType = UNSET


class ToldCall(Whole):
    """News of the `index`-th call of an answer; the first has its id."""

    index: int
    function: ToldFunction | UnsetType = UNSET
    custom: ToldInput | UnsetType = UNSET  # in its place, of a custom tool
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET


class ToldDelta(Whole):
    """New content of a message; empty in the last event."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, under vLLM's newer name
    tool_calls: list[ToldCall] | UnsetType = UNSET
    function_call: ToldFunction | UnsetType = UNSET  # in their place, where `functions` were sent


class ChatEventChoice(Whole):
    """New content of one of `n` choices."""

    index: int
    delta: ToldDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] | None
    token_ids: list[int] | UnsetType = UNSET


class TextEventChoice(Whole):
    """New content of one of the continuations."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionFields(Whole, kw_only=True):
    """Fields of both kinds of events. `usage` is there with `stream_options`."""

    id: str
    created: int
    model: str
    system_fingerprint: None
    usage: Usage | UnsetType | None = UNSET


class ChatEvent(CompletionFields):
    """An event of `/v1/chat/completions`; "[DONE]" comes after the last."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatEventChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextEvent(CompletionFields):
    """An event of `/v1/completions`; "[DONE]" comes after the last."""

    object: Literal["text_completion"]
    choices: list[TextEventChoice]


# OpenAI's responses


class ResponseFailure(Whole):
    """Why a response failed."""

    code: str
    message: str


class StreamedResponse(ResponseFields):
    """A response, as far as it has come."""

    error: ResponseFailure | None
    usage: ResponseUsage | None


class ResponseEventFields(Whole):
    """Fields of every event."""

    sequence_number: int


class ResponseNews(ResponseEventFields):
    """A response as it is now."""

    response: StreamedResponse


class Created(ResponseNews, tag_field="type", tag="response.created"):
    """The first event."""


class InProgress(ResponseNews, tag_field="type", tag="response.in_progress"):
    """The second."""


class Completed(ResponseNews, tag_field="type", tag="response.completed"):
    """The last."""


class Incomplete(ResponseNews, tag_field="type", tag="response.incomplete"):
    """The last, where the response was cut off."""


class Failed(ResponseNews, tag_field="type", tag="response.failed"):
    """The last, where something went wrong."""


class ItemNews(ResponseEventFields):
    """An item as it is now."""

    output_index: int
    item: MessageItem | ReasoningItem | CallItem | CustomCallItem


class ItemAdded(ItemNews, tag_field="type", tag="response.output_item.added"):
    """An item begins."""


class ItemDone(ItemNews, tag_field="type", tag="response.output_item.done"):
    """An item is complete."""


class WithinItem(ResponseEventFields):
    """Index of an item in a response."""

    output_index: int
    item_id: str


class WithinContent(WithinItem):
    """Index of a part in an item, which has one part."""

    content_index: int


class PartNews(WithinContent):
    """A part as it is now."""

    part: OutputText | ReasoningText


class PartAdded(PartNews, tag_field="type", tag="response.content_part.added"):
    """A part begins."""


class PartDone(PartNews, tag_field="type", tag="response.content_part.done"):
    """A part is complete."""


class TextDelta(WithinContent, tag_field="type", tag="response.output_text.delta"):
    """More words to the reader."""

    delta: str
    logprobs: list[ChosenToken]


class TextDone(WithinContent, tag_field="type", tag="response.output_text.done"):
    """All of them."""

    text: str
    logprobs: list[ChosenToken]


class ReasoningDelta(WithinContent, tag_field="type", tag="response.reasoning_text.delta"):
    """More thoughts."""

    delta: str


class ReasoningDone(WithinContent, tag_field="type", tag="response.reasoning_text.done"):
    """All of them."""

    text: str


class ArgumentsDelta(WithinItem, tag_field="type", tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(WithinItem, tag_field="type", tag="response.function_call_arguments.done"):
    """All of them."""

    name: str
    arguments: str


class InputDelta(WithinItem, tag_field="type", tag="response.custom_tool_call_input.delta"):
    """More of a custom tool's input."""

    delta: str


class InputDone(WithinItem, tag_field="type", tag="response.custom_tool_call_input.done"):
    """All of it."""

    input: str


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


# Anthropic's messages


class BegunMessage(MessageFields, tag_field="type", tag="message"):
    """A message without content yet."""

    stop_reason: None


class MessageStart(Typed, tag="message_start"):
    """The first event."""

    message: BegunMessage


class BlockStart(Typed, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


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


class BlockDelta(Typed, tag="content_block_delta"):
    """New content of a block."""

    index: int
    delta: MoreText | MoreThoughts | Signature | MoreInput


class BlockStop(Typed, tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageEnd(Whole):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Typed, tag="message_delta"):
    """A message has ended."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Typed, tag="message_stop"):
    """The last event."""


class AnthropicFailure(Whole):
    """The error, in Anthropic's words."""

    type: str
    message: str


class MessageFailed(Typed, tag="error"):
    """The last event, where something went wrong."""

    error: AnthropicFailure


MessageEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessageFailed
)


# SGLang's generate


class MetaSoFar(MetaFields):
    """The `meta_info` of a text so far."""

    finish_reason: Stopped | Cut | None
    e2e_latency: float | UnsetType = UNSET  # seconds, at the end


class GenerateEvent(GeneratedFields):
    """An event of `/generate`: all of a text so far. "[DONE]" comes after the last."""

    meta_info: MetaSoFar
    index: int | UnsetType = UNSET  # of several
