"""What `/openapi.json` says of the answers that no client of ours reads: all of their fields.

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

    input_token_logprobs: list[ToldLogprob] = msgspec.field(default_factory=list)
    input_top_logprobs: list[list[ToldLogprob] | None] = msgspec.field(default_factory=list)
    output_token_logprobs: list[ToldLogprob] = msgspec.field(default_factory=list)
    output_top_logprobs: list[list[ToldLogprob] | None] = msgspec.field(default_factory=list)


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


class ServerInfo(Whole):
    """What SGLang's `/server_info` answers, as far as there is such a thing here."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
    max_total_num_tokens: int
    version: str
    internal_states: list[dict[str, float]]
