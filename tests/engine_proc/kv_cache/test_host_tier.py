"""What of a GPU's pages is copied to the host, and which sequences wait for what comes back."""

import math
from array import array

import pytest
from scheduler_rig import make_sequence

from headrace.engine_proc.kv_cache.host_tier import (
    COPY_SLOTS,
    PAGES_OUT,
    CachePools,
    HostTier,
)
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.page_digests import chain_digests
from headrace.ipc.worker_messages import CacheLayout, CopyPages

NUM_PAGES, PAGE_TOKENS = PAGES_OUT + 40, 4


class Rig:
    """A host tier, its workers, and what a prompt takes."""

    def __init__(
        self, num_host_pages: int = 2 * NUM_PAGES, num_states: int = 0, num_host_states: int = 6
    ) -> None:
        self.prompt_s = math.inf  # of any prompt
        self.step_s = 0.0
        self.pool = PagePool(NUM_PAGES, PAGE_TOKENS)
        self.host = PagePool(num_host_pages, PAGE_TOKENS)
        self.fetched: list[Sequence] = []
        self.slots = StateSlots(num_states, num_reserved=COPY_SLOTS)
        self.host_slots = StateSlots(num_host_states if num_states else 0)
        layout = CacheLayout(num_host_pages, self.host_slots.num_slots, [600, 400], [300, 200])
        self.tier = HostTier(
            CachePools(self.pool, self.slots),
            CachePools(self.host, self.host_slots),
            layout,
            self.fetched.append,
        )
        self.tier.open(lambda _: self.prompt_s, lambda: self.step_s)

    def sequence(self, num_pages: int, first: int = 0) -> Sequence:
        """Return a sequence with so many full pages, all its own but for equal `first`."""
        tokens = [first, *range(1, num_pages * PAGE_TOKENS + 1)]
        sequence = make_sequence(tokens, 4)
        chain_digests(sequence.digests, sequence.tokens, PAGE_TOKENS, num_pages)
        return sequence

    def compute(self, sequence: Sequence) -> None:
        """Fill a sequence's pages, and let it end."""
        pages = self.pool.allocate(len(sequence.digests))
        for place, page in enumerate(pages):
            self.pool.cache_of(sequence, place, page)
        self.pool.free(pages)

    def checkpoint(self, sequence: Sequence, num_pages: int, stays: bool = True) -> None:
        """Write a state that follows so many pages of a sequence."""
        digest, slot = sequence.digests[num_pages - 1], self.slots.allocate()
        self.slots.cache(slot, digest)
        if stays:
            self.slots.on_kept(digest)
        self.slots.free(slot)

    def copy(self, seconds: float = 0.0) -> list[CopyPages]:
        """Make all copies that are to be made."""
        made = []
        while (copies := self.tier.next()) is not None:
            made.append(copies)
            self.tier.take(seconds)
        assert self.pool.num_free == NUM_PAGES and self.host.num_free == self.host.num_pages
        for slots in (self.slots, self.host_slots):
            assert slots.num_free == slots.num_slots
        return made

    def keep(self, num_pages: int, *borders: int) -> Sequence:
        """Return a sequence whose pages, and the states behind some, the host alone has."""
        sequence = self.sequence(num_pages)
        self.compute(sequence)
        for border in borders:
            self.checkpoint(sequence, border)
        self.copy()
        self.lose_gpu()
        return sequence

    def lose_gpu(self) -> None:
        """Lose all that the GPU has."""
        self.tier.lose_workers()
        self.pool.reset()
        self.slots.reset()


