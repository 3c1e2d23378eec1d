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

import httpx

from headrace.answers import ChatChunk, Completion, EventParser, first_text

Chunk = type[ChatChunk] | type[Completion]


def hang_up(response: httpx.Response) -> None:
    """Shut a response's connection down; who reads it finds its end."""
    stream = response.extensions.get("network_stream")
    found = None if stream is None else stream.get_extra_info("socket")
    if found is None or found.fileno() < 0:
        return
    with socket.socket(fileno=os.dup(found.fileno())) as same, contextlib.suppress(OSError):
        same.shutdown(socket.SHUT_RDWR)


class TextStream(Iterator[str]):
    """The texts of one answer, in order; together they are all of it."""

    def __init__(self, opening: Callable[[], httpx.Response], kind: Chunk) -> None:
        """`opening` asks, when iteration begins, and returns what comes of it."""
        self._opening = opening
        self._response: httpx.Response | None = None
        self._is_canceled = False
        self._texts = self._read(kind)

    def __next__(self) -> str:
        return next(self._texts)

    def cancel(self) -> None:
        """Give up: the server stops generating, and whoever iterates comes to the end.

        Any thread may. Before there is any text, that is when the first would have come.
        """
        self._is_canceled = True
        if self._response is not None:
            hang_up(self._response)

    def close(self) -> None:
        """Give up and free the connection; for who iterates."""
        self._texts.close()

    def _read(self, kind: Chunk) -> Generator[str, None, None]:
        if self._is_canceled:
            return
        parser = EventParser()
        self._response = response = self._opening()
        try:
            for data in response.iter_bytes():
                for event in parser.feed(data):
                    if self._is_canceled:
                        return
                    if text := first_text(event, kind):
                        yield text
        except httpx.TransportError:
            if not self._is_canceled:
                raise
        finally:
            response.close()
        if not self._is_canceled:
            parser.check_end()


class AsyncTextStream(AsyncIterator[str]):
    """The same for asyncio."""

    def __init__(self, opening: Callable[[], Awaitable[httpx.Response]], kind: Chunk) -> None:
        """`opening` asks, when iteration begins, and returns what comes of it."""
        self._opening = opening
        self._response: httpx.Response | None = None
        self._is_canceled = False
        self._texts = self._read(kind)

    async def __anext__(self) -> str:
        return await anext(self._texts)

    def cancel(self) -> None:
        """Give up: the server stops generating, and whoever iterates comes to the end.

        Before there is any text, cancel the task that waits for it instead.
        """
        self._is_canceled = True
        if self._response is not None:
            hang_up(self._response)

    async def aclose(self) -> None:
        """Give up and free the connection; for who iterates."""
        await self._texts.aclose()

    async def _read(self, kind: Chunk) -> AsyncGenerator[str, None]:
        if self._is_canceled:
            return
        parser = EventParser()
        self._response = response = await self._opening()
        try:
            async for data in response.aiter_bytes():
                for event in parser.feed(data):
                    if self._is_canceled:
                        return
                    if text := first_text(event, kind):
                        yield text
        except httpx.TransportError:
            if not self._is_canceled:
                raise
        finally:
            await response.aclose()
        if not self._is_canceled:
            parser.check_end()
