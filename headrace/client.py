"""The Python client: `Client`, and `AsyncClient` for asyncio.

    with Client() as client:
        for text in client.stream_chat("What is the capital of France?", temperature=0):
            print(text, end="")

Options are the fields of OpenAI's requests (and `top_k`, `ignore_eos`, ... as in vLLM), sent as
they are: the server checks them. What it refuses is raised as `ApiError`.
"""

from collections.abc import AsyncGenerator, Generator
from typing import Any, Self, TypeVar

import httpx

from headrace.answers import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    ChatChunk,
    ChatCompletion,
    Completion,
    EmbeddingList,
    EventParser,
    Messages,
    Model,
    ModelList,
    Prompt,
    chat_body,
    decode,
    embedding_body,
    error_of,
    first_text,
)

BASE_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0  # between two bytes; a long prompt is silent until its first token

T = TypeVar("T")


def checked(response: httpx.Response) -> bytes:
    """Return the body of an answer, or raise what the server refused."""
    if response.status_code != 200:
        raise error_of(response.status_code, response.content)
    return response.content


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

    def embed(self, texts: Prompt, **options: Any) -> EmbeddingList:
        """Return the embedding of a text, of token ids, or of several of either."""
        return self._post(EMBEDDINGS, embedding_body(texts, options), EmbeddingList)

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

    async def embed(self, texts: Prompt, **options: Any) -> EmbeddingList:
        """Return the embedding of a text, of token ids, or of several of either."""
        return await self._post(EMBEDDINGS, embedding_body(texts, options), EmbeddingList)

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
