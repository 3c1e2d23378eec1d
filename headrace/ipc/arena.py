"""The arena: image tensors in shared memory, between their writers and readers.

One memfd, inherited by descriptor like the board. Each process that makes tensors owns a region,
and alone places tensors in it; the engine reports when it is done with a tensor. A tensor begins at
a page. Each page has two words at the arena's beginning, with one writer each. The owner's word
counts how often the tensor there has been sent, the engine's how often it is done with it. Both
carry the generation of the place. A death leaves no half-written state: the next process begins
other generations, and words of old generations are ignored.
"""

import mmap
import os
from bisect import insort
from collections.abc import Iterable

from headrace.ipc.messages import Tensor

PAGE_BYTES = 4096
WORDS = 2  # of a page, 8 bytes each: the owner's and the engine's
COUNT_BITS = 32  # the lower ones; above them is the generation
COUNT_MASK = (1 << COUNT_BITS) - 1


class Stale(Exception):
    """A tensor is gone: its place was reused, or a process that held it has died."""


class Arena:
    """All regions.

    Args:
        fd: made by `create`.
        num_regions: of equal size.
    """

    def __init__(self, fd: int, num_regions: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, 0)
        self._bytes = memoryview(self._map)
        num_pages = len(self._map) // PAGE_BYTES
        self._words = self._bytes[: num_pages * WORDS * 8].cast("Q")
        num_control = -(-num_pages * WORDS * 8 // PAGE_BYTES)
        self._region_pages = (num_pages - num_control) // num_regions
        self._starts = [num_control + i * self._region_pages for i in range(num_regions)]

    @classmethod
    def create(cls, num_regions: int, region_bytes: int) -> "Arena":
        """Make regions of `region_bytes` at least. Memory is taken where it is written."""
        num_pages = num_regions * -(-region_bytes // PAGE_BYTES)
        num_pages += -(-num_pages // (PAGE_BYTES // (WORDS * 8) - 1))  # for the words of all
        fd = os.memfd_create("headrace-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_pages * PAGE_BYTES)
        return cls(fd, num_regions)

    def region(self, index: int) -> "Region":
        """Take over a region; all earlier content is stale. For its owner alone."""
        start = self._starts[index]
        return Region(self._words, self._bytes, start, self._region_pages)

    def read(self, tensor: Tensor) -> memoryview:
        """Return a tensor's bytes.

        The place may be reused at any time: check `holds` after reading.

        Raises:
            Stale: it is gone.
        """
        if not self.holds(tensor):
            raise Stale(f"what was at {tensor.offset} of the arena is gone")
        return self._bytes[tensor.offset : tensor.offset + tensor.num_bytes].toreadonly()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is there."""
        word = tensor.offset // PAGE_BYTES * WORDS
        return self._words[word] >> COUNT_BITS == tensor.generation

    def release(self, tensor: Tensor) -> None:
        """Release a tensor that was sent once. For its one reader alone."""
        word = tensor.offset // PAGE_BYTES * WORDS + 1
        before = self._words[word]
        count = before & COUNT_MASK if before >> COUNT_BITS == tensor.generation else 0
        if self.holds(tensor):
            self._words[word] = tensor.generation << COUNT_BITS | count + 1


class Region:
    """A region, for the process that owns it. Places are offsets from the arena's beginning."""

    def __init__(
        self, words: "memoryview[int]", data: memoryview, first_page: int, num_pages: int
    ) -> None:
        self._words = words
        self._data = data
        self._sizes: dict[int, int] = {}  # pages by first page
        self._holes = [(first_page, num_pages)]  # first page and length, in order
        self.max_bytes = num_pages * PAGE_BYTES
        self.num_bytes = 0  # that are taken
        for page in range(first_page, first_page + num_pages):
            if words[page * WORDS]:
                self._turn(page)

    def allocate(self, num_bytes: int) -> int | None:
        """Return a place for `num_bytes`, which nothing has been sent of; None is no room."""
        num_pages = max(1, -(-num_bytes // PAGE_BYTES))
        for i, (page, length) in enumerate(self._holes):
            if length >= num_pages:
                rest = (page + num_pages, length - num_pages)
                self._holes[i : i + 1] = [rest] if rest[1] else []
                self._sizes[page] = num_pages
                self.num_bytes += num_pages * PAGE_BYTES
                self._turn(page)
                return page * PAGE_BYTES
        return None

    def allocate_all(self, sizes: Iterable[int]) -> list[int] | None:
        """Return a place for each number of bytes; None is no room for all."""
        found: list[int] = []
        for size in sizes:
            place = self.allocate(size)
            if place is None:
                for other in found:
                    self.free(other)
                return None
            found.append(place)
        return found

    def view(self, place: int) -> memoryview:
        """Return the bytes of a place, to be written."""
        return self._data[place : place + self._sizes[place // PAGE_BYTES] * PAGE_BYTES]

    def generation(self, place: int) -> int:
        """Return the generation of a place now."""
        return self._words[place // PAGE_BYTES * WORDS] >> COUNT_BITS

    def send(self, place: int) -> None:
        """Count a place's content as sent to the engine once more."""
        self._words[place // PAGE_BYTES * WORDS] += 1

    def take_back(self, tensor: Tensor) -> None:
        """Count a tensor as sent once less: it has not gone to the engine."""
        if self.generation(tensor.offset) == tensor.generation:
            self._words[tensor.offset // PAGE_BYTES * WORDS] -= 1

    def num_sent(self, place: int) -> int:
        """Return how often a place's content was sent without a release by the engine."""
        word = place // PAGE_BYTES * WORDS
        sent, done = self._words[word], self._words[word + 1]
        is_same = sent >> COUNT_BITS == done >> COUNT_BITS
        return (sent & COUNT_MASK) - (done & COUNT_MASK if is_same else 0)

    def free(self, place: int) -> None:
        """Free a place. Its content becomes stale."""
        page = place // PAGE_BYTES
        length = self._sizes.pop(page)
        self.num_bytes -= length * PAGE_BYTES
        self._turn(page)
        insort(self._holes, (page, length))
        joined: list[tuple[int, int]] = []
        for start, size in self._holes:
            if joined and sum(joined[-1]) == start:
                start, size = joined[-1][0], joined.pop()[1] + size
            joined.append((start, size))
        self._holes = joined

    def forget_sent(self) -> None:
        """Count nothing as sent, after the engine died. The content stays, in new generations."""
        for page in self._sizes:
            self._turn(page)

    def _turn(self, page: int) -> None:
        """Begin the next generation of a page, of which nothing has been sent."""
        word = page * WORDS
        self._words[word] = ((self._words[word] >> COUNT_BITS) + 1) << COUNT_BITS
