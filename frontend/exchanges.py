"""Open requests of one frontend: an id out, response bytes back.

The ring answers by id; whoever waits for an id is found here. What arrives for an id that nobody
waits for any more is dropped: the client has left and an abort is on its way.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.messages import Head, ResponseFrames, request_id
from headrace.sockets import Frame

MAX_UNSENT_BYTES = 4 << 20  # of one response, waiting for a client that reads too slowly


@dataclass(eq=False)
class Exchange:
    """One request and what has come back for it so far."""

    id: int
    head: Head | None = None
    unsent: bytearray = field(default_factory=bytearray)
    complete: bool = False
    dropped: bool = False  # the client left, or reads too slowly
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, data: Frame, last: bool) -> None:
        """Append response bytes. Past the limit the exchange is dropped: memory stays bounded."""
        self.unsent += data
        self.complete |= last
        self.dropped |= len(self.unsent) > MAX_UNSENT_BYTES and not last
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

    def __init__(self, frontend: int) -> None:
        self._frontend = frontend
        self._counter = 0
        self._open: dict[int, Exchange] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Exchange]:
        return iter(list(self._open.values()))

    def open(self) -> Exchange:
        """Draw an id and wait for its answer."""
        self._counter += 1
        exchange = Exchange(request_id(self._frontend, self._counter))
        self._open[exchange.id] = exchange
        return exchange

    def close(self, exchange: Exchange) -> None:
        """Stop waiting."""
        self._open.pop(exchange.id, None)

    def deliver(self, frames: ResponseFrames, data: Frame) -> None:
        """Hand each entry of a message to the request it is for."""
        for id, head, entry, last in frames.split(data):
            exchange = self._open.get(id)
            if exchange is not None:
                exchange.head = head or exchange.head
                exchange.deliver(entry, last)
