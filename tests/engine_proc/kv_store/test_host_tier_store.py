"""A GPU's pool, its host tier and the KV store beneath have what a model of them has.

Any process may die between any two pages of a copy.
"""

import math
import mmap
from pathlib import Path
from tempfile import TemporaryDirectory

from gpu_pages import GpuPages
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_stores import answer_all, close_files
from scheduler_rig import make_sequence

from headrace.engine_proc.kv_cache.cache_table import CacheTable, table_bytes
from headrace.engine_proc.kv_cache.host_tier import HostTier
from headrace.engine_proc.kv_cache.page_fetcher import PageFetcher
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.kv_store.kv_store import KvStore
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.worker_messages import CacheLayout, Drain, RecordKind
from headrace.storage.slot_file import SlotFileHeader
from headrace.storage.store_directory import StoreDirectory
from headrace.storage.store_tier import StoreTier, TierName

NUM_PAGES, NUM_HOST_PAGES, NUM_RECORDS = 6, 8, 12
LAYOUT = CacheLayout(NUM_HOST_PAGES, 0, [48, 80], [0, 0])  # of two GPUs
RECORD_BYTES = LAYOUT.record_bytes(RecordKind.PAGES)
DIGESTS = [bytes([i]) * 16 for i in range(1, 12)]
FINGERPRINT = "f" * 32
ALL = Drain(1, math.inf)

chains = st.integers(1, 4).flatmap(
    lambda n: st.sampled_from([DIGESTS[:n], DIGESTS[:2] + DIGESTS[4 : 4 + n], DIGESTS[8 : 8 + n]])
)
ranks = st.integers(0, 1)


def content_of(digest: bytes) -> bytes:
    """Return what GPUs compute for a digest."""
    return (digest * RECORD_BYTES)[:RECORD_BYTES]


class Server:
    """GPUs, an engine's pools, and a store, of one server."""

    def __init__(self, root: Path) -> None:
        self.gpus = GpuPages(NUM_PAGES, LAYOUT)
        self.table_memory = mmap.mmap(-1, table_bytes(NUM_HOST_PAGES))
        self.root = root
        self.start_engine()
        self.start_store()

    def table(self) -> CacheTable:
        """Return the host's table as a process that has just started sees it."""
        return CacheTable(NUM_HOST_PAGES, memoryview(self.table_memory))

    def start_engine(self) -> None:
        """Start an engine, which finds the host's pages; its workers have empty GPUs."""
        self.waiting: list[Sequence] = []
        table = self.table()
        if table.cache_id != self.gpus.cache_id:
            table.begin(self.gpus.cache_id)
        self.pool = PagePool(NUM_PAGES, 1)
        self.host = PagePool(NUM_HOST_PAGES, 1, table)
        self.fetcher = PageFetcher(
            self.pool, StateSlots(0), LAYOUT, lambda _: 1.0, lambda: 0.0, host=self.host
        )
        self.tier = HostTier(self.pool, self.host, RECORD_BYTES, self.fetcher.enter)

    def start_store(self) -> None:
        """Start a store, which finds the file of the one before."""
        self.directory = StoreDirectory(self.root, FINGERPRINT)
        header = SlotFileHeader(RecordKind.PAGES, FINGERPRINT, "model", RECORD_BYTES, NUM_RECORDS)
        own = {RecordKind.PAGES.value: self.directory.own(header)}
        tiers = [StoreTier(TierName.DISK, own, self.directory)]
        self.store = KvStore(self.gpus.memory, {RecordKind.PAGES: self.table()}, tiers)

    def close(self) -> None:
        """Close everything."""
        close_files(self.directory)
        self.gpus.close()

    def begin_copy(self) -> bool:
        """Have the workers begin a copy; return whether there is one to make."""
        copies = self.tier.next()
        if copies is not None:
            self.gpus.ask(copies)
        return copies is not None

    def compute(self, digests: list[bytes]) -> None:
        """Compute a prompt whose sequence ends then, if there is room."""
        known = self.pool.match_prefix(digests)
        if not self.pool.can_allocate(len(digests) - len(known)):
            self.pool.free(known)
            return
        pages = known + self.pool.allocate(len(digests) - len(known))
        for page, digest in list(zip(pages, digests, strict=True))[len(known) :]:
            self.gpus.compute(page, content_of(digest))
            self.pool.cache(page, digest)
        self.pool.free(pages)

    def seek(self, digests: list[bytes]) -> None:
        """Have a sequence want pages of the tiers beneath, those of the store first."""
        sequence = make_sequence(list(range(len(digests) + 1)), 1)
        sequence.digests = list(digests)
        self.tier.enter(sequence)
        answer_all(self.fetcher, self.store)
        assert not sequence.is_fetching
        self.tier.copy_in(sequence)
        self.waiting.append(sequence)

    def settle(self) -> None:
        """Make all copies that are asked for, to their ends."""
        while self.tier.is_busy:
            self.begin_copy()
            while any([self.gpus.advance(rank) for rank in (0, 1)]):
                pass
            while self.gpus.take_answer():
                self.tier.take(0.0)
        assert not any(sequence.is_blocked for sequence in self.waiting)
        assert self.pool.num_free == NUM_PAGES and self.host.num_free == NUM_HOST_PAGES
        self.waiting.clear()

    def lose_workers(self, keeps_host: bool) -> None:
        """Lose the GPUs' pages, and the host's after a fault."""
        self.gpus.lose(keeps_host)
        self.tier.lose_workers()
        assert not any(sequence.is_blocked for sequence in self.waiting)
        self.pool.reset()
        if self.host.cache_id != self.gpus.cache_id:
            self.host.reset(self.gpus.cache_id)

    def check(self) -> None:
        """Check that all that can be found is right, by a process that starts now, too."""
        for digest, page in self.pool._pages.items():
            assert self.gpus.read(page) == content_of(digest)
        table = self.table()
        if table.cache_id == self.gpus.cache_id:
            for entry in range(NUM_HOST_PAGES):
                found = table.look(entry)
                if found.is_whole(entry):
                    assert self.gpus.read_host(entry) == content_of(found.digest)


