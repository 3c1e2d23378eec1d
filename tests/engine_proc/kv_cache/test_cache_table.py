"""The table of a cache: after a death between any two writes it tells nothing that is not there."""

from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.engine_proc.kv_cache.cache_table import (
    ENTRY_BYTES,
    HEADER_BYTES,
    NO_CACHE,
    CacheTable,
    table_bytes,
)
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots

NUM_PAGES = 5
IDS = [bytes([i]) * 16 for i in range(1, 3)]
DIGESTS = [bytes([i]) * 16 for i in range(8)]
LONG = 1 << 30


class Killed(Exception):
    """The engine was killed between two writes."""


@dataclass
class Life:
    """The writes that an engine has left."""

    num_writes: int = LONG


@dataclass
class Mortal:
    """Memory whose writer is killed after so many writes, and a long one in its middle."""

    view: memoryview
    life: Life = field(default_factory=Life)

    def __getitem__(self, where: Any) -> Any:
        found = self.view[where]
        return Mortal(found, self.life) if isinstance(found, memoryview) else found

    def __setitem__(self, where: Any, value: Any) -> None:
        self.life.num_writes -= 1
        if self.life.num_writes >= 0:
            self.view[where] = value
            return
        if isinstance(where, slice):
            self.view[: len(value) // 2] = value[: len(value) // 2]
        raise Killed

    def __bytes__(self) -> bytes:
        return bytes(self.view)

    def cast(self, kind: Any) -> "Mortal":
        return Mortal(self.view.cast(kind), self.life)

    def tolist(self) -> list[int]:
        return self.view.tolist()

    def tobytes(self) -> bytes:
        return self.view.tobytes()


def table_over(memory: bytearray, life: Life | None = None) -> CacheTable:
    """Return the table of an engine that dies where its life ends."""
    view: Any = Mortal(memoryview(memory), life or Life())
    return CacheTable(NUM_PAGES, view)


class Deaths(RuleBasedStateMachine):
    """A pool whose engines are killed, beside the pages of a worker that lives on."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = bytearray(table_bytes(NUM_PAGES))
        self.contents: list[bytes | None] = [None] * NUM_PAGES  # None: written to, or of no use
        self.cache_id = NO_CACHE
        self.start()

    def start(self) -> None:
        """Start an engine as `open_tables` does."""
        self.life = Life()
        table = table_over(self.memory, self.life)
        if table.cache_id != self.cache_id:
            table.begin(self.cache_id)
        self.pool = PagePool(NUM_PAGES, 1, table)
        self.held: list[array[int]] = []

    def mortal(self, writes: int | None, act: Any) -> Any:
        """Do something; the engine may be killed at it, and another one starts."""
        before = dict(self.pool._digests)
        order = [page for page in self.pool._idle]
        self.life.num_writes = LONG if writes is None else writes
        try:
            return act()
        except Killed:
            self.start()
            lost = before.keys() - self.pool._digests.keys()
            assert len(lost) <= NUM_PAGES
            kept = [page for page in order if page in self.pool._digests]
            assert not lost or lost <= set(order), "what was in use is lost"
            found = [page for page in self.pool._idle if page in kept]
            assert writes != 0 or found == kept, "nothing was written, and the order is another"
            return None
        finally:
            self.life.num_writes = LONG

    @precondition(lambda self: self.pool.num_free)
    @rule(writes=st.none() | st.integers(0, 6), data=st.data())
    def allocate(self, writes: int | None, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        pages = self.mortal(writes, lambda: self.pool.allocate(count))
        if pages is not None:
            self.held.append(pages)
            for page in pages:
                self.contents[page] = None  # the worker writes to it from now on

    @precondition(lambda self: self.held)
    @rule(
        writes=st.none() | st.integers(0, 6),
        digest=st.sampled_from(DIGESTS),
        data=st.data(),
    )
    def fill(self, writes: int | None, digest: bytes, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.held))
        page = data.draw(st.sampled_from(list(pages)))
        if page not in self.pool._digests:
            self.contents[page] = digest
            self.mortal(writes, lambda: self.pool.cache(page, digest))

    @precondition(lambda self: self.held)
    @rule(writes=st.none() | st.integers(0, 6), data=st.data())
    def free(self, writes: int | None, data: st.DataObject) -> None:
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.mortal(writes, lambda: self.pool.free(pages))

    @rule(writes=st.none() | st.integers(0, 6), digests=st.lists(st.sampled_from(DIGESTS)))
    def match(self, writes: int | None, digests: list[bytes]) -> None:
        pages = self.mortal(writes, lambda: self.pool.match_prefix(digests))
        if pages:
            self.held.append(pages)

    @precondition(lambda self: not self.held)
    @rule(writes=st.none() | st.integers(0, 12), cache_id=st.sampled_from(IDS))
    def lose_pages(self, writes: int | None, cache_id: bytes) -> None:
        """The workers have new pages. An engine learns of it, or the next one."""
        self.contents = [None] * NUM_PAGES
        self.cache_id = cache_id if cache_id != self.cache_id else bytes(reversed(range(16)))
        self.mortal(writes, lambda: self.pool.reset(self.cache_id))

    @rule()
    def kill(self) -> None:
        expected = dict(self.pool._digests)
        used = [page for pages in self.held for page in pages if page in expected]
        order = [*self.pool._idle, *sorted(set(used), key=used.index)]
        self.start()
        assert self.pool._digests == expected
        assert set(self.pool._idle) == set(order)
        num_idle = len(order) - len(set(used))
        assert [*self.pool._idle][:num_idle] == order[:num_idle], "another is evicted first"

    @invariant()
    def every_digest_is_right(self) -> None:
        for page, digest in self.pool._digests.items():
            assert self.contents[page] == digest


TestDeaths = Deaths.TestCase
TestDeaths.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


def test_a_table_keeps_what_was_recorded() -> None:
    memory = bytearray(table_bytes(NUM_PAGES))
    pool = PagePool(NUM_PAGES, 16, table_over(memory))
    first, second = pool.allocate(2)
    pool.cache(first, DIGESTS[0])
    pool.cache(second, DIGESTS[1])
    other = PagePool(NUM_PAGES, 16, table_over(memory))
    assert (other.num_cached, other.num_free) == (2, NUM_PAGES)
    assert other.match_prefix(DIGESTS[:3]).tolist() == [first, second]


def test_the_beginning_of_a_prompt_in_use_is_evicted_last() -> None:
    memory = bytearray(table_bytes(NUM_PAGES))
    pool = PagePool(NUM_PAGES, 16, table_over(memory))
    idle, *used = pool.allocate(3)
    for page, digest in zip([*used, idle], DIGESTS, strict=False):
        pool.cache(page, digest)
    pool.free(array("i", [idle]))
    other = PagePool(NUM_PAGES, 16, table_over(memory))
    assert other.allocate(NUM_PAGES).tolist()[-3:] == [idle, used[1], used[0]]


@pytest.mark.parametrize("place", range(8, ENTRY_BYTES))
def test_an_entry_of_which_a_byte_is_torn_is_void(place: int) -> None:
    memory = bytearray(table_bytes(NUM_PAGES))
    table_over(memory).record(1, DIGESTS[3])
    memory[HEADER_BYTES + ENTRY_BYTES + place] ^= 1
    kept = [(1, DIGESTS[3])] if place < 16 else []  # the order of eviction is no promise
    assert table_over(memory).adopt() == kept
    assert table_over(memory).adopt() == kept


def test_a_reset_pool_tells_of_other_memory() -> None:
    memory = bytearray(table_bytes(NUM_PAGES))
    pool = PagePool(NUM_PAGES, 16, table_over(memory))
    pages = pool.allocate(1)
    pool.cache(pages[0], DIGESTS[0])
    pool.free(pages)
    pool.reset(IDS[0])
    assert pool.cache_id == IDS[0]
    assert PagePool(NUM_PAGES, 16, table_over(memory)).num_cached == 0


def test_checkpoints_outlive_their_engine_unless_dropped() -> None:
    memory = bytearray(table_bytes(NUM_PAGES))
    slots = StateSlots(NUM_PAGES, table_over(memory))
    kept, dropped, unfinished = (slots.allocate() for _ in range(3))
    assert slots.cache(kept, DIGESTS[0]) and slots.cache(dropped, DIGESTS[1])
    slots.drop(DIGESTS[1])
    slots.free(kept)
    other = StateSlots(NUM_PAGES, table_over(memory))
    assert [other.has(digest) for digest in DIGESTS[:2]] == [True, False]
    assert other.find(DIGESTS[0]) == kept
    assert {other.allocate() for _ in range(4)} >= {dropped, unfinished}
