"""The encoder cache: allocates rows of the embedding area to images. Pure.

`EmbeddingArea` has the memory. An image is identified by its key and encoded once for all sequences
that use it. An image without users keeps its rows until they are allocated again, least recently
used first. Rows of an image need not be adjacent, so there is no fragmentation.
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
    """Every row is free or belongs to an image. An image has users or is idle."""

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
        """Add a user to each image. There must be room for the new ones; see `can_hold`."""
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
            self._evict()
        first = len(self._free) - num_rows
        rows = self._free[first:]
        del self._free[first:]
        rows.reverse()
        return rows

    def _evict(self) -> None:
        """Free the image that has had no users for longest."""
        key, _ = self._idle.popitem(last=False)
        rows = self._held.pop(key).rows
        self._num_idle -= len(rows)
        self._free.extend(rows)

    def let_go(self, keys: Iterable[bytes]) -> None:
        """Remove a user from each image. One without users and without an embedding is freed."""
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

    def forget_idle(self) -> None:
        """Free all images without users."""
        while self._idle:
            self._evict()

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
        """Return the rows of an image that has users."""
        return self._held[key].rows
