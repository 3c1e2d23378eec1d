"""The Python client: `Client`, and `AsyncClient` for asyncio.

    with Client() as client:
        for text in client.stream_chat("What is the capital of France?", temperature=0):
            print(text, end="")

Options are the fields of OpenAI's requests (and `top_k`, `ignore_eos`, ... as in vLLM), sent as
they are: the server checks them. What the server refuses raises `ApiError`. A missing server and a
broken connection raise its subclass `ApiConnectionError`. A server that is silent for `timeout_s`
raises `ApiTimeoutError`, a subclass of that. The examples are run by the tests.
"""

import asyncio
import copy
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import httpx

from headrace.client.cancellation import CancelScope, transport_of
from headrace.client.interrupts import brief_interrupts
from headrace.client.responses import (
    ChatCompletion,
    Completion,
    Detokenized,
    EmbeddingList,
    Messages,
    Model,
    ModelList,
    Prompt,
    Ranking,
    ReplicaList,
    Replicas,
    ScoreList,
    Tokens,
    Usage,
    Version,
    Warmed,
    chat_body,
    decode,
    embedding_body,
    error_of,
    tokenize_body,
)
from headrace.client.retries import Retries, retry_after_s
from headrace.client.streams import (
    AsyncChunkStream,
    AsyncEventStream,
    AsyncTextStream,
    ChunkStream,
    EventStream,
    Read,
    TextStream,
    chat_chunk,
    chat_text,
    completion_text,
)
from headrace.client.transport_errors import transport_errors
from headrace.errors import ApiError, ConfigError
from headrace.launch.local_server import LocalServer
from headrace.routes import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    KV_WARM,
    MODELS,
    RERANK,
    RESET_ENCODER_CACHE,
    RESET_MM_CACHE,
    SCORE,
    TOKENIZE,
)

REPLICAS = "/admin/replicas"
BASE_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0  # between two bytes; a long prompt is silent until its first token
MAX_RETRIES = 2

T = TypeVar("T")
C = TypeVar("C", "Client", "AsyncClient")


def scaling(count: int, model: str | None) -> str:
    """Return the path that asks for so many engines of a model."""
    asked = {"replicas": count} if model is None else {"replicas": count, "model": model}
    return f"{REPLICAS}?{urlencode(asked)}"


def loading(model: str, what: str) -> str:
    """Return the path that loads or unloads a model."""
    return f"/admin/models/{quote(model, safe='')}/{what}"


def refusal(response: httpx.Response, body: bytes) -> ApiError:
    """Return the error of a response."""
    error = error_of(response.status_code, body)
    error.retry_after_s = retry_after_s(response.headers, time.time())
    return error


def checked(response: httpx.Response) -> bytes:
    """Return the body of an answer, or raise what the server refused."""
    if not response.is_success:  # 200, or 202 of what is done later
        raise refusal(response, response.content)
    return response.content


