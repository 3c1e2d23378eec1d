"""Store process: copies pages between workers' memory and the tiers beneath; decides nothing.
In: ToStore (engine_proc).  Out: FromStore (engine_proc)."""

import fcntl
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from headrace.board.board import Slot
from headrace.board.fields import KvStoreField
from headrace.config.process_configs import KvStoreConfig
from headrace.engine_proc.kv_cache.cache_table import CacheTable, table_bytes
from headrace.engine_proc.kv_store.kv_store import KvStore
from headrace.engine_proc.shm.cache_memory import map_tables
from headrace.engine_proc.shm.page_memory import PageMemory
from headrace.engine_proc.shm.step_channel import StepChannel
from headrace.engine_proc.worker.execution.cache_fingerprint import (
    content_digest,
    content_fingerprint,
)
from headrace.errors import ConfigError
from headrace.ipc.prefix_index import PrefixIndex
from headrace.ipc.worker_messages import (
    CacheLayout,
    Drain,
    FetchRecords,
    FromStore,
    Lookup,
    OpenStore,
    RecordKind,
    StoreReady,
    ToStore,
)
from headrace.runtime.process import Context
from headrace.storage.slot_file import SlotFile, SlotFileHeader, slots_within
from headrace.storage.store_directory import StoreDirectory
from headrace.storage.store_tier import StoreTier, TierName

IDLE_S = 0.2  # between looks at what is to be stored


def main(config: KvStoreConfig, context: Context) -> None:
    """Store what the pool has, and answer the engine, until SIGTERM.

    Raises:
        ConfigError: the disk has no room, or the directory cannot be written to.
    """
    asks: StepChannel[ToStore] = StepChannel(config.ask_fd, ToStore, look_us=0)
    answers: StepChannel[FromStore] = StepChannel(config.answer_fd, FromStore)
    heartbeat = context.keep_beating()  # a file of weights may be long
    heartbeat.begin(context.progress)
    wait_for_predecessor(config.cache_fds[0])
    content = content_digest(config.execution)
    while not isinstance(ask := asks.receive(IDLE_S), OpenStore):
        pass
    fingerprint = content_fingerprint(config.execution, content, ask.numerics)
    store = open_store(config, ask, fingerprint)
    heartbeat.end()
    context.ready()
    answers.send(StoreReady(fingerprint))
    before = {word: context.slot[word] for word in counts_of(store)}
    is_busy = False
    while True:
        message = asks.receive(store.rest_s if is_busy else IDLE_S)
        heartbeat.begin()
        match message:
            case Lookup():
                answers.send(store.look(message))
            case FetchRecords():
                answers.send(store.fetch(message))
            case Drain():
                answers.send(store.drain(message))
            case _:
                is_busy = store.save_next()
        heartbeat.end()
        update_board(context.slot, store, before)


def wait_for_predecessor(fd: int) -> None:
    """Wait until no other store of this server may write to pages, and keep later ones waiting."""
    lock = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)


def open_store(config: KvStoreConfig, ask: OpenStore, fingerprint: str) -> KvStore:
    """Open the files of all tiers. The memory of a host tier is all that there is of memory."""
    layout = ask.layout
    if ask.numerics:
        config = replace(config, tiers=replace(config.tiers, memory_fds=()))
    kinds = [kind for kind in RecordKind if layout.count(kind)]
    sizes = [table_bytes(layout.count(kind)) for kind in RecordKind]
    tables = [
        CacheTable(layout.count(kind), memory)
        for kind, memory in zip(RecordKind, map_tables(config.cache_fds[0], sizes), strict=True)
    ]
    return KvStore(
        PageMemory(config.cache_fds[1:], layout),
        {kind: table for kind, table in zip(RecordKind, tables, strict=True) if kind in kinds},
        open_tiers(config, layout, fingerprint),
    )


def open_tiers(config: KvStoreConfig, layout: CacheLayout, fingerprint: str) -> list[StoreTier]:
    """Open the files in memory and on disk, the fastest first.

    Raises:
        ConfigError: there is no room for them.
    """
    tiers, found = config.tiers, []
    if tiers.memory_fds:
        headers = make_headers(config, layout, fingerprint, "--kv-store-bytes", tiers.memory_bytes)
        fds = dict(zip(RecordKind, tiers.memory_fds, strict=True))
        own = {k.value: SlotFile(fds[k], header, False) for k, header in headers.items()}
        if tiers.index_fd is not None:
            index = PrefixIndex(tiers.index_fd)
            index.clear()
            own[RecordKind.PAGES].tell(index.add, index.remove)
        found.append(StoreTier(TierName.MEMORY, own))
    if tiers.directory is not None:
        flag = "--kv-store-disk-bytes"
        headers = make_headers(config, layout, fingerprint, flag, tiers.disk_bytes_of_pages)
        try:
            directory = StoreDirectory(Path(tiers.directory), fingerprint)
            own = {kind.value: directory.own(header) for kind, header in headers.items()}
        except OSError as error:
            raise ConfigError(
                f"--kv-store {tiers.directory} cannot hold {flag} {tiers.disk_bytes}: {error}; "
                "lower that or take another folder"
            ) from error
        found.append(StoreTier(TierName.DISK, own, directory))
    return found


def make_headers(
    config: KvStoreConfig, layout: CacheLayout, fingerprint: str, flag: str, num_bytes: int
) -> dict[RecordKind, SlotFileHeader]:
    """Return what files of so many bytes hold: pages and states in proportion to the pool.

    Raises:
        ConfigError: they have no room for a page, or a state.
    """
    sizes = {kind: layout.record_bytes(kind) for kind in RecordKind if layout.count(kind)}
    total = sum(layout.count(kind) * size for kind, size in sizes.items())
    headers = {}
    for kind, size in sizes.items():
        num_slots = slots_within(num_bytes * layout.count(kind) * size // total, size)
        if not num_slots:
            raise ConfigError(
                f"{flag} {num_bytes} has no room for one of the {kind} of the KV cache, {size} "
                "bytes; raise it"
            )
        model = Path(config.execution.model_path).name
        headers[kind] = SlotFileHeader(kind, fingerprint, model, size, num_slots)
    return headers


def counts_of(store: KvStore) -> dict[int, int]:
    """Return what a store has counted, by word of the board."""
    counts = {
        int(KvStoreField.NOT_FOUND): store.num_missing,
        KvStoreField.FETCHED_BYTES: store.fetched_bytes,
        KvStoreField.FETCH_NS: store.fetch_ns,
        KvStoreField.STORED: store.num_stored,
        KvStoreField.STORED_BYTES: store.stored_bytes,
    }
    for tier in store.tiers:
        counts[KvStoreField.FOUND + tier.name] = tier.num_found
        counts[KvStoreField.REFUSED + tier.name] = tier.num_refused
        counts[KvStoreField.FAILED_WRITES + tier.name] = tier.num_failed
    return counts


def update_board(slot: Slot, store: KvStore, before: Mapping[int, int]) -> None:
    """Bring the board up to date; `before` has the counts of all stores before this one."""
    for word, count in counts_of(store).items():
        slot[word] = before[word] + count
    for tier in store.tiers:
        slot[KvStoreField.USED_BYTES + tier.name] = tier.used_bytes
        slot[KvStoreField.TOTAL_BYTES + tier.name] = tier.total_bytes
