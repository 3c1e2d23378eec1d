"""OpenAI's request bodies as structs, and their validation.

msgspec decodes and checks types in one pass; unknown fields are ignored, as OpenAI's servers do.
Fields that OpenAI knows and this server does not act on are refused when they ask for something,
never dropped in silence. https://platform.openai.com/docs/api-reference
"""

import re
from typing import Any, TypeVar

import msgspec

from headrace.errors import InvalidBody, InvalidValue, Unsupported

B = TypeVar("B")

MAX_STOP_STRINGS = 32
MAX_SEQUENCES_PER_REQUEST = 128
COMPLETION_MAX_TOKENS = 16  # OpenAI's default on /v1/completions
LOCATION = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<where>.*)`)?$", re.DOTALL)


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool = False


class ResponseFormat(msgspec.Struct):
    """`response_format`."""

    type: str = "text"


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both kinds of generation take. The second group is vLLM's and SGLang's."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    top_k: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class TextPart(msgspec.Struct):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of `/v1/completions`. A prompt is text or token ids; there may be several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None


class Body:
    """A decoder for one kind of body."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

    def decode(self, body: bytes | memoryview) -> Any:
        """Decode a body.

        Raises:
            InvalidBody: it is not JSON, or a field has the wrong type; the text names it.
        """
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            parts = LOCATION.match(str(error))
            assert parts is not None
            where = parts["where"] or None
            what = parts["what"]
            raise InvalidBody(f"{where}: {what}" if where else what, where) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidBody(f"the body is not valid JSON: {error}") from None


CHAT = Body(ChatRequest)
COMPLETION_BODIES = [
    Body(msgspec.defstruct("Text", [("prompt", kind)], bases=(CompletionRequest,), kw_only=True))
    for kind in (str | list[str], list[int], list[list[int]])
]


def decode_chat(body: bytes | memoryview) -> ChatRequest:
    """Decode and check the body of `/v1/chat/completions`."""
    request: ChatRequest = CHAT.decode(body)
    check_sampling(request)
    if not request.messages:
        raise InvalidValue("messages: must have at least one message", "messages")
    if request.logprobs or request.top_logprobs:
        raise Unsupported("logprobs: not supported by this server yet", "logprobs")
    if request.tools:
        raise Unsupported("tools: not supported by this server yet", "tools")
    if request.response_format is not None and request.response_format.type != "text":
        raise Unsupported(
            f"response_format: '{request.response_format.type}' is not supported by this server "
            "yet; 'text' is",
            "response_format",
        )
    return request


def decode_completion(body: bytes | memoryview) -> CompletionRequest:
    """Decode and check the body of `/v1/completions`."""
    request = _decode_prompt_union(body)
    check_sampling(request)
    if request.logprobs is not None:
        raise Unsupported("logprobs: not supported by this server yet", "logprobs")
    if request.suffix:
        raise Unsupported("suffix: not supported by this server", "suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise Unsupported("best_of: not supported by this server yet", "best_of")
    if isinstance(request.prompt, list) and not request.prompt:
        raise InvalidValue("prompt: must not be empty", "prompt")
    return request


def _decode_prompt_union(body: bytes | memoryview) -> CompletionRequest:
    """msgspec takes no union of two list types, so the forms of `prompt` are tried in turn."""
    first: InvalidBody | None = None
    for form in COMPLETION_BODIES:
        try:
            request: CompletionRequest = form.decode(body)
            return request
        except InvalidBody as error:
            if error.param is None or not error.param.startswith("prompt"):
                raise
            first = first or error
    assert first is not None
    raise InvalidBody(
        "prompt: must be a string, a list of strings, a list of token ids, or a list of lists of "
        "token ids",
        "prompt",
    )


def check_sampling(request: SamplingFields) -> None:
    """Refuse values outside their ranges; the text says what would be right."""
    _check_range("max_tokens", request.max_tokens, 1, None)
    if isinstance(request, ChatRequest):
        _check_range("max_completion_tokens", request.max_completion_tokens, 1, None)
    _check_range("temperature", request.temperature, 0, 2)
    _check_range("n", request.n, 1, MAX_SEQUENCES_PER_REQUEST)
    _check_range("top_k", request.top_k, -1, None)
    _check_range("seed", request.seed, -(2**63), 2**63 - 1)
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise InvalidValue(f"top_p: must be above 0 and at most 1, not {request.top_p}", "top_p")
    for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
        if getattr(request, name):
            raise Unsupported(f"{name}: not supported by this server yet", name)
    if request.stream_options is not None and not request.stream:
        raise InvalidValue("stream_options: only allowed with 'stream': true", "stream_options")
    stops = stop_strings(request)
    if len(stops) > MAX_STOP_STRINGS or "" in stops:
        raise InvalidValue(
            f"stop: must be at most {MAX_STOP_STRINGS} strings, none of them empty", "stop"
        )
    for id in request.stop_token_ids or ():
        if not 0 <= id < 2**31:
            raise InvalidValue(f"stop_token_ids: {id} is not a token id", "stop_token_ids")


def _check_range(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None or (value >= low and (high is None or value <= high)):
        return
    allowed = f"at least {low}" if high is None else f"between {low} and {high}"
    raise InvalidValue(f"{name}: must be {allowed}, not {value}", name)


def stop_strings(request: SamplingFields) -> list[str]:
    """Return `stop` as a list."""
    if request.stop is None:
        return []
    return [request.stop] if isinstance(request.stop, str) else request.stop
