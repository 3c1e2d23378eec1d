"""The Python client: `Client`, and `AsyncClient` for asyncio.

    with Client() as client:
        for text in client.stream_chat("What is the capital of France?", temperature=0):
            print(text, end="")

Options are the fields of OpenAI's requests (and `top_k`, `ignore_eos`, ... as in vLLM), sent as
they are: the server checks them. What it refuses is raised as `ApiError`.
"""

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, Self, TypeVar

import httpx
import msgspec

from headrace.errors import ApiError

BASE_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0  # between two bytes; a long prompt is silent until its first token
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

T = TypeVar("T")
Messages = str | Sequence[dict[str, Any]]
Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class Usage(msgspec.Struct):
    """How many tokens a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatMessage(msgspec.Struct):
    """What the assistant says."""

    role: str
    content: str | None = None


class ChatChoice(msgspec.Struct):
    """One of `n` answers. `finish_reason` is "stop" or "length"."""

    index: int
    message: ChatMessage
    finish_reason: str


class ChatCompletion(msgspec.Struct):
    """A whole answer to a conversation."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage

    @property
    def text(self) -> str:
        """The first answer."""
        return self.choices[0].message.content or ""


class TextChoice(msgspec.Struct):
    """One continuation. `finish_reason` is "stop" or "length", None while it streams."""

    index: int
    text: str
    finish_reason: str | None = None


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


class Delta(msgspec.Struct):
    """New text of an answer."""

    content: str | None = None


class ChunkChoice(msgspec.Struct):
    """News of one answer."""

    index: int
    delta: Delta


class ChatChunk(msgspec.Struct):
    """One event of a streamed conversation."""

    choices: list[ChunkChoice]


class Model(msgspec.Struct):
    """A model that the server has."""

    id: str
    created: int
    owned_by: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """What `/v1/models` answers."""

    data: list[Model]


class ErrorFields(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    code: str | int | None = None
    param: str | None = None


class ErrorBody(msgspec.Struct):
    """The body of a refusal, and an event that ends a stream with an error."""

    error: ErrorFields


def decode(body: bytes | str, kind: type[T]) -> T:
    """Decode what a server sent.

    Raises:
        ApiError: it is not what `kind` says; status 200, since the server meant no error.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError(200, f"not an answer of a Headrace server: {error}") from error


def error_of(status: int, body: bytes | str) -> ApiError:
    """Return the error that a body tells of, in OpenAI's shape or any other."""
    try:
        fields = msgspec.json.decode(body, type=ErrorBody).error
    except msgspec.DecodeError:
        text = body if isinstance(body, str) else body.decode(errors="replace")
        return ApiError(status, text.strip()[:500] or f"HTTP status {status}")
    code = None if fields.code is None else str(fields.code)
    return ApiError(status, fields.message, code, fields.param)


def checked(response: httpx.Response) -> bytes:
    """Return the body of an answer, or raise what the server refused."""
    if response.status_code != 200:
        raise error_of(response.status_code, response.content)
    return response.content


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
            event = line[5:].strip().decode()
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
    """Return the body of a conversation; a string is what the user says."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return {"messages": list(messages)} | options


def first_text(event: str, kind: type[ChatChunk] | type[Completion]) -> str:
    """Return the new text of the first answer in an event, if any."""
    chunk = decode(event, kind)
    if isinstance(chunk, ChatChunk):
        return "".join(c.delta.content or "" for c in chunk.choices if c.index == 0)
    return "".join(choice.text for choice in chunk.choices if choice.index == 0)


def settings(base_url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    """Return the arguments of httpx's clients."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    return {"base_url": base_url, "headers": headers, "timeout": timeout_s}


class Client:
    """A connection pool to one server. Threads may share it."""

    def __init__(
        self,
        base_url: str = BASE_URL,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`timeout_s` is how long the server may be silent."""
        self._http = httpx.Client(**settings(base_url, api_key, timeout_s), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def chat(self, messages: Messages, **options: Any) -> ChatCompletion:
        """Return the answer to a conversation, or to a string from the user."""
        return self._post(CHAT, chat_body(messages, options), ChatCompletion)

    def stream_chat(self, messages: Messages, **options: Any) -> Generator[str, None, None]:
        """Yield the answer's text as it comes. Close the iterator early to stop the server."""
        return self._stream(CHAT, chat_body(messages, options), ChatChunk)

    def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """Return the continuation of a text, of token ids, or of several of either."""
        return self._post(COMPLETIONS, {"prompt": prompt} | options, Completion)

    def stream_complete(self, prompt: Prompt, **options: Any) -> Generator[str, None, None]:
        """Yield the continuation's text as it comes."""
        return self._stream(COMPLETIONS, {"prompt": prompt} | options, Completion)

    def models(self) -> list[Model]:
        """Return the models that the server has."""
        return decode(checked(self._http.get("/v1/models")), ModelList).data

    def health(self) -> bool:
        """Whether the server serves. A server that is not there raises `httpx.ConnectError`."""
        return self._http.get("/health").status_code == 200

    def _post(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        return decode(checked(self._http.post(path, json=body)), kind)

    def _stream(
        self, path: str, body: dict[str, Any], kind: type[ChatChunk] | type[Completion]
    ) -> Generator[str, None, None]:
        parser = EventParser()
        with self._http.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                raise error_of(response.status_code, response.read())
            for data in response.iter_bytes():
                for event in parser.feed(data):
                    if text := first_text(event, kind):
                        yield text
        parser.check_end()


class AsyncClient:
    """`Client` for asyncio: the same methods, awaited."""

    def __init__(
        self,
        base_url: str = BASE_URL,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`timeout_s` is how long the server may be silent."""
        arguments = settings(base_url, api_key, timeout_s)
        self._http = httpx.AsyncClient(**arguments, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def chat(self, messages: Messages, **options: Any) -> ChatCompletion:
        """Return the answer to a conversation, or to a string from the user."""
        return await self._post(CHAT, chat_body(messages, options), ChatCompletion)

    def stream_chat(self, messages: Messages, **options: Any) -> AsyncGenerator[str, None]:
        """Yield the answer's text as it comes. Close the iterator early to stop the server."""
        return self._stream(CHAT, chat_body(messages, options), ChatChunk)

    async def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """Return the continuation of a text, of token ids, or of several of either."""
        return await self._post(COMPLETIONS, {"prompt": prompt} | options, Completion)

    def stream_complete(self, prompt: Prompt, **options: Any) -> AsyncGenerator[str, None]:
        """Yield the continuation's text as it comes."""
        return self._stream(COMPLETIONS, {"prompt": prompt} | options, Completion)

    async def models(self) -> list[Model]:
        """Return the models that the server has."""
        return decode(checked(await self._http.get("/v1/models")), ModelList).data

    async def health(self) -> bool:
        """Whether the server serves. A server that is not there raises `httpx.ConnectError`."""
        return (await self._http.get("/health")).status_code == 200

    async def _post(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        return decode(checked(await self._http.post(path, json=body)), kind)

    async def _stream(
        self, path: str, body: dict[str, Any], kind: type[ChatChunk] | type[Completion]
    ) -> AsyncGenerator[str, None]:
        parser = EventParser()
        async with self._http.stream("POST", path, json=body | {"stream": True}) as response:
            if response.status_code != 200:
                raise error_of(response.status_code, await response.aread())
            async for data in response.aiter_bytes():
                for event in parser.feed(data):
                    if text := first_text(event, kind):
                        yield text
        parser.check_end()