def settings(base_url: str, api_key: str | None) -> dict[str, Any]:
    """Return the arguments of httpx's clients.

    Raises:
        ConfigError: the URL or the key cannot be used.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError(
            "api_key has a character that an HTTP header cannot carry; use printable ASCII"
        )
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"base_url {base_url!r} is not a URL: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"base_url {base_url!r} does not begin with http://HOST or https://HOST")
    return {"base_url": url, "headers": headers}


def varied(client: C, timeout_s: float | None, max_retries: int | None) -> C:
    """Return a client of the same connections, which waits or asks again otherwise."""
    made = copy.copy(client)
    made._origin = client  # a launched server ends with the last reference to its client
    if timeout_s is not None:
        made._timeout_s = timeout_s
    if max_retries is not None:
        made._retries = Retries(max_retries)
    return made


class Client:
    """A connection pool to one server. Threads may share it."""

    def __init__(
        self,
        base_url: str = BASE_URL,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        max_retries: int = MAX_RETRIES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Configure the client; nothing is sent yet.

        Args:
            timeout_s: how long the server may be silent; `with_options` has others.
            max_retries: how often to ask again where it has too much to do (429, 503), after as
                long as its `Retry-After` says.
        """
        brief_interrupts()
        arguments = settings(base_url, api_key)
        transport = transport or transport_of(arguments["base_url"])
        self._http = httpx.Client(**arguments, transport=transport)
        self._timeout_s = timeout_s
        self._retries = Retries(max_retries)

    @classmethod
    def launch(
        cls, model: str | os.PathLike[str] | None = None, timeout_s: float = TIMEOUT_S, **flags: Any
    ) -> Self:
        """Start a server here and return its client; `close` ends both.

        The server ends with this process, too, however it ends. Its port is a free one, and `url`
        tells others where it is.

        Args:
            model: a Hugging Face folder, a .gguf file or a hub id; None is the demo model.
            flags: those of `launch_server`, with underscores.
        Raises:
            ConfigError, ModelError: what a flag or the model's files have wrong, in one line.
            EngineDied: a process could not start; the text says which and why.

        >>> with Client.launch(max_num_seqs=4) as local:
        ...     local.complete("1, 2, 3,", max_tokens=3, temperature=0).text
        ' 4,'
        """
        server = LocalServer(model, flags)
        client = cls(server.url, server.api_key, timeout_s)
        client._end_server = weakref.finalize(client, server.stop)
        return client

    _end_server: "weakref.finalize[Any, Any] | None" = None
    _origin: "Client | None" = None

    def with_options(
        self, *, timeout_s: float | None = None, max_retries: int | None = None
    ) -> "Client":
        """Return a client of the same connections with other timeouts or retries.

        >>> client.with_options(timeout_s=5, max_retries=0).models()[0].max_model_len
        8192
        """
        return varied(self, timeout_s, max_retries)

    @property
    def url(self) -> str:
        """The URL of the server."""
        return str(self._http.base_url).rstrip("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections, and end the server if it was launched."""
        self._http.close()
        if self._end_server is not None:
            self._end_server()

    def chat(self, messages: Messages, **options: Any) -> ChatCompletion:
        """Return the answer to a conversation, or to a string from the user.

        >>> answer = client.chat("What is the capital of France?", temperature=0, max_tokens=8)
        >>> answer.text, answer.choices[0].finish_reason, answer.usage.completion_tokens
        ('The capital of France is Paris.', 'stop', 8)
        """
        return self._post(CHAT, chat_body(messages, options), ChatCompletion)

    def stream_chat(self, messages: Messages, **options: Any) -> TextStream:
        """Return an iterator of the answer's text as it comes; it can be canceled.

        >>> "".join(client.stream_chat("What is the capital of France?", temperature=0))
        'The capital of France is Paris.'
        >>> texts = client.stream_chat("What is the capital of France?", temperature=0)
        >>> texts.cancel()
        >>> list(texts)
        []
        """
        return self._stream(CHAT, chat_body(messages, options), chat_text)

    def stream_chat_chunks(self, messages: Messages, **options: Any) -> ChunkStream:
        """Return an iterator of all news of an answer: text, thoughts and calls of tools."""
        return self._stream(CHAT, chat_body(messages, options), chat_chunk)

    def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """Return the continuation of a text, of token ids, or of several of either.

        >>> answer = client.complete(["1, 2, 3,", "A, B, C,"], max_tokens=2, temperature=0)
        >>> [choice.text for choice in answer.choices]
        [' 4', ' D,']
        """
        return self._post(COMPLETIONS, {"prompt": prompt} | options, Completion)

    def stream_complete(self, prompt: Prompt, **options: Any) -> TextStream:
        """Return an iterator of the continuation's text as it comes; it can be canceled.

        >>> "".join(client.stream_complete("1, 2, 3,", max_tokens=6, temperature=0))
        ' 4, 5,'
        """
        return self._stream(COMPLETIONS, {"prompt": prompt} | options, completion_text)

    def embed(self, texts: Prompt, **options: Any) -> EmbeddingList:
        """Return the embedding of a text, of token ids, or of several of either.

        Each is a `vector` of f32 numbers, shape [dimensions]. Only embedding models have any.

        >>> [len(embedding.vector) for embedding in embedder.embed(["sea", "ocean"]).data]
        [384, 384]
        """
        return self._post(EMBEDDINGS, embedding_body(texts, options), EmbeddingList)

    def rerank(self, query: str, documents: Sequence[str], **options: Any) -> Ranking:
        """Return documents by how alike they are to a query, the likest first.

        >>> ranking = embedder.rerank("the sea", ["a bus", "the ocean", "a tax"], top_n=1)
        >>> ranking.results[0].index
        1
        """
        body = {"query": query, "documents": list(documents)}
        return self._post(RERANK, body | options, Ranking)

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], **options: Any
    ) -> ScoreList:
        """Return how alike one text, or each of several, is to each of others.

        >>> round(embedder.score("the sea", "the sea").data[0].score, 3)
        1.0
        """
        return self._post(SCORE, {"text_1": text_1, "text_2": text_2} | options, ScoreList)

    def tokenize(self, text: Messages, **options: Any) -> Tokens:
        """Return the token ids of a text, or of a conversation as the model sees it.

        >>> client.tokenize("Hello there", return_token_strs=True).token_strs
        ['Hello', 'Ġthere']
        """
        return self._post(TOKENIZE, tokenize_body(text, options), Tokens)

    def warm(self, text: Messages, **options: Any) -> Usage:
        """Have the keys and values of a text, or of a conversation, computed ahead.

        It takes the key of `/admin`. `cached_tokens` were known before.
        """
        return self._post(KV_WARM, tokenize_body(text, options), Warmed).usage

    def detokenize(self, tokens: Sequence[int], **options: Any) -> str:
        """Return the text of token ids, special tokens included.

        >>> client.detokenize(client.tokenize("Hello there").tokens)
        'Hello there'
        """
        body = {"tokens": list(tokens)} | options
        return self._post(DETOKENIZE, body, Detokenized).prompt

    def models(self) -> list[Model]:
        """Return the models that the server has.

        >>> [model.max_model_len for model in client.models()]
        [8192]
        """
        return decode(checked(self._send("GET", MODELS)), ModelList).data

    def replicas(self) -> list[Replicas]:
        """Return how many engines each model has. It takes the key of `/admin`."""
        return decode(checked(self._send("GET", REPLICAS)), ReplicaList).models

    def scale(self, count: int, model: str | None = None) -> Replicas:
        """Have a model so many engines, without a failed request; `replicas` tells when they serve.

        It takes the key of `/admin`. Of several models one is named.
        """
        return decode(checked(self._send("POST", scaling(count, model))), Replicas)

    def reset_mm_cache(self) -> None:
        """Have images of later requests prepared again. It takes the key of `/admin`."""
        checked(self._send("POST", RESET_MM_CACHE))

    def reset_encoder_cache(self) -> None:
        """Have images of later requests encoded again. It takes the key of `/admin`."""
        checked(self._send("POST", RESET_ENCODER_CACHE))

    def load(self, model: str) -> Replicas:
        """Have a model loaded; the server may unload another. It takes the key of `/admin`.

        `models` tells when it is loaded.
        """
        return decode(checked(self._send("POST", loading(model, "load"))), Replicas)

    def unload(self, model: str) -> Replicas:
        """Have a model unloaded when its requests have ended. It takes the key of `/admin`.

        It is loaded again for the next request.
        """
        return decode(checked(self._send("POST", loading(model, "unload"))), Replicas)

    def sleep(self, model: str) -> Replicas:
        """Have an idle model give memory back but for weights. It takes the key of `/admin`."""
        return decode(checked(self._send("POST", loading(model, "sleep"))), Replicas)

    def version(self) -> str:
        """Return the server's version."""
        return decode(checked(self._send("GET", "/version")), Version).version

    def health(self) -> bool:
        """Whether the server serves. A server that is not there raises `ApiConnectionError`.

        >>> client.health()
        True
        """
        with transport_errors():
            return self._http.get("/health", timeout=self._timeout_s).status_code == 200

    def _post(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        return decode(checked(self._send("POST", path, body)), kind)

    def _stream(self, path: str, body: dict[str, Any], read: Read[T]) -> EventStream[T]:
        def opening(line: CancelScope) -> httpx.Response:
            response = self._send("POST", path, body | {"stream": True}, line)
            if response.status_code != 200:
                raise refusal(response, response.read())
            return response

        return EventStream(opening, read)

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        line: CancelScope | None = None,
    ) -> httpx.Response:
        """Ask, again where that is worth it; for a stream where there is a line."""
        with transport_errors():
            request = self._http.build_request(method, path, json=body, timeout=self._timeout_s)
        wait = time.sleep if line is None else line.wait
        if line is not None:
            request.extensions = {**request.extensions, "trace": line.trace}
        num_before = 0
        while True:
            with transport_errors():
                response = self._http.send(request, stream=line is not None)
            wait_s = self._retries.wait_s(response.status_code, response.headers, num_before)
            if wait_s is None:
                return response
            response.close()
            wait(wait_s)
            num_before += 1