class Tiers(RuleBasedStateMachine):
    """A server with deaths of all processes, at any page of a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.server = Server(Path(self.folder.name))

    def teardown(self) -> None:
        self.server.settle()
        self.server.check()
        self.server.close()
        self.folder.cleanup()

    @rule(digests=chains)
    def compute(self, digests: list[bytes]) -> None:
        self.server.compute(digests)

    @rule(digests=chains)
    def seek(self, digests: list[bytes]) -> None:
        self.server.seek(digests)

    @rule()
    def begin_copy(self) -> None:
        self.server.begin_copy()

    @rule(rank=ranks, count=st.integers(1, 4))
    def advance(self, rank: int, count: int) -> None:
        for _ in range(count):
            self.server.gpus.advance(rank)

    @rule()
    def take_answer(self) -> None:
        if self.server.gpus.take_answer():
            self.server.tier.take(0.0)

    @rule()
    def settle(self) -> None:
        self.server.settle()

    @rule(count=st.integers(1, 5))
    def save(self, count: int) -> None:
        self.server.store._scanned_at = -1e9
        for _ in range(count):
            self.server.store.save_next()

    @rule(keeps_host=st.booleans())
    def lose_workers(self, keeps_host: bool) -> None:
        self.server.lose_workers(keeps_host)

    @rule()
    def lose_engine(self) -> None:
        self.server.gpus.lose()
        self.server.start_engine()

    @rule()
    def lose_store(self) -> None:
        close_files(self.server.directory)
        self.server.start_store()

    @invariant()
    def all_is_right(self) -> None:
        self.server.check()


TestTiers = Tiers.TestCase


def test_pages_come_back_to_gpus_after_a_restart(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.compute(DIGESTS[:4])
    server.settle()
    assert server.host.num_cached == 4
    server.store.drain(ALL)
    other = Server(tmp_path)
    other.seek(DIGESTS[:4])
    other.settle()
    assert other.pool.count_cached(DIGESTS[:4]) == 4
    other.check()
