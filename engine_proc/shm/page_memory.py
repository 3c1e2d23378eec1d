"""Pages and states of all workers as records, for the process that copies them.

It maps nothing: workers may clear their memory at any time. A record is the share of each worker,
one behind the other.
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

    def _place(self, rank: int, kind: RecordKind, index: int) -> int:
        start = 0
        if kind is RecordKind.STATES:
            pages = self.layout.num_pages * self.layout.page_bytes[rank]
            start = -(-pages // SYSTEM_PAGE) * SYSTEM_PAGE
        return start + index * self.layout.share_bytes(kind)[rank]

    def read(self, kind: RecordKind, index: int, into: memoryview) -> bool:
        """Read a record; return whether it is there."""
        start = 0
        for rank, size in enumerate(self.layout.share_bytes(kind)):
            share = into[start : start + size]
            if os.preadv(self._fds[rank], [share], self._place(rank, kind, index)) != size:
                return False
            start += size
        return True

    def write(self, kind: RecordKind, index: int, record: memoryview) -> None:
        """Write a record where no worker reads. The memory must not be cleared meanwhile."""
        start = 0
        for rank, size in enumerate(self.layout.share_bytes(kind)):
            share = record[start : start + size]
            written = os.pwrite(self._fds[rank], share, self._place(rank, kind, index))
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
