"""What sequences had said when an engine died, told to the next one by detokenizers. Pure.

Their requests are sent again and take it up, so that it need not be generated once more.
"""

from array import array

from headrace.messages import Said
from headrace.sockets import Frame

KEEP_S = 30.0  # what nobody has taken up by then belongs to requests that are gone


class Legacy:
    """Generated tokens by sequence, as it was called before."""

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}
        self._came_at = 0.0

    def keep(self, said: Said, tokens: Frame, now: float) -> None:
        """Take note of a message."""
        view, start = memoryview(tokens).cast("B").cast("I"), 0
        ids, counts = memoryview(said.ids).cast("Q"), memoryview(said.counts).cast("I")
        for id, count in zip(ids, counts, strict=True):
            self._tokens[id] = array("i", view[start : start + count])
            start += count
        self._came_at = now

    def take(self, id: int) -> "array[int]":
        """Return what a sequence had said, once; nothing where that is not known."""
        return self._tokens.pop(id, array("i"))

    def forget_old(self, now: float) -> None:
        """Let go of what has been here for too long."""
        if self._tokens and now - self._came_at > KEEP_S:
            self._tokens.clear()
