"""Sleep of an engine: pages and the memory of steps go back to the system, weights stay.

An engine falls asleep when operators want that and it has no requests. The next request wakes it:
memory comes back as it is written to. What was cached is lost, but for what a KV store has.
"""

from collections.abc import Sequence

from headrace.board.fields import EngineField
from headrace.board.replicas import SLEEP, ReplicaWishes
from headrace.engine_proc.child_processes.store_client import StoreClient
from headrace.engine_proc.child_processes.worker_group import WorkerGroup
from headrace.engine_proc.scheduling.scheduler import Scheduler
from headrace.engine_proc.shm.cache_memory import give_back
from headrace.runtime.process import Context


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
        self._wishes = ReplicaWishes(context.board)
        self._is_wanted = False
        self._is_kept = False  # by the store, all that is cached
        self._slot[EngineField.CAN_SLEEP] = bool(cache_fds)

    def look(self) -> None:
        """Wake when there are requests; fall asleep when that is wanted and there are none."""
        if self._slot[EngineField.IS_BUSY] or self._scheduler.has_work:
            self._slot[EngineField.IS_ASLEEP] = self._is_kept = False
            if self._store is not None:
                self._store.stop_keeping()
            return
        wish = self._wishes.take().get(self._slot[EngineField.MODEL])
        if wish is not None:
            self._is_wanted = wish == SLEEP
            self._slot[EngineField.IS_ASLEEP] &= self._is_wanted
        can_sleep = self._cache_fds and self._workers.cache_id
        if self._is_wanted and can_sleep and self._keeps_all():
            self._is_wanted = self._is_kept = False
            self._fall_asleep()

    def _keeps_all(self) -> bool:
        """Have the store keep what is cached; return whether it has."""
        if self._store is None:
            return True
        if not self._is_kept:
            self._is_kept = True
            self._store.keep_all()
        return not self._store.is_keeping

    def _fall_asleep(self) -> None:
        """Forget all pages, then give their memory back."""
        self._scheduler.recompute(self._workers.cache_id)
        self._workers.rest()
        give_back(self._cache_fds)
        self._slot[EngineField.IS_ASLEEP] = 1
