"""What one step brings for one frontend."""

from headrace.detokenizer_proc.core_texts import NO_FRAMES, CoreFrames
from headrace.messages import Head, ResponseFrames


class Frames:
    """Entries in the order in which they are to be written."""

    def __init__(self) -> None:
        self._heads: dict[int, Head] = {}
        self._core = NO_FRAMES
        self._chunks: dict[int, list[bytes]] = {}
        self._last: dict[int, bool] = {}

    def announce(self, id: int, head: Head) -> None:
        """Give the head of a response, of which an entry is added later."""
        self._heads[id] = head

    def put_first(self, core: CoreFrames) -> None:
        """Take the entries that the core has made; they go before all others."""
        self._core = core

    def add(self, id: int, head: Head | None, data: bytes, last: bool) -> None:
        """Append bytes to a request's response; sequences of one request share its entry."""
        if head is not None:
            self._heads[id] = head
        self._chunks.setdefault(id, []).append(data)
        self._last[id] = last

    def message(self) -> ResponseFrames:
        """Return the message."""
        core = self._core
        if not self._chunks:
            return ResponseFrames(self._heads, core.requests, core.lengths, core.last)
        lengths = (sum(map(len, chunks)) for chunks in self._chunks.values())
        own = ResponseFrames.of(self._heads, self._chunks, lengths, self._last.values())
        return ResponseFrames(
            self._heads,
            core.requests + own.ids,
            core.lengths + own.lengths,
            core.last + own.last,
        )

    def data(self) -> bytes:
        """Return the message's bytes."""
        if not self._chunks:
            return self._core.data
        own = (chunk for chunks in self._chunks.values() for chunk in chunks)
        return b"".join([self._core.data, *own])
