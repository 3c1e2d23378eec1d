"""Has sequences wait for what the KV store has of their prompts, where that is quicker. Pure.

What is fetched is put into the pool, where the scheduler finds it as any cached prefix. Where GPUs
have a host tier, it is put there. A sequence that waits is blocked; it stops waiting when to
compute its prompt would have taken as long.

While sequences run, copies take `COPY_SHARE` of a core: pieces are small, with rests between them.
"""

import math
from array import array
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass

from headrace.engine_proc.kv_cache.copy_cost import CopyCost
from headrace.engine_proc.kv_cache.host_tier import CachePools
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.worker_messages import (
    CacheLayout,
    FetchedRecords,
    FetchRecords,
    FromStore,
    Lookup,
    LookupResult,
    RecordKind,
    ToStore,
)

FETCH_PAGES = 64  # at a time, at most; between them it is decided whether to go on
COPY_SHARE = 0.03  # of the time of steps: as much longer they take
FIRST_S_PER_BYTE = 1e-9  # before any is measured
LONGEST_WAIT_S = 10.0  # while no step has told what computing costs


Fetch = Generator[ToStore | None, FromStore | None, None]  # it yields None while it rests


@dataclass(eq=False, slots=True)
class FetchWait:
    """A sequence that waits, and until when. Times are of one clock, in seconds."""

    sequence: Sequence
    until: float

    @property
    def is_over(self) -> bool:
        """Whether the sequence does not wait any more."""
        return self.sequence.has_ended or not self.sequence.is_fetching


