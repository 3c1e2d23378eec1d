"""Keeps what a GPU has of prompts in the host's memory, too, and brings it back. Pure.

A page is copied out once it is full, not when it is evicted (write-through). Then nothing is to be
done at its eviction, and the death of a worker loses no full page. In models with states, so is a
checkpoint that stays. The host's memory has pools of its own, beneath the GPU's. Their tables lie
in shared memory, where the KV store reads them.

Workers make the copies beside their steps, in the order in which they are asked for. Pages and
slots are in use while they are copied, here and there. Of the GPU's slots copies use only those
that sequences leave to them. A copy is registered once all workers have made it, so the tables tell
of whole pages and states alone, whenever a process dies.
"""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.engine_proc.kv_cache.copy_cost import CopyCost
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.worker_messages import CacheLayout, CopyPages, RecordKind

PAGES_OUT = 256  # that are copied out at once: as many as a step of 8192 tokens fills
COPY_SLOTS = 4  # of the GPU's, that copies use at once
FIRST_S_PER_BYTE = 1e-10  # before any copy is measured

Key = tuple[RecordKind, bytes]


class CachePools(NamedTuple):
    """The pools of a GPU, or of its host. Those of a model without states have no slots."""

    pages: PagePool
    slots: StateSlots


class Missing(NamedTuple):
    """What the host alone has of the prefix from which a sequence can go on."""

    known: list[bytes]  # pages of the prefix that the GPU has
    places: list[int]  # of those that it lacks
    digests: list[bytes]  # and what names them
    states: list[bytes]  # the checkpoint behind the prefix, if the GPU lacks that
    num_saved: int  # pages that need not be computed once all is there

    @property
    def keys(self) -> list[Key]:
        """What names all that is missing."""
        return keys_of(self.digests, self.states)


def keys_of(pages: list[bytes], states: list[bytes]) -> list[Key]:
    """Return what tells pages and states of the same digests apart."""
    kinds = (RecordKind.PAGES, pages), (RecordKind.STATES, states)
    return [(kind, digest) for kind, digests in kinds for digest in digests]


@dataclass(eq=False, slots=True)
class Copy:
    """What workers copy: one page of the GPU and one of the host for each digest; so with slots."""

    to_host: bool
    digests: list[bytes] = field(default_factory=list)
    pages: "array[int]" = field(default_factory=lambda: array("i"))
    host_pages: "array[int]" = field(default_factory=lambda: array("i"))
    states: list[bytes] = field(default_factory=list)  # what names checkpoints
    slots: "array[int]" = field(default_factory=lambda: array("i"))
    host_slots: "array[int]" = field(default_factory=lambda: array("i"))
    places: list[int] = field(default_factory=list)  # in the first of `sequences`, if they come in
    before: "array[int]" = field(default_factory=lambda: array("i"))  # pages that are to stay
    sequences: list[Sequence] = field(default_factory=list)  # those that wait for it

    @property
    def message(self) -> CopyPages:
        """What workers are asked for."""
        arrays = self.pages, self.host_pages, self.slots, self.host_slots
        return CopyPages(self.to_host, *[numbers.tobytes() for numbers in arrays])


