"""A pool and the store beneath it, against a model of both: no page is ever another one."""

import math
import mmap
import os
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kv_stores import answer_all, close_files

from headrace.engine_proc.kv_cache.cache_table import CacheTable, table_bytes
from headrace.engine_proc.kv_cache.page_fetcher import PageFetcher
from headrace.engine_proc.kv_cache.page_pool import PagePool
from headrace.engine_proc.kv_cache.state_slots import StateSlots
from headrace.engine_proc.kv_store.kv_store import KvStore
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.shm.cache_memory import SYSTEM_PAGE, CacheMemory, join_cache_ids
from headrace.engine_proc.shm.page_memory import PageMemory, whole
from headrace.ipc.messages import GenerateRequest, Sampling
from headrace.ipc.worker_messages import CacheLayout, Drain, Drained, RecordKind
from headrace.storage.slot_file import SlotFile, SlotFileHeader
from headrace.storage.store_directory import StoreDirectory
from headrace.storage.store_tier import StoreTier, TierName

NUM_PAGES, NUM_STATES = 6, 3
LAYOUT = CacheLayout(NUM_PAGES, NUM_STATES, [48, 80], [4096, 16], [32, 32])  # of two workers
COUNTS = {RecordKind.PAGES: NUM_PAGES, RecordKind.STATES: NUM_STATES}
DIGESTS = [bytes([i]) * 16 for i in range(1, 10)]  # of a prompt's pages, and of others
FINGERPRINT = "f" * 32
ALL = Drain(1, math.inf)


