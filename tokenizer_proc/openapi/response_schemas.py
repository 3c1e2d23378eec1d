"""What `/openapi.json` says of the answers that no client of ours reads: all of their fields.

Those that ours reads are in `headrace/client/responses.py`, with what it needs of them.
"""

from typing import Any, Literal

import msgspec

from headrace.client.responses import ChosenToken
from headrace.tokenizer_proc.apis.responses import (
    OfferedFunction,
    Reasoning,
    TextOptions,
    WantedFunction,
)


class Whole(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A struct that has all fields there are."""


class Typed(Whole, tag_field="type"):
    """One of several structs, told apart by their `type`."""


# OpenAI's responses

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Typed, tag="output_text"):
    """Words to the reader."""

    text: str
    annotations: list[Any]
    logprobs: list[ChosenToken]


class ReasoningText(Typed, tag="reasoning_text"):
    """Thoughts."""

    text: str


class MessageItem(Typed, tag="message"):
    """What the model says."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Typed, tag="reasoning"):
    """What it thinks. There is no summary."""

    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class CallItem(Typed, tag="function_call"):
    """What it calls. `arguments` is JSON, if the model got it right."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class CustomCallItem(Typed, tag="custom_tool_call"):
    """What it calls with a text."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str


class InputDetails(Whole):
    """How many tokens of an input were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Whole):
    """How many tokens of an output were thoughts."""

    reasoning_tokens: int


class ResponseUsage(Whole):
    """How many tokens a response took."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Whole):
    """Why a response was cut off."""

    reason: Literal["max_output_tokens"]


class ResponseFields(Whole):
    """What a response has, whole or not. The last group is the request's."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[MessageItem | ReasoningItem | CallItem | CustomCallItem]

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


class Response(ResponseFields):
    """What `/v1/responses` answers."""

    error: None
    usage: ResponseUsage


# Anthropic's messages


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


class MessageFields(Whole):
    """What a message has, whole or not."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_sequence: str | None
    usage: MessageUsage


class AnsweredMessage(MessageFields, tag_field="type", tag="message"):
    """What `/v1/messages` answers."""

    stop_reason: StopReason


class InputTokens(Whole):
    """What `/v1/responses/input_tokens` answers."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class TokenCount(Whole):
    """What `/v1/messages/count_tokens` answers."""

    input_tokens: int


# SGLang's generate

ToldLogprob = tuple[float | None, int, str | None]  # log probability, token id, text


class Stopped(Typed, tag="stop"):
    """It has come to its end: at a stop string or token, if one is told."""

    matched: str | int | None


class Cut(Typed, tag="length"):
    """It was as long as it may be."""

    length: int


class MetaFields(Whole, kw_only=True):
    """What is known of a text, whole or not. The last group is there where it was asked for."""

    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    input_token_logprobs: list[ToldLogprob] = []
    input_top_logprobs: list[list[ToldLogprob] | None] = []
    output_token_logprobs: list[ToldLogprob] = []
    output_top_logprobs: list[list[ToldLogprob] | None] = []


class MetaInfo(MetaFields):
    """What there is to know of a text."""

    finish_reason: Stopped | Cut
    e2e_latency: float  # seconds


class GeneratedFields(Whole):
    """A text, whole or not."""

    text: str
    output_ids: list[int]


class GeneratedText(GeneratedFields):
    """What `/generate` answers, or one of several."""

    meta_info: MetaInfo


Generated = GeneratedText | list[GeneratedText]


# Embeddings


class EmbeddedText(Whole):
    """A text as a vector: numbers, or in base64 little-endian f32."""

    object: Literal["embedding"]
    index: int
    embedding: str | list[float]


class EmbeddingUsage(Whole):
    """How many tokens the texts took."""

    prompt_tokens: int
    total_tokens: int


class Embedded(Whole):
    """What `/v1/embeddings` answers."""

    object: Literal["list"]
    data: list[EmbeddedText]
    model: str
    usage: EmbeddingUsage


# The server


class ProcessHealth(msgspec.Struct):
    """How a process is, and what it does, which depends on its kind."""

    process: str
    state: Literal["absent", "starting", "ready", "dead"]
    silent_s: float
    restarts: int


class Health(Whole):
    """What `/health` and its kin answer."""

    status: Literal["ok", "unhealthy"]
    reasons: list[str]
    loaded: float
    processes: list[ProcessHealth]


class ServerLoad(Whole):
    """What vLLM's `/load` answers."""

    server_load: int


class ModelInfo(Whole):
    """What SGLang's `/model_info` answers."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None
    weight_version: str
    has_image_understanding: bool


class ServerInfo(Whole):
    """What SGLang's `/server_info` answers, as far as there is such a thing here."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
    max_total_num_tokens: int
    version: str
    internal_states: list[dict[str, float]]
