"""The response frames of one step for one frontend."""

from array import array

from headrace.detokenizer_proc.core_texts import NO_FRAMES, CoreFrames
from headrace.ipc.messages import Head, ResponseFrames, request_of


class Frames:
    """Entries in the order in which they are to be written."""

    def __init__(self) -> None:
        self._heads: dict[int, Head] = {}
        self._core = NO_FRAMES
        self._ids = array("Q")
        self._chunks: list[bytes] = []
        self._last: list[int] = []
        self._num_delivered = array("I")

    def announce(self, id: int, head: Head) -> None:
        """Give the head of a response, of which an entry is added later."""
        self._heads[id] = head

    def put_first(self, core: CoreFrames) -> None:
        """Put the core's entries before all others."""
        self._core = core

    def add(
        self, id: int, head: Head | None, data: bytes, last: int, num_delivered: int = 0
    ) -> None:
        """Append bytes to a response, news of a sequence or of the request with `id`.

        Args:
            last: as in `ResponseFrames`.
            num_delivered: as in `HttpRequest`.
        """
        if head is not None:
            self._heads[request_of(id)] = head
        self._ids.append(id)
        self._chunks.append(data)
        self._last.append(last)
        self._num_delivered.append(num_delivered)

    def message(self, engine: int = 0) -> ResponseFrames:
        """Return the message, of sequences that `engine` computes."""
        core = self._core
        if not self._chunks:
            columns = core.ids, core.lengths, core.last, core.num_delivered
            return ResponseFrames(self._heads, *columns, engine=engine)
        return ResponseFrames(
            self._heads,
            core.ids + self._ids.tobytes(),
            core.lengths + array("I", map(len, self._chunks)).tobytes(),
            core.last + bytes(self._last),
            core.num_delivered + self._num_delivered.tobytes(),
            engine=engine,
        )

    def data(self) -> bytes:
        """Return the message's bytes."""
        if not self._chunks:
            return self._core.data
        return b"".join([self._core.data, *self._chunks])
