"""Stream events in `/openapi.json`, with all of their fields."""

from typing import Literal

from msgspec import UNSET, UnsetType

from headrace.client.responses import ChosenToken, Usage
from headrace.protocol.base import Whole
from headrace.protocol.openai_chunks import ChatEventChoice, TextEventChoice
from headrace.protocol.response_parts import (
    OutputText,
    ReasoningText,
    ResponseFailure,
    ResponseUsage,
)
from headrace.tokenizer_proc.openapi.response_schemas import (
    CallItem,
    CustomCallItem,
    Cut,
    GeneratedFields,
    MessageItem,
    MetaFields,
    ReasoningItem,
    ResponseFields,
    Stopped,
)

# OpenAI's chat completions and completions


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


# SGLang's generate


class MetaSoFar(MetaFields):
    """The `meta_info` of a text so far."""

    finish_reason: Stopped | Cut | None
    e2e_latency: float | UnsetType = UNSET  # seconds, at the end


class GenerateEvent(GeneratedFields):
    """An event of `/generate`: all of a text so far. "[DONE]" comes after the last."""

    meta_info: MetaSoFar
    index: int | UnsetType = UNSET  # of several
