"""The ring without HTTP, within a Python program: `Engine`, and `AsyncEngine` for asyncio.

    with Engine("org/model") as engine:
        for output in engine.generate(["1, 2, 3,", "A, B, C,"], SamplingParams(max_tokens=8)):
            print(output.prompt, output.text)

The processes are those of a server, and so are the requests: what a server refuses is raised as
`ApiError`. Options are further fields of OpenAI's requests, sent as they are. The processes end
with the engine, and with this process however it ends.
"""

import asyncio
import contextlib
import os
import queue
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from headrace.client.interrupts import brief_interrupts
from headrace.client.responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    EmbeddingList,
    Messages,
    chat_body,
)
from headrace.config.config import ServerConfig, config_of
from headrace.errors import ConfigError, EngineDied
from headrace.offline.lora_request import LoRARequest
from headrace.offline.request_window import A, OutputStream, RequestWindow
from headrace.offline.requests import (
    Bar,
    Params,
    RequestOutput,
    TextOrIds,
    Vectors,
    call_of,
    chat_calls,
    completion_calls,
    conversation_list,
    embedding_calls,
    prompt_list,
    request_outputs,
    stack,
    stream_call,
)
from headrace.offline.ring_connection import Piece, Put, Ring, RingRequest
from headrace.offline.sampling_params import SamplingParams
from headrace.routes import CHAT
from headrace.system.cpu_share import num_nodes
from headrace.system.machine import has_gpus

HTTP_FLAGS = (
    "host",
    "port",
    "frontend_procs",
    "max_body_bytes",
    "max_num_queued",
    "access_log",
    "otlp_traces_endpoint",
)
UNBOUNDED = 1 << 30  # the engine refuses no request: the ring keeps its queue short

News = Piece | EngineDied


def embedded_config(model: str | os.PathLike[str] | None, flags: dict[str, Any]) -> ServerConfig:
    """Return the configuration of a ring without HTTP.

    Raises:
        ConfigError: a flag is not known, is about HTTP, or has a value that cannot work.
    """
    for name in flags:
        if name in HTTP_FLAGS:
            raise ConfigError(f"{name} is a flag of the HTTP server, which an engine does not have")
        if name not in ServerConfig.__dataclass_fields__:
            raise ConfigError(f"{name} is not a flag; `launch_server --help` lists them")
    defaults: dict[str, Any] = {"log_level": "warning", "max_num_queued": UNBOUNDED}
    return config_of(defaults | flags | {"model": model}, has_gpus(), num_nodes())


