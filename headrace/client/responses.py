"""Decoded responses of a server: whole bodies, streams of events, errors.

Shared by everything that asks: `Client` over HTTP and `Engine` without.
"""

from array import array
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.errors import BAD_JSON, ApiError

T = TypeVar("T")
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class PromptDetails(msgspec.Struct):
    """Number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Number of reasoning tokens in a response."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts of a request. Embeddings have no completion tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None  # where thoughts are looked for


class LikelyToken(msgspec.Struct):
    """A token and its log probability. `bytes` may be less than a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(LikelyToken):
    """A token of an answer, and the likeliest in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a chat response, with `logprobs` true."""

    content: list[ChosenToken]


class TextLogprobs(msgspec.Struct):
    """Log probabilities of a completion, with a number of `logprobs`, in columns.

    An entry is None for the first token of a prompt that is echoed.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(msgspec.Struct):
    """Log probability of a prompt token; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptToken] | None]  # by token id; None for the first


class FunctionCall(msgspec.Struct):
    """A function that the model wants called. `arguments` is JSON, if the model got it right."""

    name: str
    arguments: str


class CustomCall(msgspec.Struct):
    """A custom tool that the model wants called, with a text."""

    name: str
    input: str


class ToolCall(msgspec.Struct, omit_defaults=True):
    """A call of a tool. The message that answers it has the role "tool" and this `tool_call_id`.

    A call of type "custom" has `custom`, and a `function` without a name.
    """

    id: str
    function: FunctionCall = msgspec.field(default_factory=lambda: FunctionCall("", ""))
    type: str = "function"
    custom: CustomCall | None = None


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """The assistant's message: text, and tool calls. `content` is None if it only calls.

    It may be one of the messages of the next request.
    """

    role: str
    content: str | None = None
    tool_calls: list[ToolCall] = []
    reasoning_content: str | None = None  # thoughts, of a model that has some
    function_call: FunctionCall | None = None  # in place of calls, where `functions` were sent


Messages = str | Sequence[dict[str, Any] | ChatMessage]


class ChatChoice(msgspec.Struct):
    """One of `n` answers. `finish_reason` is "stop", "tool_calls", "function_call" or "length"."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None  # where `return_token_ids` was True, as the next ones


class ChatCompletion(msgspec.Struct):
    """A whole answer to a conversation."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def text(self) -> str:
        """The first answer."""
        return self.choices[0].message.content or ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of the first answer."""
        return self.choices[0].message.tool_calls


class TextChoice(msgspec.Struct):
    """One continuation. `finish_reason` is "stop" or "length", None while it streams."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(msgspec.Struct):
    """Continuations of one prompt or of several; also a piece of them, in a stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None

    @property
    def text(self) -> str:
        """The first continuation."""
        return self.choices[0].text


class Warmed(msgspec.Struct):
    """Response of `/v1/kv/warm`."""

    usage: Usage


class Replicas(msgspec.Struct):
    """The engines of a model: those that it is to have, and how many of them serve.

    Those that are leaving end their last requests.
    """

    model: str
    replicas: int
    ready: int
    leaving: int
    max_replicas: int


class ReplicaList(msgspec.Struct):
    """Response of `GET /admin/replicas`."""

    models: list[Replicas]


class FunctionDelta(msgspec.Struct):
    """More of a function's call: the name once, then the arguments piece by piece."""

    arguments: str = ""
    name: str | None = None


class ToolCallDelta(msgspec.Struct):
    """News of the `index`-th call of an answer; the first of each has its id."""

    index: int
    function: FunctionDelta
    id: str | None = None


class Delta(msgspec.Struct):
    """News of an answer: text, thoughts, or calls."""

    content: str | None = None
    tool_calls: list[ToolCallDelta] = []
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct):
    """News of one answer. `finish_reason` comes with the last."""

    index: int
    delta: Delta
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct):
    """One event of a streamed conversation."""

    choices: list[ChunkChoice]


class Embedding(msgspec.Struct):
    """A text as a vector: little-endian f32, which JSON has as base64."""

    index: int
    embedding: bytes

    @property
    def vector(self) -> "array[float]":
        """The numbers."""
        return array("f", self.embedding)


