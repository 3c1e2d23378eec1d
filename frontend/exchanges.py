"""Open requests of one frontend: an id out, response bytes back.

The ring answers by id; whoever waits for an id is found here. What arrives for an id that nobody
waits for any more is dropped: the client has left and an abort is on its way.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace.board import Field, Slot
from headrace.messages import Head, request_id
from headrace.sockets import Frame

MAX_UNSENT_BYTES = 4 << 20  # of one response, waiting for a client that reads too slowly


@dataclass(eq=False)
class Exchange:
    """One request and what has come back for it so far."""

    id: int
    received_at: int = 0  # when the head was read, CLOCK_MONOTONIC, ns
    wants_timing: bool = False
    head: Head | None = None
    unsent: bytearray = field(default_factory=bytearray)
    complete: bool = False
    dropped: bool = False  # the client left, or reads too slowly
    on_overflow: Callable[[], None] | None = None  # the client reads too slowly
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, data: Frame, last: bool) -> None:
        """Append response bytes. Past the limit the exchange is dropped: memory stays bounded."""
        self.unsent += data
        self.complete |= last
        if len(self.unsent) > MAX_UNSENT_BYTES and not last and not self.dropped:
            self.dropped = True
            if self.on_overflow is not None:
                self.on_overflow()
        self._news.set()

    def drop(self) -> None:
        """Give up: the client is gone."""
        self.dropped = True
        self._news.set()

    async def take(self) -> bytes:
        """Return what has come since the last call, at least one byte unless at the end."""
        await self._news.wait()
        data = bytes(self.unsent)
        self.unsent.clear()
        if not (self.complete or self.dropped):
            self._news.clear()
        return data


class Exchanges:
    """All open requests of a frontend."""

    def __init__(self, frontend: int, slot: Slot) -> None:
        self._frontend = frontend
        self._slot = slot
        self._counter = 0
        self._open: dict[int, Exchange] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Exchange]:
        return iter(list(self._open.values()))

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that have come and not been taken."""
        return sum(len(exchange.unsent) for exchange in self._open.values())

    def open(self, wants_timing: bool = False) -> Exchange:
        """Draw an id and wait for its answer."""
        self._counter += 1
        id = request_id(self._frontend, self._counter)
        exchange = Exchange(id, time.monotonic_ns(), wants_timing)
        self._open[id] = exchange
        self._slot[Field.OPEN_REQUESTS] = len(self._open)
        return exchange

    def close(self, exchange: Exchange) -> None:
        """Stop waiting."""
        self._open.pop(exchange.id, None)
        self._slot[Field.OPEN_REQUESTS] = len(self._open)

    def deliver(self, id: int, head: Head | None, data: Frame, last: bool) -> None:
        """Hand an entry of a message to the request it is for."""
        exchange = self._open.get(id)
        if exchange is not None:
            exchange.head = head or exchange.head
            exchange.deliver(data, last)
