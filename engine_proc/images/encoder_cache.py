"""The embedding area's rows: which image has which, and who needs it. Pure bookkeeping; the memory
is `EmbeddingArea`'s.

An image is known by its key and encoded once, however many need it. What nobody needs any more is
kept until its rows are needed for something else; the image unused for longest goes first. Rows of
an image need not be adjacent, so room is never in pieces.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(slots=True)
class Held:
    """An image's rows."""

    rows: "array[int]"  # in the order of its tokens
    num_users: int = 0
    is_filled: bool = False  # the embedding is there


class EncoderCache:
    """Every row is free or an image's, and an image is needed by someone or idle."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = array("i", range(num_rows - 1, -1, -1))
        self._held: dict[bytes, Held] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # longest unused first
        self._num_idle = 0  # rows of those

    @property
    def num_free(self) -> int:
        """Rows that can be taken, those of idle images included."""
        return len(self._free) + self._num_idle

    def can_hold(self, sizes: Mapping[bytes, int]) -> bool:
        """Whether `hold` would succeed. `sizes` are numbers of rows by key."""
        num_missing = sum(size for key, size in sizes.items() if key not in self._held)
        num_kept = sum(size for key, size in sizes.items() if key in self._idle)
        return num_missing <= self.num_free - num_kept

    def hold(self, sizes: Mapping[bytes, int]) -> None:
        """Note that somebody needs these images; there must be room for those that are new."""
        assert self.can_hold(sizes), f"{sizes} wanted, {self.num_free} rows free"
        for key in sizes:  # before anything is evicted
            held = self._held.get(key)
            if held is not None:
                if key in self._idle:
                    del self._idle[key]
                    self._num_idle -= len(held.rows)
                held.num_users += 1
        for key, size in sizes.items():
            if key not in self._held:
                self._held[key] = Held(self._take(size), 1)

    def _take(self, num_rows: int) -> "array[int]":
        while len(self._free) < num_rows:
            key, _ = self._idle.popitem(last=False)
            rows = self._held.pop(key).rows
            self._num_idle -= len(rows)
            self._free.extend(rows)
        first = len(self._free) - num_rows
        rows = self._free[first:]
        del self._free[first:]
        rows.reverse()
        return rows

    def let_go(self, keys: Iterable[bytes]) -> None:
        """Note that somebody needs these images no more. One without an embedding is forgotten."""
        for key in keys:
            held = self._held[key]
            held.num_users -= 1
            assert held.num_users >= 0, "an image was let go of twice"
            if held.num_users:
                continue
            if held.is_filled:
                self._idle[key] = None
                self._num_idle += len(held.rows)
            else:
                del self._held[key]
                self._free.extend(held.rows)

    def fill(self, key: bytes) -> None:
        """Note that an embedding is there."""
        self._held[key].is_filled = True

    def is_known(self, key: bytes) -> bool:
        """Whether an image has rows."""
        return key in self._held

    def is_filled(self, key: bytes) -> bool:
        """Whether an image's embedding is there."""
        return key in self._held and self._held[key].is_filled

    def rows(self, key: bytes) -> "array[int]":
        """Return the rows of an image that somebody needs."""
        return self._held[key].rows
