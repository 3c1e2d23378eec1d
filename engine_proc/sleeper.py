"""Sleep of an engine: pages and the memory of steps go back to the system, weights stay.

An engine falls asleep when operators want that and it has no requests. The next request wakes it:
memory comes back as it is written to. What was cached is lost, but for what a KV store has.
"""

import logging
from collections.abc import Sequence

from headrace.board.fields import EngineField, FrontendField
from headrace.board.replicas import ModelWishes
from headrace.engine_proc.child_processes.store_client import StoreClient
from headrace.engine_proc.child_processes.worker_group import WorkerGroup
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.shm.cache_memory import release_pages
from headrace.runtime.process import Context

MIB = 1 << 20

log = logging.getLogger(__name__)


class Sleeper:
    """The sleep of one engine.

    Args:
        cache_fds: of the pages that the system takes back; without any it never sleeps.
    """

    def __init__(
        self,
        context: Context,
        scheduler: Scheduler,
        workers: WorkerGroup,
        store: StoreClient | None,
        cache_fds: Sequence[int],
    ) -> None:
        self._slot = context.slot
        self._scheduler = scheduler
        self._workers = workers
        self._store = store
        self._cache_fds = cache_fds
        self._wishes = ModelWishes(context.board, FrontendField.SLEEPS)
        self._is_wanted = False
        self._is_kept = False  # by the store, all that is cached
        self._has_rested = False  # since the last request
        self._slot[EngineField.CAN_SLEEP] = bool(cache_fds)

    def look(self) -> None:
        """Wake when there are requests; fall asleep when that is wanted and there are none."""
        if self._slot[EngineField.IS_BUSY] or self._scheduler.has_work:
            self._slot[EngineField.IS_ASLEEP] = self._is_kept = self._has_rested = False
            if self._store is not None:
                self._store.stop_keeping()
            return
        wish = self._wishes.take().get(self._slot[EngineField.MODEL])
        if wish is not None:
            self._is_wanted = bool(wish)
            self._slot[EngineField.IS_ASLEEP] &= self._is_wanted
        can_sleep = self._cache_fds and self._workers.cache_id
        if self._is_wanted and can_sleep and (self._has_rested or self._keeps_all()):
            if not self._has_rested:
                self._rest()
            self._is_wanted = self._is_kept = False
            self._slot[EngineField.IS_ASLEEP] = 1

    def _keeps_all(self) -> bool:
        """Have the store keep what is cached; return whether it has."""
        if self._store is None:
            return True
        if not self._is_kept:
            self._is_kept = True
            self._store.keep_all()
        return not self._store.is_keeping

    def _rest(self) -> None:
        """Forget all pages, then give their memory back."""
        if self._store is not None and not self._store.has_kept_all:
            log.warning("the KV store has not kept all that is cached; the rest is lost")
        self._scheduler.recompute(self._workers.cache_id)
        self._workers.rest()
        num_bytes = release_pages(self._cache_fds, self._slot.beat)
        self._has_rested = True
        log.info("asleep: %.0f MiB of pages are given back", num_bytes / MIB)
