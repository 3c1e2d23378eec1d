"""Answers over HTTP as they come, which can be given up at any moment.

To close a socket does not wake who waits for it; to shut it down does. So `cancel` may be called
while another thread, or task, waits for the next text.
"""

import contextlib
import os
import socket
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
)
from typing import TypeVar

import httpx

from headrace.answers import ChatChunk, Completion, EventParser, decode, first_text

T = TypeVar("T")
Read = Callable[[str], T | None]  # what an event is to who iterates


def chat_text(event: str) -> str | None:
    """Return the new text of a chat's first answer, if any."""
    return first_text(event, ChatChunk) or None


def completion_text(event: str) -> str | None:
    """Return the new text of a completion, if any."""
    return first_text(event, Completion) or None


def chat_chunk(event: str) -> ChatChunk:
    """Return all that is new in a chat."""
    return decode(event, ChatChunk)


def hang_up(response: httpx.Response) -> None:
    """Shut a response's connection down; who reads it finds its end."""
    stream = response.extensions.get("network_stream")
    found = None if stream is None else stream.get_extra_info("socket")
    if found is None or found.fileno() < 0:
        return
    with socket.socket(fileno=os.dup(found.fileno())) as same, contextlib.suppress(OSError):
        same.shutdown(socket.SHUT_RDWR)


class AnswerStream(Iterator[T]):
    """What `read` makes of the events of one answer, in order; None is nothing to tell."""

    def __init__(self, opening: Callable[[], httpx.Response], read: Read[T]) -> None:
        """`opening` asks, when iteration begins, and returns what comes of it."""
        self._opening = opening
        self._response: httpx.Response | None = None
        self._is_canceled = False
        self._items = self._read(read)

    def __next__(self) -> T:
        return next(self._items)

    def cancel(self) -> None:
        """Give up: the server stops generating, and whoever iterates comes to the end.

        Any thread may. Before there is any text, that is when the first would have come.
        """
        self._is_canceled = True
        if self._response is not None:
            hang_up(self._response)

    def close(self) -> None:
        """Give up and free the connection; for who iterates."""
        self._items.close()

    def _read(self, read: Read[T]) -> Generator[T, None, None]:
        if self._is_canceled:
            return
        parser = EventParser()
        self._response = response = self._opening()
        try:
            for data in response.iter_bytes():
                for event in parser.feed(data):
                    if self._is_canceled:
                        return
                    if (item := read(event)) is not None:
                        yield item
        except httpx.TransportError:
            if not self._is_canceled:
                raise
        finally:
            response.close()
        if not self._is_canceled:
            parser.check_end()


class AsyncAnswerStream(AsyncIterator[T]):
    """The same for asyncio."""

    def __init__(self, opening: Callable[[], Awaitable[httpx.Response]], read: Read[T]) -> None:
        """`opening` asks, when iteration begins, and returns what comes of it."""
        self._opening = opening
        self._response: httpx.Response | None = None
        self._is_canceled = False
        self._items = self._read(read)

    async def __anext__(self) -> T:
        return await anext(self._items)

    def cancel(self) -> None:
        """Give up: the server stops generating, and whoever iterates comes to the end.

        Before there is any text, cancel the task that waits for it instead.
        """
        self._is_canceled = True
        if self._response is not None:
            hang_up(self._response)

    async def aclose(self) -> None:
        """Give up and free the connection; for who iterates."""
        await self._items.aclose()

    async def _read(self, read: Read[T]) -> AsyncGenerator[T, None]:
        if self._is_canceled:
            return
        parser = EventParser()
        self._response = response = await self._opening()
        try:
            async for data in response.aiter_bytes():
                for event in parser.feed(data):
                    if self._is_canceled:
                        return
                    if (item := read(event)) is not None:
                        yield item
        except httpx.TransportError:
            if not self._is_canceled:
                raise
        finally:
            await response.aclose()
        if not self._is_canceled:
            parser.check_end()


TextStream = AnswerStream[str]
AsyncTextStream = AsyncAnswerStream[str]
ChunkStream = AnswerStream[ChatChunk]
AsyncChunkStream = AsyncAnswerStream[ChatChunk]
