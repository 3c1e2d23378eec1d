"""Generated tokens of sequences that may be resumed after a crash. Pure.

Two kinds are kept. Detokenizers report the tokens of a dead engine's sequences to the new engine.
And a sequence that ended is kept a while, in case its detokenizer died before it sent the end. A
resumed sequence generates none of these tokens again. A sequence may come before its tokens, since
those take another way. It begins anew then, until they are here.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable

from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.messages import GeneratedTokens
from headrace.ipc.sockets import Frame

KEEP_S = 30.0  # tokens not taken by then belong to aborted requests
KEEP_ENDED_S = 2.0  # by then, a detokenizer that serves has delivered the end


class ResumeCache:
    """Generated tokens by the sequence's id before the crash."""

    def __init__(self) -> None:
        self._generated: dict[int, array[int]] = {}
        self._begun: dict[int, int] = {}
        self._came_at = 0.0
        self._ended: OrderedDict[int, tuple[float, Sequence]] = OrderedDict()
        self._all_served_at = 0.0

    def keep(self, generated: GeneratedTokens, tokens: Frame, now: float) -> list[int]:
        """Record the tokens that a detokenizer has of a dead engine's sequences.

        Returns:
            The sequences that have begun without them, by their present ids.
        """
        view, start = memoryview(tokens).cast("B").cast("I"), 0
        ids, counts = memoryview(generated.ids).cast("Q"), memoryview(generated.counts).cast("I")
        for id, count in zip(ids, counts, strict=True):
            self._generated[id] = array("i", view[start : start + count])
            start += count
        self._came_at = now
        return [self._begun.pop(id) for id in ids if id in self._begun]

    def begin(self, ids: Iterable[int], id: int, now: float) -> None:
        """Note a sequence that begins anew: tokens under any of its earlier ids may follow."""
        self._begun |= dict.fromkeys(ids, id)
        self._came_at = now

    def keep_ended(self, sequence: Sequence, now: float) -> None:
        """Record a sequence that has ended."""
        self._ended[sequence.id] = now, sequence

    def take(self, ids: Iterable[int]) -> "array[int]":
        """Return and remove the tokens of a dead engine's sequence: the most under any of its ids.

        There are none if it is unknown.
        """
        return max((self._generated.pop(id, array("i")) for id in ids), key=len)

    def take_ended(self, id: int) -> Sequence | None:
        """Return a sequence that has ended, once; None where it is not known."""
        _, ended = self._ended.pop(id, (0.0, None))
        return ended

    def forget_old(self, now: float, are_serving: bool) -> None:
        """Drop expired entries. Ended sequences are kept while a detokenizer is not
        `are_serving`."""
        if now - self._came_at > KEEP_S:
            self._generated.clear()
            self._begun.clear()
        if not are_serving:
            self._all_served_at = now
        if now - self._all_served_at < KEEP_ENDED_S:
            return
        while self._ended:
            ended_at, sequence = next(iter(self._ended.values()))
            if now - ended_at < KEEP_ENDED_S:
                return
            del self._ended[sequence.id]
