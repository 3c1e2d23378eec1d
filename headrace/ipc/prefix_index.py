"""Which pages an engine holds, in shared memory: tokenizers choose a replica by it.

One memfd per engine, which is its only writer. Any process reads it without a lock. An entry is one
aligned word: the first 8 bytes of a digest. They name its place. Where that is taken the entry is
in another one of the same cache line, and stays there. In a full line it displaces another entry,
so a page may be missing here. A wrong or missing entry costs speed and nothing else.
"""

import mmap
import os
from collections.abc import Iterable

PLACES = 1 << 18  # a power of 2; only what is written takes memory
WORD_BYTES = 8
LINE_PLACES = 8  # of a cache line


def create_prefix_index() -> int:
    """Return the descriptor of an empty index."""
    fd = os.memfd_create("headrace-prefixes", os.MFD_CLOEXEC)
    os.ftruncate(fd, PLACES * WORD_BYTES)
    return fd


class PrefixIndex:
    """The index of one engine. Only the engine writes."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PLACES * WORD_BYTES)
        self._words = memoryview(self._map).cast("Q")

    def add(self, digest: bytes) -> None:
        """Note that a page is cached, which was not."""
        key = key_of(digest)
        place = key % PLACES
        if self._words[place]:
            start, line = self._line(place)
            if key in line:
                return
            place = start + line.index(0) if 0 in line else place
        self._words[place] = key

    def remove(self, digest: bytes) -> None:
        """Note that a page is cached no more."""
        key = key_of(digest)
        start, line = self._line(key % PLACES)
        if key in line:
            self._words[start + line.index(key)] = 0

    def clear(self) -> None:
        """Note that no page is cached; the system takes the memory back."""
        self._map.madvise(mmap.MADV_REMOVE)

    @property
    def words(self) -> "memoryview[int]":
        """All entries, by place; 0 is none."""
        return self._words

    def write(self, places: bytes, words: bytes | memoryview) -> None:
        """Take entries of an index elsewhere: their places, u32, and the words there, u64."""
        found = memoryview(words).cast("B").cast("Q")
        for place, word in zip(memoryview(places).cast("I"), found, strict=True):
            self._words[place] = word

    def count_cached(self, digests: Iterable[bytes]) -> int:
        """Return how many pages at the beginning of a chain are cached."""
        count = 0
        for digest in digests:
            key = key_of(digest)
            place = key % PLACES
            if self._words[place] != key and key not in self._line(place)[1]:
                break
            count += 1
        return count

    def _line(self, place: int) -> tuple[int, list[int]]:
        """Return the first place of a cache line, and the entries there."""
        start = place - place % LINE_PLACES
        return start, self._words[start : start + LINE_PLACES].tolist()


def key_of(digest: bytes) -> int:
    """Return what an entry has of a digest; never 0, which is no entry."""
    return int.from_bytes(digest[:WORD_BYTES], "little") or 1
