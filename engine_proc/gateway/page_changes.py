"""Which words of a prefix index have changed since the last look."""

import numpy as np
import numpy.typing as npt

from headrace.ipc.prefix_index import PrefixIndex

LOOK_NS = 250_000_000  # between looks, each of 0.2 ms


class PageChanges:
    """The changes of an index, for a reader that begins with an empty one."""

    def __init__(self, index: PrefixIndex) -> None:
        self._now: npt.NDArray[np.uint64] = np.frombuffer(index.words, np.uint64)
        self._seen = np.zeros_like(self._now)
        self._looked_at = 0

    def begin(self) -> None:
        """Begin anew with an empty reader."""
        self._seen[:] = 0

    def take(self, now: int) -> tuple[bytes, bytes] | None:
        """Return the places that have changed, u32, and their words, u64; None without any.

        Args:
            now: ns. It looks now and then.
        """
        if now < self._looked_at + LOOK_NS:
            return None
        self._looked_at = now
        places = np.flatnonzero(self._now != self._seen)
        if not len(places):
            return None
        words = self._now[places]
        self._seen[places] = words
        return places.astype(np.uint32).tobytes(), words.tobytes()
