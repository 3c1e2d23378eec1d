"""A queue of new requests, of which some are started in each turn of the event loop.

Hundreds of clients may ask at once. One request is little work, but hundreds in one turn keep the
event loop from its other sockets for milliseconds.
"""

import asyncio
from collections import deque
from collections.abc import Callable

MAX_BEGUN = 16  # in one turn of the event loop


class StartQueue:
    """A queue of requests to start."""

    def __init__(self, after: Callable[[], None] = lambda: None) -> None:
        """Call `after` at the end of each turn, for work done once per batch."""
        self._after = after
        self._line: deque[Callable[[], None]] = deque()

    def add(self, begin: Callable[[], None], is_first: bool = False) -> None:
        """Have a request begun when those before it are, or before all that wait."""
        if is_first:
            self._line.appendleft(begin)
        else:
            self._line.append(begin)
        if len(self._line) == 1:
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        try:
            for _ in range(min(MAX_BEGUN, len(self._line))):
                self._line.popleft()()
        finally:  # where one fails, which the loop logs, the others go on
            if self._line:
                asyncio.get_running_loop().call_soon(self._begin)
            self._after()
