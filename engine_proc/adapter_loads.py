"""Loads of adapters (LoRA): asks the workers for those that sequences need, beside their steps."""

import logging
import time
from collections.abc import Callable, Iterator

from headrace.engine_proc.child_processes.worker_group import WorkerGroup
from headrace.engine_proc.scheduling.adapter_pool import AdapterPool
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.sequence.pooled_adapter import PooledAdapter
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.ipc.adapter_registry import AdapterRegistry, AdapterUsage

REPORT_S = 0.5  # between reports of what is in use
DEADLY = "workers have died twice while they loaded it"

log = logging.getLogger(__name__)

# A sequence that cannot be computed, and why: fit for its client.
Failure = tuple[Sequence, str]


class AdapterLoads:
    """The adapters of an engine, between its scheduler and its workers."""

    def __init__(
        self,
        pool: AdapterPool,
        registry: AdapterRegistry,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._reported: tuple[list[str], list[str]] = [], []
        self._reported_at = 0.0
        self._pool = pool
        self._registry = registry
        self._scheduler = scheduler

    @property
    def is_busy(self) -> bool:
        """Whether workers are loading some."""
        return self._pool.is_loading

    def tend(self, workers: WorkerGroup) -> list[Failure]:
        """Take what the workers have loaded and ask for more; return the sequences that fail."""
        failures: list[Failure] = []
        for loaded in workers.loaded_adapters():
            if loaded.why_not:
                failed = self._pool.take_failed(loaded.slot)
                failures += self._failures(failed, loaded.why_not)
            else:
                self._pool.take_loaded(loaded.slot)
        running = {s.adapter for s in self._scheduler.running if s.adapter is not None}
        for adapter in self._pool.arrange(running):
            workers.load_adapter(adapter.slot, adapter.source)
        self._report(running)
        return failures

    def _report(self, running: set[PooledAdapter]) -> None:
        """Publish which adapters are in use, for `/metrics`, where that has changed."""
        names = sorted(adapter.source.name for adapter in running)
        waiting = sorted(a.source.name for a in self._pool.used if a not in running)
        now = self._clock()
        if (names, waiting) != self._reported and now - self._reported_at >= REPORT_S:
            self._reported, self._reported_at = (names, waiting), now
            self._registry.report(AdapterUsage(self._pool.max_running, names, waiting, now))

    def lose_workers(self) -> list[Failure]:
        """Note that the workers are lost; return the sequences at whose adapters they die."""
        return [
            failure for adapter in self._pool.lose() for failure in self._failures(adapter, DEADLY)
        ]

    def _failures(self, adapter: PooledAdapter, why: str) -> Iterator[Failure]:
        name = adapter.source.name
        log.warning("adapter %r cannot be loaded: %s", name, why)
        self._registry.discard(adapter.source)
        for sequence in self._scheduler.users_of(adapter):
            yield sequence, f"the adapter {name!r} cannot be loaded: {why}"