def test_full_pages_are_copied_out_once_some_at_a_time() -> None:
    rig, sequence = Rig(), Rig().sequence(PAGES_OUT + 5)
    rig.compute(sequence)
    first = rig.tier.next()
    assert first is not None and first.to_host and len(array("i", first.pages)) == PAGES_OUT
    assert rig.tier.next() is None, "one at a time"
    assert rig.host.num_cached == 0, "not before workers say so"
    rig.tier.take(0.0)
    assert [len(c.pages) // 4 for c in rig.copy()] == [5]
    assert rig.host.count_cached(sequence.digests) == PAGES_OUT + 5
    rig.pool.reset()
    rig.compute(sequence)
    assert rig.copy() == [], "the host has them"
    assert not rig.tier.is_busy


def test_pages_evicted_before_their_copy_begins_are_left() -> None:
    rig = Rig()
    rig.compute(rig.sequence(3))
    rig.pool.free(rig.pool.allocate(NUM_PAGES))
    assert rig.copy() == [] and rig.host.num_cached == 0


def test_pages_are_not_evicted_while_they_are_copied() -> None:
    rig = Rig()
    rig.compute(rig.sequence(3))
    assert rig.tier.next() is not None
    assert rig.pool.num_free == NUM_PAGES - 3 and rig.host.num_free == rig.host.num_pages - 3
    rig.tier.take(0.0)
    assert rig.pool.num_free == NUM_PAGES


def test_pages_of_the_host_stay_while_they_are_copied() -> None:
    rig = Rig()
    sequence = rig.keep(5)
    pages = rig.pool.allocate(2)
    for place, page in enumerate(pages):
        rig.pool.cache_of(sequence, place, page)
    rig.pool.free(pages)
    rig.tier.copy_in(sequence)
    copies = rig.tier.next()
    assert copies is not None and len(copies.pages) == 4 * 3
    assert rig.host.num_free == rig.host.num_pages - 3
    assert rig.pool.num_free == NUM_PAGES - 5, "the first two, too"
    rig.tier.take(0.0)
    rig.copy()
    assert rig.pool.count_cached(sequence.digests) == 5


def test_a_sequence_waits_for_pages_of_the_host() -> None:
    rig = Rig()
    sequence = rig.keep(5)
    rig.tier.copy_in(sequence)
    assert sequence.is_blocked and rig.tier.is_busy
    copies = rig.copy()
    assert [c.to_host for c in copies] == [False] and len(copies[0].pages) == 4 * 5
    assert not sequence.is_blocked and rig.pool.count_cached(sequence.digests) == 5
    rig.tier.copy_in(sequence)
    assert not sequence.is_blocked, "the GPU has them"


def test_pages_behind_a_gap_are_left_in_the_host() -> None:
    rig, sequence = Rig(), Rig().sequence(5)
    pages = rig.host.allocate(5)
    for place in (0, 1, 3, 4):
        rig.host.cache_of(sequence, place, pages[place])
    rig.host.free(pages)
    rig.tier.copy_in(sequence)
    assert sequence.is_blocked
    rig.copy()
    assert rig.pool.num_cached == rig.pool.count_cached(sequence.digests) == 2


def test_sequences_with_one_prefix_wait_for_one_copy() -> None:
    rig = Rig()
    sequence, other = rig.keep(5), rig.sequence(7)
    rig.tier.copy_in(sequence)
    assert rig.tier.next() is not None
    rig.tier.copy_in(other)
    assert rig.tier.next() is None and other.is_blocked
    rig.tier.take(0.0)
    assert not sequence.is_blocked and not other.is_blocked
    assert rig.copy() == []


@pytest.mark.parametrize(("prompt_s", "step_s"), [(1e-9, 0.0), (1.0, 2.0)])
def test_pages_that_come_later_than_computed_are_left(prompt_s: float, step_s: float) -> None:
    rig = Rig()
    sequence = rig.keep(5)
    rig.prompt_s, rig.step_s = prompt_s, step_s
    rig.tier.copy_in(sequence)
    assert not sequence.is_blocked and rig.copy() == []


def test_slow_copies_are_left_until_hope_comes_back() -> None:
    rig = Rig()
    sequence = rig.keep(5)
    rig.tier.copy_in(sequence)
    rig.copy(seconds=10.0)
    rig.pool.reset()
    rig.prompt_s, num_left = 1.0, 0
    while num_left < 100:
        rig.tier.copy_in(sequence)
        if sequence.is_blocked:
            break
        num_left += 1
    assert 0 < num_left < 100


def test_a_pool_without_room_is_left_to_those_in_it() -> None:
    rig = Rig()
    sequence = rig.keep(5)
    held = rig.pool.allocate(NUM_PAGES - 5)
    rig.tier.copy_in(sequence)
    assert not sequence.is_blocked, "its last token has no room"
    rig.pool.free(held[:1])
    rig.tier.copy_in(sequence)
    assert sequence.is_blocked
    taken = rig.pool.allocate(2)
    assert rig.tier.next() is None and not sequence.is_blocked
    rig.pool.free(taken + held[1:])


def test_workers_that_die_leave_no_page_in_use_and_no_half_copy() -> None:
    rig = Rig()
    sequence, new = rig.keep(5), rig.sequence(3, first=7)
    rig.compute(new)
    rig.tier.copy_in(sequence)
    assert rig.tier.next() is not None and rig.tier.next() is not None, "in and out"
    rig.tier.copy_in(rig.sequence(5))
    rig.tier.lose_workers()
    assert not sequence.is_blocked and not rig.tier.is_busy
    assert rig.pool.num_free == NUM_PAGES and rig.host.num_free == rig.host.num_pages
    assert rig.pool.count_cached(sequence.digests) == 0
    assert rig.host.count_cached(new.digests) == 0 and rig.host.num_cached == 5


def test_an_aborted_sequence_gets_no_pages() -> None:
    rig = Rig()
    sequence = rig.keep(5)
    rig.tier.copy_in(sequence)
    sequence.has_ended = True
    assert rig.copy() == [] and not sequence.is_copying


def test_a_queued_prefix_is_evicted_last_from_the_host() -> None:
    rig = Rig(num_host_pages=6)
    old, new = rig.sequence(3), rig.sequence(3, first=7)
    for sequence in (old, new):
        rig.compute(sequence)
        rig.copy()
    rig.tier.enter(old)
    assert rig.fetched == [old]
    rig.compute(rig.sequence(3, first=8))
    rig.copy()
    assert rig.host.count_cached(old.digests) == 3 and rig.host.count_cached(new.digests) == 0


def test_checkpoints_that_stay_are_copied_out() -> None:
    rig = Rig(num_states=8)
    sequence = rig.sequence(3)
    rig.compute(sequence)
    rig.checkpoint(sequence, 3)
    rig.checkpoint(sequence, 2, stays=False)
    (copies,) = rig.copy()
    assert len(copies.pages) == 4 * 3 and len(copies.slots) == len(copies.host_slots) == 4
    assert [rig.host_slots.has(digest) for digest in sequence.digests] == [False, False, True]
    rig.slots.on_kept(sequence.digests[2])
    assert rig.copy() == [], "the host has it"
    assert rig.tier.used_bytes == 3 * 1000 + 500 and not rig.tier.is_busy


def test_a_checkpoint_dropped_before_its_copy_begins_is_left() -> None:
    rig = Rig(num_states=8)
    sequence = rig.sequence(3)
    rig.checkpoint(sequence, 3)
    rig.slots.drop(sequence.digests[2])
    assert rig.copy() == [] and rig.host_slots.num_cached == 0


def test_a_sequence_waits_for_pages_and_its_state() -> None:
    rig = Rig(num_states=8)
    sequence = rig.keep(5, 3, 4)
    rig.tier.copy_in(sequence)
    assert sequence.is_blocked
    (copies,) = rig.copy()
    assert not copies.to_host and len(copies.pages) == 4 * 4 and len(copies.slots) == 4
    assert not sequence.is_blocked and rig.pool.count_cached(sequence.digests) == 4
    assert rig.slots.has(sequence.digests[3]) and not rig.slots.has(sequence.digests[2])
    rig.tier.copy_in(sequence)
    assert not sequence.is_blocked, "the GPU has all that is of use"


def test_a_state_alone_comes_to_pages_that_the_gpu_has() -> None:
    rig = Rig(num_states=8)
    sequence = rig.keep(5, 4)
    rig.compute(sequence)
    rig.copy()
    rig.tier.copy_in(sequence)
    (copies,) = rig.copy()
    assert not copies.pages and len(copies.slots) == 4 and rig.slots.has(sequence.digests[3])


def test_pages_that_no_state_follows_are_left() -> None:
    rig = Rig(num_states=8)
    sequence = rig.keep(5)
    rig.tier.copy_in(sequence)
    assert not sequence.is_blocked and rig.copy() == []


def test_sequences_that_lack_the_same_state_wait_for_one_copy() -> None:
    rig = Rig(num_states=8)
    sequence, other = rig.keep(5, 5), rig.sequence(7)
    rig.tier.copy_in(sequence)
    assert rig.tier.next() is not None
    rig.tier.copy_in(other)
    assert rig.tier.next() is None and other.is_blocked
    rig.tier.take(0.0)
    assert not sequence.is_blocked and not other.is_blocked and rig.copy() == []


def test_copies_leave_sequences_their_slots() -> None:
    """Of five slots three are for copies: the other two let one sequence run."""
    rig = Rig(num_states=5)
    assert rig.slots.most_sequences == 1
    sequences = [rig.sequence(2, first) for first in range(5)]
    for sequence in sequences:
        rig.compute(sequence)
        rig.checkpoint(sequence, 2)
    copies = rig.tier.next()
    assert copies is not None and len(copies.slots) == 4 * 3 and rig.slots.num_free == 2
    rig.tier.take(0.0)
    rig.copy()
    rig.lose_gpu()
    for sequence in sequences:
        rig.tier.copy_in(sequence)
    asked = [rig.tier.next() for _ in sequences]
    assert [one is not None for one in asked] == [True] * 3 + [False] * 2
    assert rig.slots.num_free == 2
    rig.tier.take(0.0)
    assert [sequence.is_blocked for sequence in sequences] == [False] + [True] * 4
    for _ in range(2):
        rig.tier.take(0.0)
    rig.copy()
    assert not any(sequence.is_blocked for sequence in sequences)


def test_states_without_a_slot_for_copies_are_left() -> None:
    rig = Rig(num_states=2)
    sequence = rig.sequence(3)
    rig.compute(sequence)
    rig.checkpoint(sequence, 3)
    (copies,) = rig.copy()
    assert not copies.slots and rig.host_slots.num_cached == 0 and not rig.tier.is_busy


def test_workers_that_die_leave_no_slot_in_use_and_no_half_state() -> None:
    rig = Rig(num_states=8)
    sequence, new = rig.keep(5, 5), rig.sequence(3, first=7)
    rig.compute(new)
    rig.checkpoint(new, 3)
    rig.tier.copy_in(sequence)
    assert rig.tier.next() is not None and rig.tier.next() is not None, "in and out"
    rig.lose_gpu()
    assert rig.slots.num_free == 8 and rig.host_slots.num_free == 6
    assert not rig.host_slots.has(new.digests[2]) and rig.host_slots.has(sequence.digests[4])
    assert not sequence.is_blocked and not rig.tier.is_busy


def test_a_queued_prefix_keeps_its_state_in_the_host() -> None:
    rig = Rig(num_states=8, num_host_states=2)
    old, new, newest = (rig.sequence(3, first) for first in range(3))
    for sequence in (old, new):
        rig.compute(sequence)
        rig.checkpoint(sequence, 3)
        rig.copy()
    rig.tier.enter(old)
    rig.compute(newest)
    rig.checkpoint(newest, 3)
    rig.copy()
    there = [rig.host_slots.has(sequence.digests[2]) for sequence in (old, new, newest)]
    assert there == [True, False, True]
