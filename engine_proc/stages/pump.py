"""A thread that takes what comes through shared memory, for a loop that waits for sockets."""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from headrace.ipc.sockets import POLLIN

T = TypeVar("T")

WAIT_S = 0.2  # between looks at whether it is to end


class Pump(Generic[T]):
    """Takes items from the moment that it is made.

    Args:
        receive: waits for the next item, for so many seconds at most; None is that there is none.
    """

    def __init__(self, receive: Callable[[float], T | None]) -> None:
        self._receive = receive
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._items: deque[T] = deque()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="pump", daemon=True)
        self._thread.start()

    @property
    def polled(self) -> list[tuple[Any, int]]:
        """What tells that there is an item."""
        return [(self._fd, POLLIN)]

    def take(self) -> Iterator[T]:
        """Yield the items that have come."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)  # before: an item that comes meanwhile wakes the loop again
        while self._items:
            yield self._items.popleft()

    def close(self) -> None:
        """End the thread. It takes nothing after that."""
        self._has_ended = True
        self._thread.join()
        os.close(self._fd)

    def _run(self) -> None:
        while not self._has_ended:
            item = self._receive(WAIT_S)
            if item is not None:
                self._items.append(item)
                os.eventfd_write(self._fd, 1)
