"""Pages and states of all workers as records, for the process that copies them.

It maps nothing: workers may clear their memory at any time. A record is the share of each worker,
one behind the other. That of a page has the page of EAGLE-3's layer, too. Without its hidden states
nothing is drafted well behind a page that comes back.
"""

import os
from collections.abc import Sequence

from headrace.engine_proc.shm.cache_memory import (
    CACHE_ID_BYTES,
    FINGERPRINT_BYTES,
    SYSTEM_PAGE,
    join_cache_ids,
)
from headrace.ipc.worker_messages import CacheLayout, RecordKind


class PageMemory:
    """The memory of all workers, by record.

    Args:
        fds: of each worker's memory, see `cache_memory.py`.
    """

    def __init__(self, fds: Sequence[int], layout: CacheLayout) -> None:
        self._fds = fds
        self.layout = layout

    def _parts(self, rank: int, kind: RecordKind, index: int) -> list[tuple[int, int]]:
        """Return where the parts of a worker's share of a record lie, and their bytes."""
        layout = self.layout
        size, behind = layout.page_bytes[rank], whole(layout.num_pages * layout.page_bytes[rank])
        of_state = layout.state_bytes[rank]
        if kind is RecordKind.STATES:
            return [(behind + index * of_state, of_state)]
        parts = [(index * size, size)]
        if any(layout.eagle_bytes):
            start = SYSTEM_PAGE + behind + whole(layout.num_states * of_state)
            of_layer = layout.eagle_bytes[rank]
            parts.append((start + index * of_layer, of_layer))
        return parts

    def read(self, kind: RecordKind, index: int, into: memoryview) -> bool:
        """Read a record; return whether it is there."""
        start = 0
        for rank, fd in enumerate(self._fds):
            for place, size in self._parts(rank, kind, index):
                if os.preadv(fd, [into[start : start + size]], place) != size:
                    return False
                start += size
        return True

    def write(self, kind: RecordKind, index: int, record: memoryview) -> None:
        """Write a record where no worker reads. The memory must not be cleared meanwhile."""
        start = 0
        for rank, fd in enumerate(self._fds):
            for place, size in self._parts(rank, kind, index):
                written = os.pwrite(fd, record[start : start + size], place)
                assert written == size, f"{written} of {size} bytes written to a worker's memory"
                start += size

    @property
    def cache_id(self) -> bytes:
        """What names the memory now, as `WorkerGroup.cache_id`; none while it is being cleared."""
        behind = CACHE_ID_BYTES + FINGERPRINT_BYTES
        ends = [os.fstat(fd).st_size - behind for fd in self._fds]
        if min(ends) < 0:
            return b""
        pairs = zip(self._fds, ends, strict=True)
        return join_cache_ids([os.pread(fd, CACHE_ID_BYTES, end) for fd, end in pairs])


def whole(num_bytes: int) -> int:
    """Return how many bytes of whole pages of the system so many take, as in `cache_bytes`."""
    return -(-num_bytes // SYSTEM_PAGE) * SYSTEM_PAGE
