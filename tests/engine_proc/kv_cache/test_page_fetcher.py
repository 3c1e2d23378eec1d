"""Which sequences wait for pages of the KV store, and for how long."""

import math

from scheduler_rig import make_sequence

from headrace.engine_proc.kv_cache.page_fetcher import COPY_SHARE, FETCH_PAGES, PageFetcher
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.page_digests import chain_digests
from headrace.ipc.worker_messages import (
    CacheLayout,
    FetchedRecords,
    FetchRecords,
    Lookup,
    LookupResult,
    RecordKind,
    ToStore,
)

NUM_PAGES, PAGE_TOKENS = 200, 4


class Rig:
    """A fetcher, the time, and a store that has the pages of `stored`."""

    def __init__(self, num_states: int = 0) -> None:
        self.now = 0.0
        self.prompt_s = math.inf  # of any prompt
        self.fetch_s = 0.0  # of any message
        self.page_cpu_s = 0.0  # that the store takes of a core
        self.step_s = 0.0  # of sequences that run
        self.stored: set[bytes] = set()
        self.asked: list[ToStore] = []
        self.pool = PagePool(NUM_PAGES, PAGE_TOKENS)
        self.slots = StateSlots(num_states)
        layout = CacheLayout(NUM_PAGES, num_states, [1000], [500 if num_states else 0])
        self.fetcher = PageFetcher(
            self.pool,
            self.slots,
            layout,
            lambda _: self.prompt_s,
            lambda: self.now,
            lambda: self.step_s,
        )

    def enter(self, num_pages: int) -> Sequence:
        """Have a sequence with so many full pages wait."""
        sequence = make_sequence(list(range(num_pages * PAGE_TOKENS + 1)), 4)
        chain_digests(sequence.digests, sequence.tokens, PAGE_TOKENS, num_pages)
        self.fetcher.enter(sequence)
        return sequence

    def answer(self, message: ToStore) -> LookupResult | FetchedRecords:
        """Answer as a store does."""
        self.asked.append(message)
        assert isinstance(message, Lookup | FetchRecords)
        digests = [message.digests[i : i + 16] for i in range(0, len(message.digests), 16)]
        found = bytes(digest in self.stored for digest in digests)
        if isinstance(message, Lookup):
            return LookupResult(found, found)
        return FetchedRecords(found, self.fetch_s, self.page_cpu_s * len(found))

    def run(self) -> None:
        """Answer until nothing is asked."""
        message = self.fetcher.ask()
        while message is not None:
            message = self.fetcher.ask(self.answer(message))


def test_a_sequence_waits_until_its_pages_are_in_the_pool() -> None:
    rig = Rig()
    sequence = rig.enter(FETCH_PAGES + 2)
    assert sequence.is_blocked and rig.fetcher.is_busy
    rig.stored |= set(sequence.digests[:-1])
    rig.run()
    assert not sequence.is_blocked and not rig.fetcher.is_busy
    assert [type(message) for message in rig.asked] == [Lookup, FetchRecords, FetchRecords]
    assert rig.pool.count_cached(sequence.digests) == FETCH_PAGES + 1
    assert rig.pool.num_free == NUM_PAGES


def test_a_known_prompt_does_not_wait() -> None:
    rig = Rig()
    rig.stored |= set(rig.enter(3).digests)
    rig.run()
    assert not rig.enter(3).is_blocked
    assert not rig.enter(0).is_blocked


def test_a_state_is_fetched_with_the_pages_before_it() -> None:
    rig = Rig(num_states=4)
    sequence = rig.enter(3)
    rig.stored |= set(sequence.digests[:2])
    rig.run()
    assert [m.kind for m in rig.asked if isinstance(m, FetchRecords)] == list(RecordKind)
    assert rig.slots.has(sequence.digests[1]) and rig.slots.num_free == 4