class HostTier:
    """The copies of what a GPU has.

    Args:
        layout: of the host's memory.
        fetch: has a sequence wait for what the KV store has beneath the host.
    """

    def __init__(
        self,
        device: CachePools,
        host: CachePools,
        layout: CacheLayout,
        fetch: Callable[[Sequence], None] = lambda _: None,
    ) -> None:
        self.host = host
        self._device = device
        self._page_bytes = layout.record_bytes(RecordKind.PAGES)
        self._state_bytes = layout.record_bytes(RecordKind.STATES)
        self._fetch = fetch
        self._prompt_s: Callable[[int], float] = lambda _: float("inf")
        self._step_s: Callable[[], float] = lambda: 0.0
        self._cost = CopyCost(FIRST_S_PER_BYTE)
        self._unstored: deque[bytes] = deque()  # of full pages, the oldest first
        self._unstored_states: deque[bytes] = deque()  # of checkpoints, likewise
        self._waits: deque[Sequence] = deque()  # those whose copies have not begun
        self._open: deque[Copy] = deque()  # the oldest first
        self._coming: dict[Key, Copy] = {}  # of what comes in
        device.pages.on_cached = self._unstored.append
        if device.slots.num_reserved:
            device.slots.on_kept = self._unstored_states.append

    def open(self, prompt_s: Callable[[int], float], step_s: Callable[[], float]) -> None:
        """Learn what computing costs, as `PageFetcher` does."""
        self._prompt_s, self._step_s = prompt_s, step_s

    @property
    def is_busy(self) -> bool:
        """Whether anything is copied, or is to be."""
        return bool(self._open or self._waits or self._unstored or self._unstored_states)

    @property
    def used_bytes(self) -> int:
        """The bytes of what the host has."""
        return self._bytes_of(self.host.pages.num_cached, self.host.slots.num_cached)

    @property
    def total_bytes(self) -> int:
        """The bytes that the host has room for."""
        return self._bytes_of(self.host.pages.num_pages, self.host.slots.num_slots)

    def _bytes_of(self, num_pages: int, num_states: int) -> int:
        return num_pages * self._page_bytes + num_states * self._state_bytes

    def enter(self, sequence: Sequence) -> None:
        """Have the host evict what it has of a queued sequence last, and fetch what it lacks."""
        pages, slots = self.host
        pages.free(pages.match_prefix(sequence.digests))
        for digest in self._prefix(sequence, self.host)[-1:]:
            if slots.has(digest):
                slots.free(slots.find(digest))
        self._fetch(sequence)

    def copy_in(self, sequence: Sequence) -> None:
        """Have a sequence that is to run wait for what it lacks, where that is quicker."""
        missing = self._missing(sequence)
        is_coming = any(key in self._coming for key in missing.keys)
        if missing.keys and (is_coming or self._is_worth(sequence, missing)):
            sequence.is_copying = True
            self._waits.append(sequence)

    def _prefix(self, sequence: Sequence, *tiers: CachePools) -> list[bytes]:
        """Return the pages from which a sequence can go on. At least one token stays to compute."""
        end = (len(sequence.tokens) - 1) // self._device.pages.page_tokens
        has_states, count = self._device.slots.num_slots > 0, 0
        for place, digest in enumerate(sequence.digests[:end]):
            if not any(tier.pages.has(digest) for tier in tiers):
                break
            if not has_states or any(tier.slots.has(digest) for tier in tiers):
                count = place + 1
        return sequence.digests[:count]

    def _missing(self, sequence: Sequence) -> Missing:
        """Return what a sequence can go on from, and the GPU lacks."""
        pages, slots = self._device
        prefix = self._prefix(sequence, self._device, self.host)
        places = [place for place, digest in enumerate(prefix) if not pages.has(digest)]
        return Missing(
            known=[digest for digest in prefix if pages.has(digest)],
            places=places,
            digests=[prefix[place] for place in places],
            states=[digest for digest in prefix[-1:] if slots.num_slots and not slots.has(digest)],
            num_saved=len(prefix) - len(self._prefix(sequence, self._device)),
        )

    def _is_worth(self, sequence: Sequence, missing: Missing) -> bool:
        """Whether there is room for the whole sequence, and copies come sooner than computed."""
        pages, slots = self._device
        num_known = pages.count_cached(sequence.digests)
        has_room = pages.can_allocate(pages.pages_for(len(sequence.tokens) + 1) - num_known)
        if not has_room or (slots.num_slots and not slots.num_reserved):
            return False
        num_bytes = self._bytes_of(len(missing.digests), len(missing.states))
        seconds = self._cost.seconds(num_bytes) + self._step_s()
        if seconds < self._prompt_s(missing.num_saved * pages.page_tokens):
            return True
        self._cost.hope()
        return False

    def next(self) -> CopyPages | None:
        """Return what workers are to copy next, if there is anything now."""
        copy = None
        has_states = self._device.slots.num_slots > 0
        while copy is None and self._waits and (self._num_slots or not has_states):
            copy = self._begin_in(self._waits.popleft())
        if copy is None:
            copy = self._begin_out()
        if copy is None:
            return None
        self._open.append(copy)
        return copy.message

    @property
    def _num_slots(self) -> int:
        """How many more of the GPU's slots copies may use."""
        return self._device.slots.num_reserved - sum(len(copy.slots) for copy in self._open)

    def _begin_in(self, sequence: Sequence) -> Copy | None:
        """Begin to copy what a sequence lacks, unless another waits for some of it already."""
        pages, slots = self._device
        missing = self._missing(sequence)
        keys = [] if sequence.has_ended else missing.keys
        for key in keys:
            if key in self._coming:
                self._coming[key].sequences.append(sequence)
                return None
        before = pages.match_prefix(missing.known if keys else [])
        num_pages, num_states = len(missing.digests), len(missing.states)
        if not keys or not pages.can_allocate(num_pages) or slots.num_free < num_states:
            pages.free(before)
            sequence.is_copying = False
            return None
        copy = Copy(
            False,
            missing.digests,
            pages.allocate(num_pages),
            self.host.pages.match_prefix(missing.digests),
            missing.states,
            array("i", [slots.allocate() for _ in missing.states]),
            array("i", [self.host.slots.find(digest) for digest in missing.states]),
            missing.places,
            before,
            [sequence],
        )
        self._coming |= dict.fromkeys(keys, copy)
        return copy

    def _begin_out(self) -> Copy | None:
        """Begin to copy out what the host lacks, the oldest first."""
        if any(copy.to_host for copy in self._open):
            return None
        copy, pages, slots = Copy(True), self._device.pages, self._device.slots
        while self._unstored and len(copy.digests) < PAGES_OUT:
            digest = self._unstored.popleft()
            if self.host.pages.has(digest) or not self.host.pages.can_allocate(1):
                continue
            if found := pages.match_prefix([digest]):
                copy.digests.append(digest)
                copy.pages += found
                copy.host_pages += self.host.pages.allocate(1)
        while self._unstored_states and len(copy.states) < self._num_slots:
            digest = self._unstored_states.popleft()
            is_there = self.host.slots.has(digest) or digest in copy.states
            if slots.has(digest) and not is_there and self.host.slots.num_free:
                copy.states.append(digest)
                copy.slots.append(slots.find(digest))
                copy.host_slots.append(self.host.slots.allocate())
        return copy if copy.digests or copy.states else None

    def take(self, seconds: float) -> Copy:
        """Note that workers have made the oldest copy, and what it took; return it."""
        copy = self._open.popleft()
        if copy.to_host:
            for digest, host_page in zip(copy.digests, copy.host_pages, strict=True):
                self.host.pages.cache(host_page, digest)
        else:
            self._cost.measure(seconds, self._bytes_of(len(copy.digests), len(copy.states)))
            for place, page in zip(copy.places, copy.pages, strict=True):
                self._device.pages.cache_of(copy.sequences[0], place, page)
        written = self.host.slots if copy.to_host else self._device.slots
        places = copy.host_slots if copy.to_host else copy.slots
        for digest, slot in zip(copy.states, places, strict=True):
            written.cache(slot, digest)
        self._close(copy)
        return copy

    def _close(self, copy: Copy) -> None:
        """Let go of what a copy needs. What is not registered is empty."""
        self._device.pages.free(copy.before + copy.pages)
        self.host.pages.free(copy.host_pages)
        for slot in copy.slots:
            self._device.slots.free(slot)
        for slot in copy.host_slots:
            self.host.slots.free(slot)
        for key in () if copy.to_host else keys_of(copy.digests, copy.states):
            del self._coming[key]
        for sequence in copy.sequences:
            sequence.is_copying = False

    def lose_workers(self) -> None:
        """End all copies and waits: the workers are gone, and with them all that the GPU had."""
        while self._open:
            self._close(self._open.popleft())
        for sequence in self._waits:
            sequence.is_copying = False
        self._waits.clear()
        self._unstored.clear()
        self._unstored_states.clear()

    def reset(self, cache_id: bytes) -> None:
        """Forget all that the host has: it is other memory now."""
        self.host.pages.reset(cache_id)
        self.host.slots.reset(cache_id)
