"""Allocates slots for the states of sequences, and finds cached states. Pure.

The slots do bookkeeping only, as `PagePool` does: the memory belongs to the workers. A slot never
changes between its allocation and its last use, so to cache a state is to keep its slot. A cached
state is a checkpoint: it is found by the digest of the page that it follows. A checkpoint without
users stays until its slot is allocated again. Eviction is least recently used first.
"""

from collections import OrderedDict
from collections.abc import Callable

from headrace.engine_proc.kv_cache.cache_table import NO_CACHE, CacheTable
from headrace.ipc.worker_messages import SLOTS_PER_SEQUENCE


class StateSlots:
    """Every slot is free, idle (a checkpoint without users) or used by sequences and steps.

    Args:
        table: of the checkpoints. Those that it has are here from the start.
        num_reserved: slots that running sequences leave to copies, if one sequence can run then.

    Attributes:
        on_kept: called with the digest of each checkpoint that is to stay.
    """

    def __init__(
        self, num_slots: int, table: CacheTable | None = None, num_reserved: int = 0
    ) -> None:
        self.num_slots = num_slots
        self.num_reserved = max(0, min(num_reserved, num_slots - SLOTS_PER_SEQUENCE))
        self.on_kept: Callable[[bytes], None] = lambda _: None
        self._table = table or CacheTable(num_slots)
        self._digests: dict[int, bytes] = dict(self._table.adopt())
        self._checkpoints = {digest: slot for slot, digest in self._digests.items()}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(self._digests)  # the first goes
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in self._idle]
        self._num_users = [0] * num_slots

    @property
    def num_cached(self) -> int:
        """Checkpoints that can be found, in use or not."""
        return len(self._digests)

    @property
    def most_sequences(self) -> int:
        """How many sequences may run."""
        return (self.num_slots - self.num_reserved) // SLOTS_PER_SEQUENCE

    @property
    def num_free(self) -> int:
        """Slots that can be allocated, the idle ones included."""
        return len(self._free) + len(self._idle)

    def allocate(self) -> int:
        """Allocate a slot to write to; there must be one."""
        assert self.num_free, f"all {self.num_slots} state slots are in use"
        slot = self._free.pop() if self._free else self._evict()
        self._num_users[slot] = 1
        return slot

    def _evict(self) -> int:
        slot, _ = self._idle.popitem(last=False)
        self._table.erase(slot)
        del self._checkpoints[self._digests.pop(slot)]
        return slot

    def free(self, slot: int) -> None:
        """End one use of a slot."""
        self._num_users[slot] -= 1
        assert self._num_users[slot] >= 0, "a state slot was freed twice"
        if self._num_users[slot]:
            return
        if slot in self._digests:
            self._idle[slot] = None
            self._table.leave(slot)
        else:
            self._free.append(slot)

    def has(self, digest: bytes) -> bool:
        """Whether there is a checkpoint behind this page."""
        return digest in self._checkpoints

    def find(self, digest: bytes) -> int:
        """Return the slot of a checkpoint that there is, for reading; it counts as in use."""
        slot = self._checkpoints[digest]
        if not self._num_users[slot]:
            del self._idle[slot]
            self._table.take(slot)
        self._num_users[slot] += 1
        return slot

    def cache(self, slot: int, digest: bytes) -> bool:
        """Make a slot in use a checkpoint, unless there is one; return whether it is now."""
        assert self._num_users[slot] > 0 and slot not in self._digests
        if digest in self._checkpoints:
            return False
        self._checkpoints[digest] = slot
        self._digests[slot] = digest
        self._table.record(slot, digest)
        return True

    def drop(self, digest: bytes) -> None:
        """Forget a checkpoint, if it is still there."""
        slot = self._checkpoints.pop(digest, None)
        if slot is None:
            return
        self._table.erase(slot)
        del self._digests[slot]
        if slot in self._idle:
            del self._idle[slot]
            self._free.append(slot)

    def reset(self, cache_id: bytes = NO_CACHE) -> None:
        """Forget all checkpoints after the loss of the workers' memory. No slot may be in use.

        Args:
            cache_id: of the memory that the workers have now.
        """
        assert not any(self._num_users), "state slots are in use"
        for digest in list(self._checkpoints):
            self.drop(digest)
        self._table.begin(cache_id)