def content_of(kind: RecordKind, digest: bytes) -> bytes:
    """Return what workers compute for a digest."""
    size = LAYOUT.record_bytes(kind)
    return (kind.encode() + digest * (size // 16 + 1))[:size]


class Workers:
    """The memory of two workers."""

    def __init__(self) -> None:
        self.fds = [os.memfd_create("pages") for _ in LAYOUT.page_bytes]
        self.cache_id = b""
        self.clear()
        self.memory = PageMemory(self.fds, LAYOUT)

    def clear(self) -> None:
        """Begin with other memory, as after a fault."""
        ids = []
        for fd, page_bytes, state_bytes in zip(
            self.fds, LAYOUT.page_bytes, LAYOUT.state_bytes, strict=True
        ):
            os.ftruncate(fd, 0)
            size = whole(NUM_PAGES * page_bytes) + whole(NUM_STATES * state_bytes)
            size += SYSTEM_PAGE + NUM_PAGES * 32
            memory = CacheMemory(fd, size, bytes(16))
            ids.append(memory.cache_id)
            memory.close()
        self.cache_id = join_cache_ids(ids)

    def read(self, kind: RecordKind, place: int) -> bytes:
        """Return a record."""
        into = memoryview(bytearray(LAYOUT.record_bytes(kind)))
        assert self.memory.read(kind, place, into)
        return bytes(into)

    def compute(self, kind: RecordKind, place: int, digest: bytes) -> None:
        """Write a record, as a step does."""
        self.memory.write(kind, place, memoryview(content_of(kind, digest)))


def header(kind: RecordKind, num_slots: int) -> SlotFileHeader:
    """Return the header of a file with so many records."""
    return SlotFileHeader(kind, FINGERPRINT, "model", LAYOUT.record_bytes(kind), num_slots)


class Server:
    """A pool with workers and a store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workers = Workers()
        self.tables_memory = {kind: mmap.mmap(-1, table_bytes(n)) for kind, n in COUNTS.items()}
        self.memory_fds = {kind: os.memfd_create(kind) for kind in COUNTS}
        self.start_engine()
        self.start_store()

    def tables(self) -> dict[RecordKind, CacheTable]:
        """Return the tables as a process that has just started sees them."""
        return {k: CacheTable(n, memoryview(self.tables_memory[k])) for k, n in COUNTS.items()}

    def start_engine(self) -> None:
        """Start an engine, which may find the tables of another."""
        tables = self.tables()
        for table in tables.values():
            if table.cache_id != self.workers.cache_id:
                table.begin(self.workers.cache_id)
        self.pool = PagePool(NUM_PAGES, 1, tables[RecordKind.PAGES])
        self.slots = StateSlots(NUM_STATES, tables[RecordKind.STATES])
        self.fetcher = PageFetcher(self.pool, self.slots, LAYOUT, lambda _: 1.0, lambda: 0.0)

    def start_store(self) -> None:
        """Start a store, which finds the files of another."""
        memory = {
            kind: SlotFile(fd, header(kind, 2), False) for kind, fd in self.memory_fds.items()
        }
        self.directory = StoreDirectory(self.root, FINGERPRINT)
        disk = {kind: self.directory.own(header(kind, 4)) for kind in COUNTS}
        tiers = [
            StoreTier(TierName.MEMORY, memory),
            StoreTier(TierName.DISK, disk, self.directory),
        ]
        self.store = KvStore(self.workers.memory, self.tables(), tiers)

    def close(self) -> None:
        """Close everything."""
        close_files(self.directory)
        for fd in (*self.workers.fds, *self.memory_fds.values()):
            os.close(fd)

    def compute(self, digests: list[bytes]) -> None:
        """Compute pages, with a state behind the last, as one sequence that ends then."""
        known = self.pool.match_prefix(digests)
        if not self.pool.can_allocate(len(digests) - len(known)):
            self.pool.free(known)
            return
        pages = known + self.pool.allocate(len(digests) - len(known))
        for page, digest in list(zip(pages, digests, strict=True))[len(known) :]:
            self.workers.compute(RecordKind.PAGES, page, digest)
            self.pool.cache(page, digest)
        self.pool.free(pages)
        slot = self.slots.allocate()
        self.workers.compute(RecordKind.STATES, slot, digests[-1])
        self.slots.cache(slot, digests[-1])
        self.slots.free(slot)

    def fetch(self, digests: list[bytes]) -> int:
        """Have a sequence wait for its pages; return with how many it can begin."""
        prompt = array("I", range(len(digests) + 1))
        request = GenerateRequest(1 << 16, 0, 1, Sampling(), [], b"")
        sequence = Sequence.of(request, prompt.tobytes())
        sequence.digests = list(digests)
        self.fetcher.enter(sequence)
        answer_all(self.fetcher, self.store)
        assert not sequence.is_fetching and not self.fetcher.is_busy
        known = digests[: self.pool.count_cached(digests)]
        return max((i + 1 for i, d in enumerate(known) if self.slots.has(d)), default=0)

    def check(self) -> None:
        """Check that pages and states are what the pool says, and that none is in use."""
        for digest, page in self.pool._pages.items():
            assert self.workers.read(RecordKind.PAGES, page) == content_of(RecordKind.PAGES, digest)
        for digest, slot in self.slots._checkpoints.items():
            assert self.workers.read(RecordKind.STATES, slot) == content_of(
                RecordKind.STATES, digest
            )
        assert self.pool.num_free == NUM_PAGES
        assert self.slots.num_free == NUM_STATES


chains = st.integers(1, 4).flatmap(
    lambda n: st.sampled_from([DIGESTS[:n], DIGESTS[:2] + DIGESTS[4 : 4 + n]])
)


class TwoServers(RuleBasedStateMachine):
    """Two servers that share a directory, with deaths of all processes, and damage."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.servers = [Server(Path(self.folder.name)) for _ in range(2)]
        self.computed: set[bytes] = set()

    def teardown(self) -> None:
        for server in self.servers:
            server.close()
        self.folder.cleanup()

    @rule(server=st.integers(0, 1), digests=chains)
    def compute(self, server: int, digests: list[bytes]) -> None:
        self.servers[server].compute(digests)
        self.computed |= set(digests)

    @rule(server=st.integers(0, 1), count=st.integers(1, 5))
    def save(self, server: int, count: int) -> None:
        store = self.servers[server].store
        store._scanned_at = -1e9
        for _ in range(count):
            store.save_next()

    @rule(server=st.integers(0, 1))
    def drain(self, server: int) -> None:
        self.servers[server].store.drain(ALL)

    @rule(server=st.integers(0, 1), digests=chains)
    def fetch(self, server: int, digests: list[bytes]) -> None:
        assert self.servers[server].fetch(digests) == 0 or set(digests) & self.computed

    @rule(server=st.integers(0, 1))
    def lose_engine(self, server: int) -> None:
        self.servers[server].start_engine()

    @rule(server=st.integers(0, 1))
    def lose_store(self, server: int) -> None:
        close_files(self.servers[server].directory)
        self.servers[server].start_store()

    @rule(server=st.integers(0, 1), learns=st.booleans())
    def lose_workers(self, server: int, learns: bool) -> None:
        one = self.servers[server]
        one.workers.clear()
        if not learns:  # the store may look before the engine does
            one.store.drain(ALL)
        one.pool.reset(one.workers.cache_id)
        one.slots.reset(one.workers.cache_id)

    @precondition(lambda self: self.computed)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        paths = sorted(Path(self.folder.name).glob("*/*.kv"))
        path = data.draw(st.sampled_from(paths))
        place = data.draw(st.integers(4096, path.stat().st_size))
        if data.draw(st.booleans()):
            os.truncate(path, place)
        else:
            with open(path, "r+b") as file:
                file.seek(place)
                file.write(b"?")

    @invariant()
    def all_is_right(self) -> None:
        for server in self.servers:
            server.check()


TestTwoServers = TwoServers.TestCase


def test_pages_come_back_after_all_else_is_gone(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.compute(DIGESTS[:3])
    server.store.drain(ALL)
    assert server.store.num_stored == 2 * (3 + 1)  # in memory and on disk
    other = Server(tmp_path)
    assert other.directory.number == 1, "the first server has its own file"
    assert other.fetch(DIGESTS[:3]) == 3
    other.check()
    assert other.store.tiers[TierName.DISK].num_found == 3 + 1
    other.store.drain(ALL)
    assert other.store.tiers[TierName.DISK].used_bytes == 0, "it is on disk already"


def test_a_drain_stores_in_pieces(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.compute(DIGESTS[:3])
    for is_all in (False, False, False, True):
        assert server.store.drain(Drain(1, 0.0)) == Drained(1, is_all)
    assert server.store.num_stored == 2 * (3 + 1)
    server.compute(DIGESTS[4:5])
    assert server.store.drain(Drain(2, 0.0)) == Drained(2, is_all=False)


def test_a_page_that_is_evicted_meanwhile_is_not_stored(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.compute(DIGESTS[:1])
    read = server.workers.memory.read

    def evict_first(kind: RecordKind, place: int, into: memoryview) -> bool:
        if kind is RecordKind.PAGES:
            pages = server.pool.allocate(NUM_PAGES)
            for page in pages:
                server.workers.compute(RecordKind.PAGES, page, DIGESTS[8])
            server.pool.cache(pages[0], DIGESTS[0])
            server.pool.free(pages)
        return read(kind, place, into)

    server.workers.memory.read = evict_first  # type: ignore[method-assign]
    server.store.drain(ALL)
    assert server.store.tiers[TierName.DISK].has(RecordKind.STATES, DIGESTS[0])
    assert not server.store.tiers[TierName.DISK].has(RecordKind.PAGES, DIGESTS[0])
