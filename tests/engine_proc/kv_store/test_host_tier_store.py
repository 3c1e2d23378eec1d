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
from headrace.engine_proc.kv_cache.host_tier import CachePools, HostTier
from headrace.engine_proc.kv_cache.page_fetcher import PageFetcher
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.kv_store.kv_store import KvStore
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.worker_messages import CacheLayout, Drain, RecordKind
from headrace.storage.slot_file import SlotFileHeader
from headrace.storage.store_directory import StoreDirectory
from headrace.storage.store_tier import StoreTier, TierName

KINDS = RecordKind.PAGES, RecordKind.STATES
COUNTS, RECORDS = dict(zip(KINDS, (6, 4), strict=True)), dict(zip(KINDS, (12, 6), strict=True))
HOST = dict(zip(KINDS, (8, 3), strict=True))
LAYOUT = CacheLayout(*HOST.values(), [48, 80], [32, 16])  # of two GPUs
DIGESTS = [bytes([i]) * 16 for i in range(1, 12)]
FINGERPRINT = "f" * 32
ALL = Drain(1, math.inf)

chains = st.integers(1, 4).flatmap(
    lambda n: st.sampled_from([DIGESTS[:n], DIGESTS[:2] + DIGESTS[4 : 4 + n], DIGESTS[8 : 8 + n]])
)
ranks = st.integers(0, 1)


def content_of(kind: RecordKind, digest: bytes) -> bytes:
    """Return what GPUs compute for a digest."""
    return (kind.encode() + digest * 8)[: LAYOUT.record_bytes(kind)]


class Server:
    """GPUs, an engine's pools, and a store, of one server."""

    def __init__(self, root: Path) -> None:
        self.gpus = GpuPages(COUNTS, LAYOUT)
        self.table_memory = {kind: mmap.mmap(-1, table_bytes(n)) for kind, n in HOST.items()}
        self.root = root
        self.start_engine()
        self.start_store()

    def tables(self) -> dict[RecordKind, CacheTable]:
        """Return the host's tables as a process that has just started sees them."""
        return {k: CacheTable(n, memoryview(self.table_memory[k])) for k, n in HOST.items()}

    def start_engine(self) -> None:
        """Start an engine, which finds the host's pages; its workers have empty GPUs."""
        self.waiting: list[Sequence] = []
        tables = self.tables()
        for table in tables.values():
            if table.cache_id != self.gpus.cache_id:
                table.begin(self.gpus.cache_id)
        self.pool = PagePool(COUNTS[RecordKind.PAGES], 1)
        self.slots = StateSlots(COUNTS[RecordKind.STATES], num_reserved=2)
        self.host = CachePools(
            PagePool(HOST[RecordKind.PAGES], 1, tables[RecordKind.PAGES]),
            StateSlots(HOST[RecordKind.STATES], tables[RecordKind.STATES]),
        )
        device = CachePools(self.pool, self.slots)
        self.fetcher = PageFetcher(*device, LAYOUT, lambda _: 1.0, lambda: 0.0, host=self.host)
        self.tier = HostTier(device, self.host, LAYOUT, self.fetcher.enter)

    def start_store(self) -> None:
        """Start a store, which finds the file of the one before."""
        self.directory = StoreDirectory(self.root, FINGERPRINT)
        own = {
            kind.value: self.directory.own(
                SlotFileHeader(kind, FINGERPRINT, "model", LAYOUT.record_bytes(kind), count)
            )
            for kind, count in RECORDS.items()
        }
        tiers = [StoreTier(TierName.DISK, own, self.directory)]
        self.store = KvStore(self.gpus.memory, self.tables(), tiers)

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
        """Compute a prompt whose sequence ends then, and leaves a state, if there is room."""
        known = self.pool.match_prefix(digests)
        if not self.pool.can_allocate(len(digests) - len(known)):
            self.pool.free(known)
            return
        pages = known + self.pool.allocate(len(digests) - len(known))
        for page, digest in list(zip(pages, digests, strict=True))[len(known) :]:
            self.gpus.compute(RecordKind.PAGES, page, content_of(RecordKind.PAGES, digest))
            self.pool.cache(page, digest)
        self.pool.free(pages)
        last, slot = digests[-1], self.slots.allocate()
        self.gpus.compute(RecordKind.STATES, slot, content_of(RecordKind.STATES, last))
        self.slots.cache(slot, last)
        self.slots.on_kept(last)
        self.slots.free(slot)

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
        pools = self.pool, self.slots, *self.host
        counts = [*COUNTS.values(), *HOST.values()]
        assert [pool.num_free for pool in pools] == counts
        self.waiting.clear()

    def lose_workers(self, keeps_host: bool) -> None:
        """Lose the GPUs' pages, and the host's after a fault."""
        self.gpus.lose(keeps_host)
        self.tier.lose_workers()
        assert not any(sequence.is_blocked for sequence in self.waiting)
        self.pool.reset()
        self.slots.reset()
        if self.host.pages.cache_id != self.gpus.cache_id:
            self.tier.reset(self.gpus.cache_id)

    def check(self) -> None:
        """Check that all that can be found is right, by a process that starts now, too."""
        known = self.pool._pages, self.slots._checkpoints
        for kind, places in zip(KINDS, known, strict=True):
            for digest, place in places.items():
                assert self.gpus.read(kind, place) == content_of(kind, digest)
        for kind, table in self.tables().items():
            for entry in range(HOST[kind] if table.cache_id == self.gpus.cache_id else 0):
                found = table.look(entry)
                if found.is_whole(entry):
                    assert self.gpus.read_host(kind, entry) == content_of(kind, found.digest)


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


def test_pages_and_a_state_come_back_to_gpus_after_a_restart(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.compute(DIGESTS[:4])
    server.settle()
    assert server.host.pages.num_cached == 4 and server.host.slots.num_cached == 1
    server.store.drain(ALL)
    other = Server(tmp_path)
    other.seek(DIGESTS[:4])
    other.settle()
    assert other.pool.count_cached(DIGESTS[:4]) == 4 and other.slots.has(DIGESTS[3])
    other.check()
