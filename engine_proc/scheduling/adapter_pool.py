"""Which adapters (LoRA) the workers have, and which of them may run. Pure.

The workers hold `max_loaded` adapters, each in a slot; the least recently used one leaves. At most
`max_running` have sequences that run. Others wait for a seat: then the adapter that has had its
seat for longest closes. Its running sequences end, its waiting ones wait for the next seat. So no
adapter waits for ever, and each runs something in its turn.

Sequences wait for their adapter. They are never preempted for it.
"""

from collections.abc import Iterable

from headrace.engine_proc.sequence.pooled_adapter import NO_SLOT, PooledAdapter
from headrace.ipc.messages import AdapterSource

MAX_LOADING = 2  # at a time: their messages fit the channel of a worker beside its steps
MAX_DEATHS = 2  # of workers that were loading an adapter


class AdapterPool:
    """The adapters of an engine.

    Args:
        max_running: adapters with sequences that run, `--max-loras`.
        max_loaded: adapters that workers hold, `--max-cpu-loras`; at least as many.
    """

    def __init__(self, max_running: int, max_loaded: int) -> None:
        self.max_running = max_running
        self._adapters: dict[bytes, PooledAdapter] = {}  # the least recently used first
        self._seated: list[PooledAdapter] = []  # the longest first
        self._free_slots = list(range(max(max_running, max_loaded)))

    @property
    def is_loading(self) -> bool:
        """Whether workers have something to answer."""
        return any(adapter.is_loading for adapter in self._adapters.values())

    @property
    def used(self) -> list[PooledAdapter]:
        """The adapters that have sequences."""
        return [adapter for adapter in self._adapters.values() if adapter.num_users]

    @property
    def num_loaded(self) -> int:
        """How many the workers have."""
        return sum(adapter.is_loaded for adapter in self._adapters.values())

    def enter(self, source: AdapterSource) -> PooledAdapter:
        """Note that a sequence of an adapter came; return the adapter."""
        adapter = self._adapters.pop(source.digest, None) or PooledAdapter(source)
        self._adapters[source.digest] = adapter
        adapter.num_users += 1
        return adapter

    def leave(self, adapter: PooledAdapter) -> None:
        """Note that a sequence of an adapter has ended."""
        adapter.num_users -= 1
        if not adapter.num_users and adapter.slot == NO_SLOT:
            self._forget(adapter)

    def arrange(self, running: Iterable[PooledAdapter]) -> list[PooledAdapter]:
        """Give seats and slots to adapters that have sequences.

        Args:
            running: the adapters of all running sequences.

        Returns:
            Those that the workers are to load now, into their slots.
        """
        at_work = set(running)
        for adapter in list(self._seated):
            adapter.has_run = adapter.has_run or adapter in at_work
            is_done = not adapter.num_users or adapter.is_closing
            if is_done and adapter not in at_work:
                self._unseat(adapter)
        wanting = [a for a in self.used if not a.has_seat]
        for adapter in wanting[: self.max_running - len(self._seated)]:
            adapter.has_seat = True
            self._seated.append(adapter)
        num_waiting = sum(not adapter.has_seat for adapter in wanting)
        for adapter in [a for a in self._seated if a.has_run][:num_waiting]:
            adapter.is_closing = True
        return self._begin_loads()

    def _begin_loads(self) -> list[PooledAdapter]:
        num_loading = sum(adapter.is_loading for adapter in self._adapters.values())
        begun: list[PooledAdapter] = []
        for adapter in self._seated:
            if adapter.slot == NO_SLOT and num_loading + len(begun) < MAX_LOADING:
                slot = self._find_slot()
                if slot == NO_SLOT:
                    break
                adapter.slot = slot
                begun.append(adapter)
        return begun

    def _find_slot(self) -> int:
        """Return a free slot, if need be that of the least recently used adapter."""
        if self._free_slots:
            return self._free_slots.pop()
        for adapter in self._adapters.values():
            if adapter.is_loaded and not adapter.has_seat:
                slot, adapter.slot, adapter.is_loaded = adapter.slot, NO_SLOT, False
                if not adapter.num_users:
                    self._forget(adapter)
                return slot
        return NO_SLOT

    def take_loaded(self, slot: int) -> None:
        """Note that all workers have loaded what a slot was given to."""
        self._in_slot(slot).is_loaded = True

    def take_failed(self, slot: int) -> PooledAdapter:
        """Note that an adapter cannot be loaded; return it. Its sequences are to be failed."""
        adapter = self._in_slot(slot)
        self._give_up(adapter)
        return adapter

    def lose(self) -> list[PooledAdapter]:
        """Note that the workers are lost, and what they had; new ones load it again.

        Returns:
            Adapters at whose loads workers die; their sequences are to be failed.
        """
        deadly = []
        for adapter in [a for a in self._adapters.values() if a.slot != NO_SLOT]:
            adapter.num_deaths += adapter.is_loading
            if adapter.num_deaths >= MAX_DEATHS:
                deadly.append(adapter)
            self._give_up(adapter)
        return deadly

    def _in_slot(self, slot: int) -> PooledAdapter:
        return next(adapter for adapter in self._adapters.values() if adapter.slot == slot)

    def _give_up(self, adapter: PooledAdapter) -> None:
        """Take an adapter's slot from it."""
        self._free_slots.append(adapter.slot)
        adapter.slot, adapter.is_loaded = NO_SLOT, False
        if not adapter.num_users:
            self._forget(adapter)

    def _unseat(self, adapter: PooledAdapter) -> None:
        self._seated.remove(adapter)
        adapter.has_seat = adapter.has_run = adapter.is_closing = False
        if adapter.num_users:  # it is the last of those that wait
            self._adapters[adapter.source.digest] = self._adapters.pop(adapter.source.digest)

    def _forget(self, adapter: PooledAdapter) -> None:
        if adapter.has_seat:
            self._unseat(adapter)
        del self._adapters[adapter.source.digest]