class AsyncClient:
    """`Client` for asyncio: the same methods, awaited; streams are iterated with `async for`."""

    def __init__(
        self,
        base_url: str = BASE_URL,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        max_retries: int = MAX_RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Configure the client, as `Client` does."""
        brief_interrupts()
        self._http = httpx.AsyncClient(**settings(base_url, api_key), transport=transport)
        self._timeout_s = timeout_s
        self._retries = Retries(max_retries)

    @classmethod
    async def launch(
        cls, model: str | os.PathLike[str] | None = None, timeout_s: float = TIMEOUT_S, **flags: Any
    ) -> Self:
        """Start a server here and return its client, as `Client.launch` does."""
        server = await asyncio.to_thread(LocalServer, model, flags)
        client = cls(server.url, server.api_key, timeout_s)
        client._end_server = weakref.finalize(client, server.stop)
        return client

    _end_server: "weakref.finalize[Any, Any] | None" = None
    _origin: "AsyncClient | None" = None

    def with_options(
        self, *, timeout_s: float | None = None, max_retries: int | None = None
    ) -> "AsyncClient":
        """Return a client of the same connections, as `Client.with_options` does."""
        return varied(self, timeout_s, max_retries)

    @property
    def url(self) -> str:
        """The URL of the server."""
        return str(self._http.base_url).rstrip("/")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, and end the server if it was launched."""
        await self._http.aclose()
        if self._end_server is not None:
            await asyncio.to_thread(self._end_server)

    async def chat(self, messages: Messages, **options: Any) -> ChatCompletion:
        """Return the answer to a conversation, or to a string from the user."""
        return await self._post(CHAT, chat_body(messages, options), ChatCompletion)

    def stream_chat(self, messages: Messages, **options: Any) -> AsyncTextStream:
        """Return an iterator of the answer's text as it comes; it can be canceled."""
        return self._stream(CHAT, chat_body(messages, options), chat_text)

    def stream_chat_chunks(self, messages: Messages, **options: Any) -> AsyncChunkStream:
        """Return an iterator of all news of an answer: text, thoughts and calls of tools."""
        return self._stream(CHAT, chat_body(messages, options), chat_chunk)

    async def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """Return the continuation of a text, of token ids, or of several of either."""
        return await self._post(COMPLETIONS, {"prompt": prompt} | options, Completion)

    def stream_complete(self, prompt: Prompt, **options: Any) -> AsyncTextStream:
        """Return an iterator of the continuation's text as it comes; it can be canceled."""
        return self._stream(COMPLETIONS, {"prompt": prompt} | options, completion_text)

    async def embed(self, texts: Prompt, **options: Any) -> EmbeddingList:
        """Return the embedding of a text, of token ids, or of several of either."""
        return await self._post(EMBEDDINGS, embedding_body(texts, options), EmbeddingList)

    async def rerank(self, query: str, documents: Sequence[str], **options: Any) -> Ranking:
        """Return documents by how alike they are to a query, the likest first."""
        body = {"query": query, "documents": list(documents)}
        return await self._post(RERANK, body | options, Ranking)

    async def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], **options: Any
    ) -> ScoreList:
        """Return how alike one text, or each of several, is to each of others."""
        return await self._post(SCORE, {"text_1": text_1, "text_2": text_2} | options, ScoreList)

    async def tokenize(self, text: Messages, **options: Any) -> Tokens:
        """Return the token ids of a text, or of a conversation as the model sees it."""
        return await self._post(TOKENIZE, tokenize_body(text, options), Tokens)

    async def warm(self, text: Messages, **options: Any) -> Usage:
        """Have the keys and values of a text, or of a conversation, computed ahead."""
        return (await self._post(KV_WARM, tokenize_body(text, options), Warmed)).usage

    async def detokenize(self, tokens: Sequence[int], **options: Any) -> str:
        """Return the text of token ids, special tokens included."""
        body = {"tokens": list(tokens)} | options
        return (await self._post(DETOKENIZE, body, Detokenized)).prompt

    async def models(self) -> list[Model]:
        """Return the models that the server has."""
        return decode(checked(await self._send("GET", MODELS)), ModelList).data

    async def replicas(self) -> list[Replicas]:
        """Return how many engines each model has. It takes the key of `/admin`."""
        return decode(checked(await self._send("GET", REPLICAS)), ReplicaList).models

    async def scale(self, count: int, model: str | None = None) -> Replicas:
        """Have a model so many engines, without a failed request; `replicas` tells when they serve.

        It takes the key of `/admin`. Of several models one is named.
        """
        return decode(checked(await self._send("POST", scaling(count, model))), Replicas)

    async def reset_mm_cache(self) -> None:
        """Have images of later requests prepared again. It takes the key of `/admin`."""
        checked(await self._send("POST", RESET_MM_CACHE))

    async def reset_encoder_cache(self) -> None:
        """Have images of later requests encoded again. It takes the key of `/admin`."""
        checked(await self._send("POST", RESET_ENCODER_CACHE))

    async def load(self, model: str) -> Replicas:
        """Have a model loaded; the server may unload another. It takes the key of `/admin`.

        `models` tells when it is loaded.
        """
        return decode(checked(await self._send("POST", loading(model, "load"))), Replicas)

    async def unload(self, model: str) -> Replicas:
        """Have a model unloaded when its requests have ended. It takes the key of `/admin`.

        It is loaded again for the next request.
        """
        return decode(checked(await self._send("POST", loading(model, "unload"))), Replicas)

    async def sleep(self, model: str) -> Replicas:
        """Have an idle model give memory back but for weights. It takes the key of `/admin`."""
        return decode(checked(await self._send("POST", loading(model, "sleep"))), Replicas)

    async def version(self) -> str:
        """Return the server's version."""
        return decode(checked(await self._send("GET", "/version")), Version).version

    async def health(self) -> bool:
        """Whether the server serves. A server that is not there raises `ApiConnectionError`."""
        with transport_errors():
            response = await self._http.get("/health", timeout=self._timeout_s)
        return response.status_code == 200

    async def _post(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        return decode(checked(await self._send("POST", path, body)), kind)

    def _stream(self, path: str, body: dict[str, Any], read: Read[T]) -> AsyncEventStream[T]:
        async def opening() -> httpx.Response:
            response = await self._send("POST", path, body | {"stream": True}, stream=True)
            if response.status_code != 200:
                with transport_errors():
                    raise refusal(response, await response.aread())
            return response

        return AsyncEventStream(opening, read)

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None, stream: bool = False
    ) -> httpx.Response:
        """Ask, again where that is worth it."""
        with transport_errors():
            request = self._http.build_request(method, path, json=body, timeout=self._timeout_s)
        num_before = 0
        while True:
            with transport_errors():
                response = await self._http.send(request, stream=stream)
            wait_s = self._retries.wait_s(response.status_code, response.headers, num_before)
            if wait_s is None:
                return response
            await response.aclose()
            await asyncio.sleep(wait_s)
            num_before += 1