class Engine:
    """A model and the processes that run it. Threads may share it.

    The flags are those of `launch_server`, with underscores; those about HTTP are refused.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **flags: Any) -> None:
        """Load a model: a Hugging Face folder, a .gguf file or a hub id; None is the demo model.

        Raises:
            ConfigError, ModelError: what a flag or the model's files have wrong, in one line.
            EngineDied: a process could not start; the text says which and why.
        """
        brief_interrupts()
        self._ring = Ring.start(embedded_config(model, flags))
        self._finalizer = weakref.finalize(self, self._ring.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End all processes. Calls in other threads raise `EngineDied`, and so do later ones."""
        self._finalizer()

    def generate(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue one prompt or many, each text or token ids; return an output for each, in order.

        Many prompts have a progress bar. `sampling_params` is for all prompts, or a list with one
        for each. `lora_request` is the adapter of all, with `enable_lora=True`.

        Raises:
            ApiError: a prompt is refused; all others are given up.
            EngineDied: the engine has ended.
        """
        listed = prompt_list(prompts)
        options |= self._ring.adapter_fields(lora_request)
        calls = completion_calls(listed, sampling_params, options)
        return request_outputs(listed, self._run(calls, Completion, len(listed), use_tqdm))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> list[ChatCompletion]:
        """Answer one conversation or many, each a list of messages or a string from the user."""
        listed = conversation_list(messages)
        options |= self._ring.adapter_fields(lora_request)
        calls = chat_calls(listed, sampling_params, options)
        return self._run(calls, ChatCompletion, len(listed), use_tqdm)

    def embed(
        self,
        texts: TextOrIds | Sequence[TextOrIds],
        use_tqdm: bool = True,
        **options: Any,
    ) -> Vectors:
        """Return the embeddings of one text or many, f32 [texts, dimensions]."""
        listed = prompt_list(texts)
        calls = embedding_calls(listed, options)
        return stack(self._run(calls, EmbeddingList, len(listed), use_tqdm))

    def stream(
        self,
        prompt: TextOrIds,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> Generator[str, None, None]:
        """Yield a prompt's continuation as it comes. Close the iterator early to end its work."""
        return self._stream(stream_call(prompt, sampling_params, options), Completion)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Generator[str, None, None]:
        """Yield the answer to a conversation as it comes."""
        body = chat_body(messages, {"stream": True})
        return self._stream(call_of(CHAT, body, sampling_params, options), ChatChunk)

    def _run(
        self, calls: Iterable[RingRequest], kind: type[A], total: int, use_tqdm: bool
    ) -> list[A]:
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        with (
            contextlib.closing(RequestWindow(self._ring, news.put, calls, kind)) as window,
            contextlib.closing(Bar(total, use_tqdm and total > 1)) as bar,
        ):
            while window.fill():
                answer = window.take(news.get())
                if answer is not None:
                    bar.add(answer.usage)
            return window.responses()

    def _stream(
        self, call: RingRequest, kind: type[ChatChunk] | type[Completion]
    ) -> Generator[str, None, None]:
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        with contextlib.closing(OutputStream(self._ring, news.put, call, kind)) as stream:
            while not stream.is_done:
                yield from stream.take(news.get())


class AsyncEngine:
    """`Engine` for asyncio: the same methods, awaited, in any event loop.

    A call whose task is cancelled gives up its work.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **flags: Any) -> None:
        """Check the flags; `async with` or `start` loads the model.

        Raises:
            ConfigError: what a flag has wrong, in one line.
        """
        brief_interrupts()
        self._config = embedded_config(model, flags)
        self._ring: Ring | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.shutdown()

    async def start(self) -> None:
        """Load the model without blocking the event loop.

        Raises:
            ConfigError, ModelError, EngineDied: as `Engine` does.
        """
        starter = ThreadPoolExecutor(1)
        starting = starter.submit(Ring.start, self._config)
        starter.shutdown(wait=False)
        try:
            self._ring = await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(discard)
            raise
        self._finalizer = weakref.finalize(self, self._ring.shutdown)

    async def shutdown(self) -> None:
        """End all processes. Calls that are waiting raise `EngineDied`, and so do later ones."""
        if self._finalizer is not None:
            await asyncio.to_thread(self._finalizer)

    async def generate(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        sampling_params: Params = None,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continue one prompt or many, each text or token ids; return an output for each, in order.

        Raises:
            ApiError: a prompt is refused; all others are given up.
            EngineDied: the engine has ended.
        """
        listed = prompt_list(prompts)
        options |= self._started.adapter_fields(lora_request)
        calls = completion_calls(listed, sampling_params, options)
        return request_outputs(listed, await self._run(calls, Completion, len(listed), use_tqdm))

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = False,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> list[ChatCompletion]:
        """Answer one conversation or many, each a list of messages or a string from the user."""
        listed = conversation_list(messages)
        options |= self._started.adapter_fields(lora_request)
        calls = chat_calls(listed, sampling_params, options)
        return await self._run(calls, ChatCompletion, len(listed), use_tqdm)

    async def embed(
        self,
        texts: TextOrIds | Sequence[TextOrIds],
        use_tqdm: bool = False,
        **options: Any,
    ) -> Vectors:
        """Return the embeddings of one text or many, f32 [texts, dimensions]."""
        listed = prompt_list(texts)
        calls = embedding_calls(listed, options)
        return stack(await self._run(calls, EmbeddingList, len(listed), use_tqdm))

    def stream(
        self,
        prompt: TextOrIds,
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncGenerator[str, None]:
        """Yield a prompt's continuation as it comes. Close the iterator early to end its work."""
        return self._stream(stream_call(prompt, sampling_params, options), Completion)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[str, None]:
        """Yield the answer to a conversation as it comes."""
        body = chat_body(messages, {"stream": True})
        return self._stream(call_of(CHAT, body, sampling_params, options), ChatChunk)

    @property
    def _started(self) -> Ring:
        if self._ring is None:
            raise EngineDied("the engine has not been started; use `async with` or `start`")
        return self._ring

    async def _run(
        self, calls: Iterable[RingRequest], kind: type[A], total: int, use_tqdm: bool
    ) -> list[A]:
        news: asyncio.Queue[News] = asyncio.Queue()
        put = put_from_afar(news)
        with (
            contextlib.closing(RequestWindow(self._started, put, calls, kind)) as window,
            contextlib.closing(Bar(total, use_tqdm and total > 1)) as bar,
        ):
            while window.fill():
                answer = window.take(await news.get())
                if answer is not None:
                    bar.add(answer.usage)
            return window.responses()

    async def _stream(
        self, call: RingRequest, kind: type[ChatChunk] | type[Completion]
    ) -> AsyncGenerator[str, None]:
        news: asyncio.Queue[News] = asyncio.Queue()
        put = put_from_afar(news)
        with contextlib.closing(OutputStream(self._started, put, call, kind)) as stream:
            while not stream.is_done:
                for text in stream.take(await news.get()):
                    yield text


def put_from_afar(news: "asyncio.Queue[News]") -> Put:
    """Return what puts into a queue of the running event loop from another thread."""
    loop = asyncio.get_running_loop()

    def put(piece: News) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the waiting task with it
            loop.call_soon_threadsafe(news.put_nowait, piece)

    return put


def discard(starting: "Future[Ring]") -> None:
    """End a ring that is no longer awaited."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().shutdown()
