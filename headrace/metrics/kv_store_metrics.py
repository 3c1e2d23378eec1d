"""Prometheus metrics of the KV store, by tier: memory, disk. On GPUs memory is their host tier."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.board.board import Board
from headrace.board.fields import BoardField, KvStoreField
from headrace.metrics.process_labels import LABELS, ProcessLabels

TIERS = ("memory", "disk")  # in the order of the words of a field
BY_TIER: list[tuple[str, str, BoardField]] = [
    ("kv_store_hits", "Pages and states fetched", KvStoreField.FOUND),
    ("kv_store_refused", "Those whose checksum was wrong", KvStoreField.REFUSED),
    ("kv_store_failed_writes", "Those that could not be written", KvStoreField.FAILED_WRITES),
    ("kv_store_used_bytes", "Bytes of pages and states", KvStoreField.USED_BYTES),
    ("kv_store_bytes", "Room for them", KvStoreField.TOTAL_BYTES),
]
COUNTERS: list[tuple[str, str, BoardField, float]] = [
    ("kv_store_misses", "Pages and states asked for in vain", KvStoreField.NOT_FOUND, 1),
    ("kv_store_fetched_bytes", "Bytes fetched", KvStoreField.FETCHED_BYTES, 1),
    ("kv_store_fetch_seconds", "Time that it took", KvStoreField.FETCH_NS, 1e-9),
    ("kv_store_stored", "Pages and states stored", KvStoreField.STORED, 1),
    ("kv_store_stored_bytes", "Bytes stored", KvStoreField.STORED_BYTES, 1),
    (
        "kv_store_copied_out",
        "Pages and states copied from GPUs to memory",
        KvStoreField.COPIED_OUT,
        1,
    ),
    ("kv_store_copy_in_seconds", "Time that copies back took", KvStoreField.COPY_IN_NS, 1e-9),
]


class KvStoreCollector(Collector):
    """Reads the slot of the KV store, if there is one."""

    def __init__(self, board: Board, labels: ProcessLabels) -> None:
        self._board = board
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        slots = self._board.occupied("kv_store")
        for name, help, field in BY_TIER:
            kind = GaugeMetricFamily if field.is_gauge else CounterMetricFamily
            family = kind(f"headrace:{name}", help, labels=[*LABELS, "tier"])
            for slot in slots:
                for tier, word in zip(TIERS, field.words, strict=True):
                    family.add_metric([*self._labels.of(slot), tier], slot[word])
            yield family
        for name, help, field, unit in COUNTERS:
            counter = CounterMetricFamily(f"headrace:{name}", help, labels=LABELS)
            for slot in slots:
                counter.add_metric(self._labels.of(slot), slot[field] * unit)
            yield counter
