"""Keeps what a GPU's pool has in the host's memory, too, and brings it back. Pure.

A page is copied out once it is full, not when it is evicted (write-through). Then nothing is to be
done at its eviction, and the death of a worker loses no full page. The host's memory is a pool of
its own, beneath the GPU's. Its table lies in shared memory, where the KV store reads it.

Workers make the copies beside their steps, in the order in which they are asked for. Pages are in
use while they are copied, here and there. A copy is registered once all workers have made it, so
the tables tell of whole pages alone, whenever a process dies.
"""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.engine_proc.kv_cache.copy_cost import CopyCost
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.worker_messages import CopyPages

PAGES_OUT = 256  # that are copied out at once: as many as a step of 8192 tokens fills
FIRST_S_PER_BYTE = 1e-10  # before any copy is measured


@dataclass(eq=False, slots=True)
class Copy:
    """Pages that workers copy: one of the GPU and one of the host for each digest."""

    to_host: bool
    digests: list[bytes]
    pages: "array[int]"
    host_pages: "array[int]"
    places: list[int] = field(default_factory=list)  # in the first of `sequences`, if they come in
    before: "array[int]" = field(default_factory=lambda: array("i"))  # pages that are to stay
    sequences: list[Sequence] = field(default_factory=list)  # those that wait for it


class HostTier:
    """The copies of a GPU's pages.

    Args:
        page_bytes: of a page, of all workers together.
        fetch: has a sequence wait for what the KV store has beneath the host.
    """

    def __init__(
        self,
        device: PagePool,
        host: PagePool,
        page_bytes: int,
        fetch: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        self.host = host
        self.page_bytes = page_bytes
        self._device = device
        self._fetch = fetch
        self._prompt_s: Callable[[int], float] = lambda _: float("inf")
        self._step_s: Callable[[], float] = lambda: 0.0
        self._cost = CopyCost(FIRST_S_PER_BYTE)
        self._unstored: deque[bytes] = deque()  # of full pages, the oldest first
        self._waits: deque[Sequence] = deque()  # those whose copies have not begun
        self._open: deque[Copy] = deque()  # the oldest first
        self._coming: dict[bytes, Copy] = {}  # of the pages that come in
        device.on_cached = self._unstored.append

    def open(self, prompt_s: Callable[[int], float], step_s: Callable[[], float]) -> None:
        """Learn what computing costs, as `PageFetcher` does."""
        self._prompt_s, self._step_s = prompt_s, step_s

    @property
    def is_busy(self) -> bool:
        """Whether anything is copied, or is to be."""
        return bool(self._open or self._waits or self._unstored)

    def enter(self, sequence: Sequence) -> None:
        """Have the host evict the pages of a queued sequence last, and fetch what it lacks."""
        self.host.free(self.host.match_prefix(sequence.digests))
        self._fetch(sequence)

    def copy_in(self, sequence: Sequence) -> None:
        """Have a sequence that is to run wait for its pages, where that is quicker."""
        lacking = self._lacking(sequence)
        is_coming = any(sequence.digests[place] in self._coming for place in lacking)
        if lacking and (is_coming or self._is_worth(sequence, len(lacking))):
            sequence.is_copying = True
            self._waits.append(sequence)

    def _lacking(self, sequence: Sequence) -> list[int]:
        """Return the places of pages that the host alone has, as far as a prefix goes."""
        lacking = []
        for place, digest in enumerate(sequence.digests):
            if self._device.has(digest):
                continue
            if not self.host.has(digest):
                break
            lacking.append(place)
        return lacking

    def _is_worth(self, sequence: Sequence, num_pages: int) -> bool:
        """Whether there is room for the whole sequence, and pages come sooner than computed."""
        device = self._device
        num_known = device.count_cached(sequence.digests)
        if not device.can_allocate(device.pages_for(len(sequence.tokens) + 1) - num_known):
            return False
        seconds = self._cost.seconds(num_pages * self.page_bytes) + self._step_s()
        if seconds < self._prompt_s(num_pages * device.page_tokens):
            return True
        self._cost.hope()
        return False

    def next(self) -> CopyPages | None:
        """Return what workers are to copy next, if there is anything now."""
        copy = None
        while copy is None and self._waits:
            copy = self._begin_in(self._waits.popleft())
        if copy is None:
            copy = self._begin_out()
        if copy is None:
            return None
        self._open.append(copy)
        return CopyPages(copy.to_host, copy.pages.tobytes(), copy.host_pages.tobytes())

    def _begin_in(self, sequence: Sequence) -> Copy | None:
        """Begin to copy what a sequence lacks, unless another waits for some of it already."""
        lacking = [] if sequence.has_ended else self._lacking(sequence)
        digests = [sequence.digests[place] for place in lacking]
        for digest in digests:
            if digest in self._coming:
                self._coming[digest].sequences.append(sequence)
                return None
        before = array("i")
        if lacking:
            known = sequence.digests[: lacking[-1]]
            before = self._device.match_prefix([d for d in known if self._device.has(d)])
        if not lacking or not self._device.can_allocate(len(lacking)):
            self._device.free(before)
            sequence.is_copying = False
            return None
        host_pages = self.host.match_prefix(digests)
        pages = self._device.allocate(len(lacking))
        copy = Copy(False, digests, pages, host_pages, lacking, before, [sequence])
        self._coming |= dict.fromkeys(digests, copy)
        return copy

    def _begin_out(self) -> Copy | None:
        """Begin to copy out full pages that the host lacks, those that were full first."""
        copy = Copy(True, [], array("i"), array("i"))
        if any(other.to_host for other in self._open):
            return None
        while self._unstored and len(copy.digests) < PAGES_OUT:
            digest = self._unstored.popleft()
            if self.host.has(digest) or not self.host.can_allocate(1):
                continue
            if found := self._device.match_prefix([digest]):
                copy.digests.append(digest)
                copy.pages += found
                copy.host_pages += self.host.allocate(1)
        return copy if copy.digests else None

    def take(self, seconds: float) -> Copy:
        """Note that workers have made the oldest copy, and what it took; return it."""
        copy = self._open.popleft()
        if copy.to_host:
            for digest, host_page in zip(copy.digests, copy.host_pages, strict=True):
                self.host.cache(host_page, digest)
        else:
            self._cost.measure(seconds, len(copy.digests) * self.page_bytes)
            for place, page in zip(copy.places, copy.pages, strict=True):
                self._device.cache_of(copy.sequences[0], place, page)
        self._close(copy)
        return copy

    def _close(self, copy: Copy) -> None:
        """Let go of what a copy needs. What is not registered is empty."""
        self._device.free(copy.before + copy.pages)
        self.host.free(copy.host_pages)
        for digest in () if copy.to_host else copy.digests:
            del self._coming[digest]
        for sequence in copy.sequences:
            sequence.is_copying = False

    def lose_workers(self) -> None:
        """End all copies and waits: the workers are gone, and with them the GPU's pages."""
        while self._open:
            self._close(self._open.popleft())
        for sequence in self._waits:
            sequence.is_copying = False
        self._waits.clear()
        self._unstored.clear()
