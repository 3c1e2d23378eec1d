"""Messages from the ring, handed to those who wait, some entries at a time.

A step of hundreds of streams wakes hundreds of tasks, each of which writes to a socket: between
some and the next the event loop looks at everything else.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import islice

from headrace.board import Field, Slot
from headrace.frontend.exchanges import Exchanges
from headrace.messages import Entry, ResponseFrames
from headrace.sockets import Frame

MAX_ENTRIES = 16  # in one turn of the event loop


class Delivery:
    """What has come and has not been handed over."""

    def __init__(self, loop: asyncio.AbstractEventLoop, exchanges: Exchanges, slot: Slot) -> None:
        self._loop = loop
        self._exchanges = exchanges
        self._slot = slot
        self._messages: deque[Iterator[Entry]] = deque()

    def __len__(self) -> int:
        """How many messages there are."""
        return len(self._messages)

    def take(self, frames: ResponseFrames, data: Frame) -> None:
        """Take a message; hand over what there is a turn for."""
        self._messages.append(frames.split(data))
        if len(self._messages) == 1:
            self._deliver()

    def _deliver(self) -> None:
        entries = list(islice(self._messages[0], MAX_ENTRIES))
        for entry in entries:
            self._exchanges.deliver(*entry)
        if len(entries) < MAX_ENTRIES:
            self._messages.popleft()
            self._slot.add(Field.MESSAGES_TAKEN)
        if self._messages:
            self._loop.call_soon(self._deliver)
