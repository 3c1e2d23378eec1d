"""What of a GPU's pages is copied to the host, and which sequences wait for what comes back."""

import math
from array import array

import pytest
from scheduler_rig import make_sequence

from headrace.engine_proc.kv_cache.host_tier import PAGES_OUT, HostTier
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.page_digests import chain_digests
from headrace.ipc.worker_messages import CopyPages

NUM_PAGES, PAGE_TOKENS = PAGES_OUT + 40, 4


class Rig:
    """A host tier, its workers, and what a prompt takes."""

    def __init__(self, num_host_pages: int = 2 * NUM_PAGES) -> None:
        self.prompt_s = math.inf  # of any prompt
        self.step_s = 0.0
        self.pool = PagePool(NUM_PAGES, PAGE_TOKENS)
        self.host = PagePool(num_host_pages, PAGE_TOKENS)
        self.fetched: list[Sequence] = []
        self.tier = HostTier(self.pool, self.host, 1000, self.fetched.append)
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

    def copy(self, seconds: float = 0.0) -> list[CopyPages]:
        """Make all copies that are to be made."""
        made = []
        while (copies := self.tier.next()) is not None:
            made.append(copies)
            self.tier.take(seconds)
        assert self.pool.num_free == NUM_PAGES and self.host.num_free == self.host.num_pages
        return made

    def keep(self, num_pages: int) -> Sequence:
        """Return a sequence whose pages the host alone has."""
        sequence = self.sequence(num_pages)
        self.compute(sequence)
        self.copy()
        self.tier.lose_workers()
        self.pool.reset()
        return sequence


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