def test_pages_that_take_longer_than_computing_are_left() -> None:
    rig = Rig()
    rig.fetch_s, rig.prompt_s = 10.0, 1.0
    sequence = rig.enter(3 * FETCH_PAGES - 10)
    rig.stored |= set(sequence.digests)
    rig.run()
    assert rig.pool.count_cached(sequence.digests) == FETCH_PAGES, "the first measured it"
    assert not sequence.is_blocked
    for _ in range(200):  # hope comes back
        rig.pool.reset()
        if rig.enter(2) and rig.run() is None and rig.pool.num_cached:
            break
    assert rig.pool.num_cached == 2


def test_a_wait_ends_when_computing_would_have_ended() -> None:
    rig = Rig()
    rig.prompt_s = 2.0
    first, second = rig.enter(2), rig.enter(3)
    rig.stored |= set(second.digests)
    message = rig.fetcher.ask()
    assert message is not None
    rig.now = 2.0
    rig.fetcher.look_at_clock()
    assert not first.is_blocked and not second.is_blocked
    assert rig.fetcher.ask(rig.answer(message)) is None
    assert rig.pool.num_free == NUM_PAGES and rig.pool.num_cached == 0


def test_a_cancelled_fetch_leaves_no_page_in_use() -> None:
    rig = Rig()
    sequence = rig.enter(3)
    rig.stored |= set(sequence.digests)
    lookup = rig.fetcher.ask()
    assert lookup is not None
    assert isinstance(rig.fetcher.ask(rig.answer(lookup)), FetchRecords)
    assert rig.pool.num_free < NUM_PAGES
    rig.fetcher.cancel()
    assert rig.pool.num_free == NUM_PAGES and rig.pool.num_cached == 0
    assert not sequence.is_blocked and not rig.fetcher.is_busy


def test_an_aborted_sequence_is_not_fetched() -> None:
    rig = Rig()
    aborted, other = rig.enter(2), rig.enter(3)
    aborted.has_ended = True
    rig.run()
    assert [len(m.digests) for m in rig.asked] == [len(b"".join(other.digests))]  # type: ignore[union-attr]


def test_a_pool_without_room_is_left_to_the_sequences_in_it() -> None:
    rig = Rig()
    held = rig.pool.allocate(NUM_PAGES - 3)
    sequence = rig.enter(4)
    rig.stored |= set(sequence.digests)
    rig.run()
    assert rig.pool.num_cached == 0 and not sequence.is_blocked
    rig.pool.free(held)


def test_pages_come_slowly_beside_steps() -> None:
    rig = Rig()
    rig.step_s, rig.page_cpu_s = 1e-4, 1e-6
    num_pages = 120
    sequence = rig.enter(num_pages)
    rig.stored |= set(sequence.digests)
    num_fetched, answer = 0, None
    while sequence.is_fetching:
        message = rig.fetcher.ask(answer)
        answer = None if message is None else rig.answer(message)
        num_fetched += len(answer.is_there) if isinstance(answer, FetchedRecords) else 0
        spent_s = num_fetched * rig.page_cpu_s
        assert spent_s <= COPY_SHARE * (rig.now + 3 * rig.step_s), "a few pieces at once at most"
        rig.now += rig.step_s
    assert num_fetched == num_pages
    assert rig.now < 2 * num_pages * rig.page_cpu_s / COPY_SHARE, "no slower than that"


def test_pages_come_fast_once_no_step_runs() -> None:
    rig = Rig()
    rig.step_s, rig.page_cpu_s = 0.04, 1.0
    sequence = rig.enter(3 * FETCH_PAGES)
    rig.stored |= set(sequence.digests)
    lookup = rig.fetcher.ask()
    assert lookup is not None
    piece = rig.fetcher.ask(rig.answer(lookup))
    assert piece is not None
    assert rig.fetcher.ask(rig.answer(piece)) is None, "it rests"
    rig.step_s = 0.0
    rig.run()
    assert rig.pool.count_cached(sequence.digests) == 3 * FETCH_PAGES
