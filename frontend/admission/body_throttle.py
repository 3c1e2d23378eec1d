"""Long bodies are read few at a time, so that short requests come between and memory is bounded.

A local client's body arrives at 256 KiB per turn of the event loop. With sixty bodies at once, each
request would wait for sixty pieces. A request that waits here has sent its head; the rest stays in
the kernel. A slow client blocks no other: its body is read beside the others. Huge bodies wait for
huge ones only, and other long bodies not for them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Message, Receive

from headrace.ipc.router import HUGE_BODY_BYTES, MAX_LONG_BACKLOG_BYTES, Router

READERS = 2
CHECK_S = 0.01
FAST_BYTES = 256 << 10  # in that time: 25 MB/s; what comes more slowly is read beside the others
MAX_BACKLOG_BYTES = 32 << 20  # of long bodies on their way to a tokenizer; more huge ones wait,
MAX_LONG_BYTES = MAX_LONG_BACKLOG_BYTES // 2  # and from here on all long ones
POLL_INTERVAL_S = 0.002  # between looks at that


class BodyTurn:
    """A body that is read before others, as long as it comes fast."""

    def __init__(self, receive: Receive, readers: asyncio.Semaphore) -> None:
        self._receive = receive
        self._readers = readers
        self._num_bytes = 0  # since the last check
        self._timer: asyncio.TimerHandle | None = None
        self._check_later()

    async def receive(self) -> Message:
        """Receive a piece, as an ASGI application does."""
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        return message

    def end(self) -> None:
        """Let another body have the turn."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._readers.release()

    def _check(self) -> None:
        if self._num_bytes < FAST_BYTES:
            self.end()
        else:
            self._num_bytes = 0
            self._check_later()

    def _check_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(CHECK_S, self._check)


class BodyThrottle:
    """The long bodies of a frontend."""

    def __init__(self, links: Router) -> None:
        self._links = links
        self._long = asyncio.Semaphore(READERS)
        self._huge = asyncio.Semaphore(READERS)

    @asynccontextmanager
    async def turn(self, receive: Receive, length: int) -> AsyncIterator[Receive]:
        """Wait for the turn of a body of `length` bytes to be read."""
        is_huge = length >= HUGE_BODY_BYTES
        readers = self._huge if is_huge else self._long
        max_bytes = MAX_BACKLOG_BYTES if is_huge else MAX_LONG_BYTES
        await readers.acquire()
        try:
            while self._links.long_backlog() > max_bytes:
                await asyncio.sleep(POLL_INTERVAL_S)
        except BaseException:
            readers.release()
            raise
        turn = BodyTurn(receive, readers)
        try:
            yield turn.receive
        finally:
            turn.end()
