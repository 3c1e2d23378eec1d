"""Streamed answers over HTTP, which any thread or task can cancel at any time."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
)
from typing import Any, TypeVar

import httpx

from headrace.client.cancellation import Canceled, CancelScope
from headrace.client.responses import ChatChunk, Completion, EventParser, decode, first_text
from headrace.client.transport_errors import transport_errors
from headrace.errors import ApiConnectionError

T = TypeVar("T")
Read = Callable[[str], T | None]  # an event to the item that iteration yields


def chat_text(event: str) -> str | None:
    """Return the new text of a chat's first answer, if any."""
    return first_text(event, ChatChunk) or None


def completion_text(event: str) -> str | None:
    """Return the new text of a completion, if any."""
    return first_text(event, Completion) or None


def chat_chunk(event: str) -> ChatChunk:
    """Return all that is new in a chat."""
    return decode(event, ChatChunk)


class EventStream(Iterator[T]):
    """Yields `read(event)` for each event of one answer, in order; None is skipped."""

    def __init__(self, opening: Callable[[CancelScope], httpx.Response], read: Read[T]) -> None:
        """`opening` asks, when iteration begins, and returns what comes of it."""
        self._opening = opening
        self._line = CancelScope()
        self._items = self._read(read)

    def __next__(self) -> T:
        return next(self._items)

    def cancel(self) -> None:
        """Cancel: the server stops generating, and iteration ends at once.

        Safe from any thread at any time.
        """
        self._line.cut()

    def close(self) -> None:
        """Cancel and free the connection; only for the iterating thread."""
        self._items.close()

    def _read(self, read: Read[T]) -> Generator[T, None, None]:
        if self._line.is_cut:
            return
        try:
            with transport_errors():
                yield from self._emitted(read)
        except Canceled:
            pass
        except ApiConnectionError:
            if not self._line.is_cut:
                raise

    def _emitted(self, read: Read[T]) -> Generator[T, None, None]:
        parser = EventParser()
        with self._line.asking():
            response = self._opening(self._line)
        stream = response.extensions.get("network_stream")
        if stream is not None:
            self._line.take(stream)
        try:
            for data in response.iter_bytes():
                for event in parser.feed(data):
                    if self._line.is_cut:
                        return
                    if (item := read(event)) is not None:
                        yield item
        finally:
            response.close()
        if not self._line.is_cut:
            parser.check_end()


class AsyncEventStream(AsyncIterator[T]):
    """`EventStream` for asyncio."""

    def __init__(
        self, opening: Callable[[], Coroutine[Any, Any, httpx.Response]], read: Read[T]
    ) -> None:
        """`opening` asks, when iteration begins, and returns what comes of it."""
        self._opening = opening
        self._asking: asyncio.Task[httpx.Response] | None = None
        self._line = CancelScope()
        self._items = self._read(read)

    async def __anext__(self) -> T:
        return await anext(self._items)

    def cancel(self) -> None:
        """Cancel: the server stops generating, and iteration ends at once."""
        self._line.cut()
        if self._asking is not None:
            self._asking.cancel()

    async def aclose(self) -> None:
        """Cancel and free the connection; only for the iterating task."""
        await self._items.aclose()

    async def _opened(self) -> httpx.Response | None:
        """Ask, in a task of its own, which `cancel` ends; None is that it has."""
        if self._line.is_cut:
            return None
        self._asking = asyncio.create_task(self._opening())
        try:
            return await self._asking
        except asyncio.CancelledError:
            if self._line.is_cut and not is_canceled(asyncio.current_task()):
                return None
            raise

    async def _read(self, read: Read[T]) -> AsyncGenerator[T, None]:
        response = await self._opened()
        if response is None:
            return
        parser = EventParser()
        stream = response.extensions.get("network_stream")
        if stream is not None:
            self._line.take(stream)
        try:
            with transport_errors():
                async for data in response.aiter_bytes():
                    for event in parser.feed(data):
                        if self._line.is_cut:
                            return
                        if (item := read(event)) is not None:
                            yield item
        except ApiConnectionError:
            if not self._line.is_cut:
                raise
        finally:
            await response.aclose()
        if not self._line.is_cut:
            parser.check_end()


def is_canceled(task: "asyncio.Task[Any] | None") -> bool:
    """Whether a task itself is, rather than one that it waits for."""
    return task is not None and task.cancelling() > 0


TextStream = EventStream[str]
AsyncTextStream = AsyncEventStream[str]
ChunkStream = EventStream[ChatChunk]
AsyncChunkStream = AsyncEventStream[ChatChunk]