class EmbeddingList(msgspec.Struct):
    """Response of `/v1/embeddings` with `encoding_format` "base64"."""

    data: list[Embedding]
    usage: Usage


class RankedDocument(msgspec.Struct):
    """A text that was ranked."""

    text: str


class Rank(msgspec.Struct):
    """Similarity of a document to the query: a cosine of embeddings, or a cross-encoder's score."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Ranking(msgspec.Struct):
    """Response of `/v1/rerank`, the best document first."""

    id: str
    created: int
    model: str
    results: list[Rank]
    usage: Usage


class Score(msgspec.Struct):
    """Similarity of two texts: the cosine of embeddings, or a cross-encoder's score."""

    index: int
    score: float


class ScoreList(msgspec.Struct):
    """Response of `/v1/score`, in the order of the texts."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage


class Tokens(msgspec.Struct):
    """Tokens of a text. `token_strs` has the vocabulary's spelling, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """Response of `/detokenize`."""

    prompt: str


class Version(msgspec.Struct):
    """Response of `/version`."""

    version: str


class ModelLoad(msgspec.Struct):
    """Whether a model is loaded, how far, and how many sequences wait for it."""

    value: str  # unloaded, loading, loaded, unloading or sleeping
    progress: float
    waiting: int
    failed: bool
    error: str | None = None


class Model(msgspec.Struct):
    """A model that the server has."""

    id: str
    created: int
    owned_by: str
    max_model_len: int | None = None
    status: ModelLoad | None = None  # where models come and go


class ModelList(msgspec.Struct):
    """Response of `/v1/models`."""

    data: list[Model]


class ErrorFields(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    code: str | int | None = None
    param: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of a refusal, and an event that ends a stream with an error."""

    error: ErrorFields


def decode(body: bytes | str, kind: type[T]) -> T:
    """Decode what a server sent.

    Raises:
        ApiError: it is not what `kind` says; status 200, since the server meant no error.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except BAD_JSON as error:
        raise ApiError(200, f"not an answer of a Headrace server: {error}") from None


def error_of(status: int, body: bytes | str) -> ApiError:
    """Return the error of a response body, in OpenAI's shape or any other."""
    try:
        fields = msgspec.json.decode(body, type=ErrorResponse).error
    except BAD_JSON:
        text = body if isinstance(body, str) else body.decode(errors="replace")
        return ApiError(status, text.strip()[:500] or f"HTTP status {status}")
    code = None if fields.code is None else str(fields.code)
    return ApiError(status, fields.message, code, fields.param)


class EventParser:
    """Server-sent events out of bytes as they come; shared by both clients."""

    def __init__(self) -> None:
        self._rest = b""
        self._done = False

    def feed(self, data: bytes) -> Generator[str, None, None]:
        """Yield the data of each event that is complete.

        Lines end with a line feed and with nothing else: a text may hold other separators.

        Raises:
            ApiError: an event is an error: the stream began well and cannot go on.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):  # comments and other fields mean nothing here
                continue
            event = line[5:].strip().decode(errors="replace")
            if event == "[DONE]":
                self._done = True
            elif event.startswith('{"error"'):
                raise error_of(200, event)
            else:
                yield event

    def check_end(self) -> None:
        """Raise `ApiError` where a stream has ended before its last event."""
        if not self._done:
            raise ApiError(200, "the stream ended before the answer did", "stream_cut")


def chat_body(messages: Messages, options: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a conversation; a string is a user message."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {"messages": msgspec.to_builtins(list(messages))} | options


def tokenize_body(text: Messages, options: dict[str, Any]) -> dict[str, Any]:
    """Return the body that asks for the tokens of a text, or of a conversation."""
    own = {"prompt": text} if isinstance(text, str) else chat_body(text, {})
    return own | options


def embedding_body(texts: Prompt, options: dict[str, Any]) -> dict[str, Any]:
    """Return the body that asks for the embeddings of a text or of several."""
    return {"input": texts, "encoding_format": "base64"} | options


def first_text(event: str, kind: type[ChatChunk] | type[Completion]) -> str:
    """Return the new text of the first answer in an event, if any."""
    chunk = decode(event, kind)
    if isinstance(chunk, ChatChunk):
        return "".join(c.delta.content or "" for c in chunk.choices if c.index == 0)
    return "".join(choice.text for choice in chunk.choices if choice.index == 0)
