"""Copies between GPUs and their host tier: asks the workers for them, beside their steps."""

from headrace.board.board import Slot
from headrace.board.fields import EngineField, KvStoreField
from headrace.engine_proc.child_processes.worker_group import WorkerGroup
from headrace.engine_proc.kv_cache.host_tier import HostTier
from headrace.storage.store_tier import TierName


class PageCopies:
    """The copies of an engine, between its host tier and its workers.

    Args:
        slot: the engine's.
        store_slot: the KV store's. It has no memory of its own here, and counts none.
    """

    def __init__(self, tier: HostTier, slot: Slot, store_slot: Slot) -> None:
        self._tier = tier
        self._slot = slot
        self._store_slot = store_slot
        slot.add(EngineField.RECOVERED_PAGES, tier.host.pages.num_cached)  # of the engine before

    @property
    def is_busy(self) -> bool:
        """Whether any copy is awaited, or is to begin."""
        return self._tier.is_busy

    def tend(self, workers: WorkerGroup, may_begin: bool = True) -> None:
        """Take what workers have copied, and ask for more.

        Args:
            may_begin: whether pages may be held for copies.
        """
        for seconds in workers.copied_pages():
            copy, slot = self._tier.take(seconds), self._store_slot
            num_records = len(copy.digests) + len(copy.states)
            if copy.to_host:
                slot.add(KvStoreField.COPIED_OUT, num_records)
            else:
                slot.add(KvStoreField.FOUND + TierName.MEMORY, num_records)
                slot.add(KvStoreField.COPY_IN_NS, round(1e9 * seconds))
        self._update_board()
        while may_begin and (copies := self._tier.next()) is not None:
            workers.copy_pages(copies)

    def lose_workers(self) -> None:
        """Note that the workers are lost, and with them all that is on its way."""
        self._tier.lose_workers()

    def take_workers(self, cache_id: bytes) -> None:
        """Go on with the host tier of new workers, which may be another."""
        host = self._tier.host.pages
        if cache_id == host.cache_id:
            self._slot.add(EngineField.RECOVERED_PAGES, host.num_cached)
        else:
            self._tier.reset(cache_id)

    def _update_board(self) -> None:
        """Tell the size of the tier: a store that was replaced has other gauges."""
        self._store_slot[KvStoreField.USED_BYTES + TierName.MEMORY] = self._tier.used_bytes
        self._store_slot[KvStoreField.TOTAL_BYTES + TierName.MEMORY] = self._tier.total_bytes
