"""The KV store: copies pages and states out of workers' memory, and back.

It reads the pool's tables in shared memory, so the engine does nothing for what is stored. An entry
that is the same before and after a copy was not written to meanwhile. The id of the workers' memory
tells whether that was cleared.
"""

import time
from array import array
from collections.abc import Mapping, Sequence

from headrace.engine_proc.kv_cache.cache_table import IN_USE, CacheTable
from headrace.engine_proc.kv_cache.page_fetcher import COPY_SHARE
from headrace.engine_proc.shm.page_memory import PageMemory
from headrace.ipc.page_digests import DIGEST_BYTES
from headrace.ipc.worker_messages import (
    Drain,
    Drained,
    FetchedRecords,
    FetchRecords,
    Lookup,
    LookupResult,
    RecordKind,
)
from headrace.storage.store_tier import StoreTier

SCAN_S = 0.2  # between looks at the tables


class KvStore:
    """The tiers beneath a pool.

    Args:
        tables: of the pool, by kind; the engine writes them.
        tiers: the fastest first.

    Attributes:
        num_missing: records that were to be fetched and were not here, or not right.
        num_stored: records that a tier has taken.
        rest_s: how long to let steps go on before the next `save_next`.
    """

    def __init__(
        self,
        memory: PageMemory,
        tables: Mapping[RecordKind, CacheTable],
        tiers: Sequence[StoreTier],
    ) -> None:
        self._memory = memory
        self._tables = tables
        self.tiers = tiers
        sizes = [memory.layout.record_bytes(kind) for kind in tables]
        self._buffer = memoryview(bytearray(max(sizes)))
        self._seen = {kind: [0] * table.num_entries for kind, table in tables.items()}  # seals
        self._unsaved: list[tuple[RecordKind, int]] = []  # the first to be evicted last
        self._scanned_at = 0.0
        self._drain_number = 0
        self._is_shared = False  # pages are in use: steps need the cores
        self.rest_s = 0.0
        self.num_missing = self.fetched_bytes = self.fetch_ns = 0
        self.num_stored = self.stored_bytes = 0

    def look(self, lookup: Lookup) -> LookupResult:
        """Return which records there are."""
        for tier in self.tiers:
            tier.refresh()
        pages, states = (
            bytes([self._has(kind, digest) for digest in split_digests(lookup.digests)])
            for kind in RecordKind
        )
        return LookupResult(pages, states)

    def _has(self, kind: RecordKind, digest: bytes) -> bool:
        return kind in self._tables and any(tier.has(kind, digest) for tier in self.tiers)

    def fetch(self, fetch: FetchRecords) -> FetchedRecords:
        """Copy records into the workers' memory."""
        began_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        places = array("i", fetch.places)
        pairs = zip(split_digests(fetch.digests), places, strict=True)
        is_there = bytes([self._fetch(fetch.kind, digest, place) for digest, place in pairs])
        took_ns = time.perf_counter_ns() - began_ns
        self.fetch_ns += took_ns
        return FetchedRecords(is_there, took_ns / 1e9, (time.thread_time_ns() - cpu_ns) / 1e9)

    def _fetch(self, kind: RecordKind, digest: bytes, place: int) -> bool:
        record = self._record(kind)
        for tier in self.tiers:
            if tier.read(kind, digest, record):
                self._memory.write(kind, place, record)
                self.fetched_bytes += len(record)
                return True
        self.num_missing += 1
        return False

    def save_next(self) -> bool:
        """Store a page or state without users that is not here; return whether there was one."""
        if not self._unsaved and time.monotonic() - self._scanned_at >= SCAN_S:
            self._scan(IN_USE // 2)
        if not self._unsaved:
            return False
        began_ns = time.thread_time_ns()
        self._save(*self._unsaved.pop())
        cpu_s = (time.thread_time_ns() - began_ns) / 1e9
        self.rest_s = cpu_s / COPY_SHARE if self._is_shared else 0.0
        return True

    def drain(self, drain: Drain) -> Drained:
        """Store what is not here, what is in use included, as long as there is time."""
        if drain.number != self._drain_number or not self._unsaved:
            self._drain_number = drain.number
            self._scan(IN_USE)
        ends_at = time.monotonic() + drain.seconds
        while self._unsaved:
            self._save(*self._unsaved.pop())
            if time.monotonic() >= ends_at:
                break
        return Drained(drain.number, not self._unsaved)

    def _scan(self, end: int) -> None:
        """Find what is to be stored, of orders below `end`."""
        self._scanned_at = time.monotonic()
        self._is_shared = False
        found = []
        for kind, table in self._tables.items():
            rows = zip(*table.columns(), self._seen[kind], strict=True)
            for entry, (seal, order, seen) in enumerate(rows):
                self._is_shared |= seal != 0 and order >= IN_USE // 2
                if seal and seal != seen and order < end:
                    found.append((order, kind, entry))
        if found:
            for tier in self.tiers:
                tier.refresh()
        found.sort(reverse=True)
        self._unsaved = [(kind, entry) for _, kind, entry in found]

    def _save(self, kind: RecordKind, entry: int) -> None:
        table, record = self._tables[kind], self._record(kind)
        before = table.look(entry)
        if not before.is_whole(entry):
            return
        lacking = [tier for tier in self.tiers if not tier.has(kind, before.digest)]
        if lacking:
            is_read = self._memory.read(kind, entry, record)
            is_same = table.look(entry) == before and self._memory.cache_id == table.cache_id
            if not is_read or not is_same:
                return
            taken = [tier.write(kind, before.digest, record) for tier in lacking]
            self.num_stored += sum(taken)
            self.stored_bytes += len(record) * sum(taken)
        self._seen[kind][entry] = before.seal

    def _record(self, kind: RecordKind) -> memoryview:
        return self._buffer[: self._memory.layout.record_bytes(kind)]


def split_digests(digests: bytes) -> list[bytes]:
    """Return digests that lie one after the other."""
    starts = range(0, len(digests), DIGEST_BYTES)
    return [digests[start : start + DIGEST_BYTES] for start in starts]
