"""Aborts: the remaining work of requests whose clients have left is skipped.

Frontends tell by a link of its own. On that of the bodies an abort would come last, after all that
waits there, which is taken a few at a time. So it may come before its request, or after that has
gone on to the engine, which hears of it as well.
"""

import time
from collections.abc import Callable

from headrace.ipc.aborted_ids import AbortedIds
from headrace.ipc.messages import Abort
from headrace.ipc.sockets import Inbox, address

POLL_INTERVAL_S = 0.001  # between looks: one takes a tenth of the time that a short chat does


class Abandoned(Exception):
    """The client of a request has left."""


class Aborts:
    """The aborts that one process has received."""

    def __init__(
        self, run_dir: str, index: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Listen; `index` is that of the process, among tokenizer processes."""
        self._inbox: Inbox[Abort] = Inbox(address(run_dir, "aborts", index), Abort)
        self._aborted = AbortedIds()
        self._clock = clock
        self._looked_at = float("-inf")

    def look(self) -> None:
        """Read pending aborts, at most once per interval."""
        now = self._clock()
        if now - self._looked_at < POLL_INTERVAL_S:
            return
        self._looked_at = now
        while (received := self._inbox.receive(0)) is not None:
            self._aborted.add(received[0].request)

    def __contains__(self, request: int) -> bool:
        return request in self._aborted

    def check(self, request: int) -> None:
        """Check that the client still waits.

        Raises:
            Abandoned: the client has left.
        """
        self.look()
        if request in self._aborted:
            raise Abandoned

    def close(self) -> None:
        """Stop listening."""
        self._inbox.close()
