"""Responses in `/openapi.json` that the client does not read, with all of their fields.

Those that ours reads are in `headrace/client/responses.py`, with what it needs of them.
"""

from typing import Any, Literal

import msgspec

from headrace.protocol.base import Typed, Whole
from headrace.protocol.response_parts import (
    IncompleteDetails,
    OutputText,
    ReasoningText,
    ResponseUsage,
)
from headrace.tokenizer_proc.apis.responses import (
    OfferedFunction,
    Reasoning,
    TextOptions,
    WantedFunction,
)

# OpenAI's responses

Status = Literal["in_progress", "completed", "incomplete", "failed"]


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


class ResponseFields(Whole):
    """Fields of a response, whole or not. The last group repeats the request's."""

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
    """Response of `/v1/responses`."""

    error: None
    usage: ResponseUsage


class InputTokens(Whole):
    """Response of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class TokenCount(Whole):
    """Response of `/v1/messages/count_tokens`."""

    input_tokens: int


# SGLang's generate

ToldLogprob = tuple[float | None, int, str | None]  # log probability, token id, text


class Stopped(Typed, tag="stop"):
    """The text ended at a stop string or token, which is reported if known."""

    matched: str | int | None


class Cut(Typed, tag="length"):
    """It was as long as it may be."""

    length: int


class MetaFields(Whole, kw_only=True):
    """Metadata of a text, whole or not. The last group is there if requested."""

    id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    input_token_logprobs: list[ToldLogprob] = msgspec.field(default_factory=list)
    input_top_logprobs: list[list[ToldLogprob] | None] = msgspec.field(default_factory=list)
    output_token_logprobs: list[ToldLogprob] = msgspec.field(default_factory=list)
    output_top_logprobs: list[list[ToldLogprob] | None] = msgspec.field(default_factory=list)


class MetaInfo(MetaFields):
    """Metadata of a text."""

    finish_reason: Stopped | Cut
    e2e_latency: float  # seconds


class GeneratedFields(Whole):
    """A text, whole or not."""

    text: str
    output_ids: list[int]


class GeneratedText(GeneratedFields):
    """Response of `/generate`, or one of several."""

    meta_info: MetaInfo


Generated = GeneratedText | list[GeneratedText]


# The server


class ProcessHealth(msgspec.Struct):
    """Status of a process, with fields that depend on its role."""

    process: str
    state: Literal["absent", "starting", "ready", "dead"]
    silent_s: float
    restarts: int


class Health(Whole):
    """Response of `/health` and its kin."""

    status: Literal["ok", "unhealthy"]
    reasons: list[str]
    loaded: float
    processes: list[ProcessHealth]


class ServerLoad(Whole):
    """Response of vLLM's `/load`."""

    server_load: int


class ModelInfo(Whole):
    """Response of SGLang's `/model_info`."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None
    weight_version: str


class ServerInfo(Whole):
    """Response of SGLang's `/server_info`, limited to what applies here."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
    max_total_num_tokens: int
    version: str
    internal_states: list[dict[str, float]]