class PageFetcher:
    """The sequences that wait, the first to come first.

    Args:
        prompt_s: how long so many tokens of a prompt take; infinity where that is not known.
        step_s: how long a step of the sequences that run takes; 0 where none runs, or where steps
            do not need the store's core.
        host: of the host tier. What is fetched is put there, in place of the pool and the slots.
    """

    def __init__(
        self,
        pool: PagePool,
        slots: StateSlots,
        layout: CacheLayout,
        prompt_s: Callable[[int], float],
        clock: Callable[[], float],
        step_s: Callable[[], float] = lambda: 0.0,
        host: CachePools | None = None,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._fetched, self._fetched_slots = host or (pool, slots)  # where to put what is fetched
        self._page_bytes = layout.record_bytes(RecordKind.PAGES)
        self._state_bytes = layout.record_bytes(RecordKind.STATES) if layout.num_states else 0
        self._prompt_s = prompt_s
        self._clock = clock
        self._step_s = step_s
        self._cost, self._cpu_cost = CopyCost(FIRST_S_PER_BYTE), CopyCost(FIRST_S_PER_BYTE)
        self._rests_until = -math.inf
        self._waits: deque[FetchWait] = deque()
        self._fetch: Fetch | None = None  # of the first that waits

    @property
    def is_busy(self) -> bool:
        """Whether any sequence waits."""
        return bool(self._waits)

    def enter(self, sequence: Sequence) -> None:
        """Have a sequence wait that is queued, unless its prompt is known or too short."""
        num_known = self._reach(sequence.digests, b"", b"")
        num_lacking = len(sequence.digests) - num_known
        if num_lacking and not sequence.needs_prompt_logprobs:
            seconds = self._prompt_s(num_lacking * self._pool.page_tokens)
            sequence.is_fetching = True
            until = self._clock() + min(seconds, LONGEST_WAIT_S if seconds == math.inf else seconds)
            self._waits.append(FetchWait(sequence, until))

    def ask(self, answer: FromStore | None = None) -> ToStore | None:
        """Return the next message to the store, which has answered all that were sent.

        Args:
            answer: to the last one that was returned, if it has not been given.

        Returns:
            None where nothing is wanted, or not yet.
        """
        while self._waits:
            try:
                if self._fetch is None and self._waits[0].is_over:
                    self._waits.popleft()
                    continue
                if self._fetch is None:
                    self._fetch = self._fetch_for(self._waits[0])
                    return next(self._fetch)
                return self._fetch.send(answer)
            except StopIteration:
                self._fetch = None
                self._waits.popleft().sequence.is_fetching = False
        return None

    def look_at_clock(self) -> None:
        """End the waits that have lasted long enough; what is being fetched comes nevertheless."""
        now = self._clock()
        for wait in self._waits:
            if now >= wait.until:
                wait.sequence.is_fetching = False

    def cancel(self) -> None:
        """End all waits. The store writes to no page any more."""
        if self._fetch is not None:
            self._fetch.close()
            self._fetch = None
        for wait in self._waits:
            wait.sequence.is_fetching = False
        self._waits.clear()

    def _reach(self, digests: list[bytes], pages: bytes, states: bytes) -> int:
        """Return from how many pages a sequence can go on, with those of the store."""
        count = 0
        for page, digest in enumerate(digests):
            if not self._has(digest) and not any(pages[page : page + 1]):
                break
            is_end = not self._state_bytes or self._has_state(digest)
            if is_end or any(states[page : page + 1]):
                count = page + 1
        return count

    def _has(self, digest: bytes) -> bool:
        return self._pool.has(digest) or self._fetched.has(digest)

    def _has_state(self, digest: bytes) -> bool:
        return self._slots.has(digest) or self._fetched_slots.has(digest)

    def _fetch_for(self, wait: FetchWait) -> Fetch:
        """Yield messages to the store, and take its answers, until a sequence need not wait."""
        found = yield Lookup(b"".join(wait.sequence.digests))
        assert isinstance(found, LookupResult)
        digests = wait.sequence.digests
        digests = digests[: self._reach(digests, found.pages, found.states)]
        pool = self._fetched
        held = pool.match_prefix([d for d in digests if pool.has(d)])  # none is evicted for another
        try:
            lacking = [i for i, digest in enumerate(digests) if not self._has(digest)]
            while lacking:
                while self._is_resting and not wait.is_over:
                    yield None
                if wait.is_over or not self._is_worth(wait, len(held), len(lacking)):
                    return
                count = self._num_pages_now()
                places, lacking = lacking[:count], lacking[count:]
                batch = [digests[place] for place in places]
                pages = pool.allocate(len(batch))
                held += pages
                began_at = self._clock()
                fetched = yield FetchRecords(RecordKind.PAGES, b"".join(batch), pages.tobytes())
                assert isinstance(fetched, FetchedRecords)
                self._measure(fetched, len(batch) * self._page_bytes)
                self._rests_until = began_at + fetched.cpu_s / COPY_SHARE
                for place, page, is_there in zip(places, pages, fetched.is_there, strict=True):
                    if is_there:
                        pool.cache_of(wait.sequence, place, page)
                if not all(fetched.is_there):
                    return
            if digests and self._state_bytes and not self._has_state(digests[-1]):
                yield from self._fetch_state(digests[-1])
        finally:
            pool.free(held)

    def _fetch_state(self, digest: bytes) -> Fetch:
        slots = self._fetched_slots
        if not slots.num_free:
            return
        slot = slots.allocate()
        try:
            fetched = yield FetchRecords(RecordKind.STATES, digest, array("i", [slot]).tobytes())
            assert isinstance(fetched, FetchedRecords)
            if all(fetched.is_there):
                slots.cache(slot, digest)
        finally:
            slots.free(slot)

    def _is_worth(self, wait: FetchWait, num_held: int, num_pages: int) -> bool:
        """Whether there is room, and pages come sooner than computed."""
        if not self._has_room(wait.sequence, num_held, num_pages):
            return False
        num_bytes = num_pages * self._page_bytes + self._state_bytes
        seconds = self._cost.seconds(num_bytes)
        if self._step_s():
            seconds = max(seconds, self._cpu_cost.seconds(num_bytes) / COPY_SHARE)
        if seconds < self._prompt_s(num_pages * self._pool.page_tokens):
            return True
        self._cost.hope()
        self._cpu_cost.hope()
        return False

    def _has_room(self, sequence: Sequence, num_held: int, num_pages: int) -> bool:
        """Whether there is room for the pages; in the sequences' own pool, for a whole sequence."""
        if self._fetched is not self._pool:
            return self._fetched.can_allocate(num_pages)
        num_more = self._pool.pages_for(len(sequence.tokens) + 1) - num_held
        has_room = self._pool.can_allocate(num_more)
        sequence.seeks_pages |= not has_room
        return has_room

    def _num_pages_now(self) -> int:
        """Return how many pages a step has time for beside it."""
        step_s = self._step_s()
        pages = COPY_SHARE * step_s / self._cpu_cost.seconds(self._page_bytes)
        return max(1, int(min(pages, FETCH_PAGES))) if step_s else FETCH_PAGES

    @property
    def _is_resting(self) -> bool:
        step_s = self._step_s()  # it is asked once per step: of two the nearer one counts
        return step_s > 0 and self._clock() + step_s / 2 < self._rests_until

    def _measure(self, fetched: FetchedRecords, num_bytes: int) -> None:
        self._cost.measure(fetched.seconds, num_bytes)
        self._cpu_cost.measure(fetched.cpu_s, num_bytes)
