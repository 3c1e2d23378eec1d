"""Stand-ins for GPUs whose pages and states are copied to memory of the host and back."""

import os
from array import array
from collections import deque

from headrace.engine_proc.shm.cache_memory import CacheMemory, join_cache_ids
from headrace.engine_proc.shm.page_memory import PageMemory, whole
from headrace.ipc.worker_messages import CacheLayout, CopyPages, RecordKind

LOST = b"?"  # what is in memory that nothing has written


class GpuPages:
    """Pages and states of several GPUs, which each copy one at a time of what they were asked for.

    Args:
        counts: of the records of each kind that a GPU has.
        layout: of the host.

    Attributes:
        cache_id: of the host's memory.
        memory: of the host, as records.
    """

    def __init__(self, counts: dict[RecordKind, int], layout: CacheLayout) -> None:
        self._layout = layout
        self._counts = counts
        self.fds = [os.memfd_create("host pages") for _ in layout.page_bytes]
        self.memory = PageMemory(self.fds, layout)
        self.cache_id = b""
        self.lose(keeps_host=False)

    def lose(self, keeps_host: bool = True) -> None:
        """Begin anew, as workers do after a death."""
        ids, layout = [], self._layout
        for fd, page_bytes, state_bytes in zip(
            self.fds, layout.page_bytes, layout.state_bytes, strict=True
        ):
            if not keeps_host:
                os.ftruncate(fd, 0)
            size = whole(layout.num_pages * page_bytes) + layout.num_states * state_bytes
            memory = CacheMemory(fd, size, bytes(16))
            ids.append(memory.cache_id)
            memory.close()
        self.cache_id = join_cache_ids(ids)
        self._records = [  # by GPU
            {kind: [LOST] * count for kind, count in self._counts.items()} for _ in self.fds
        ]
        self._asked = [deque[CopyPages]() for _ in self.fds]
        self._num_copied = [0] * len(self.fds)  # records of the oldest
        self._answers = [0] * len(self.fds)

    def close(self) -> None:
        """Give all memory back."""
        for fd in self.fds:
            os.close(fd)

    def compute(self, kind: RecordKind, place: int, record: bytes) -> None:
        """Write a page or a state, as a step does."""
        start = 0
        for records, size in zip(self._records, self._layout.share_bytes(kind), strict=True):
            records[kind][place] = record[start : start + size]
            start += size

    def read(self, kind: RecordKind, place: int) -> bytes:
        """Return a page or a state."""
        return b"".join(records[kind][place] for records in self._records)

    def read_host(self, kind: RecordKind, place: int) -> bytes:
        """Return a page or a state of the host."""
        into = memoryview(bytearray(self._layout.record_bytes(kind)))
        assert self.memory.read(kind, place, into)
        return bytes(into)

    def ask(self, copies: CopyPages) -> None:
        """Take a message to all workers."""
        for asked in self._asked:
            asked.append(copies)

    def advance(self, rank: int) -> bool:
        """Have a GPU copy its next page or state; return whether there was one."""
        if not self._asked[rank]:
            return False
        copies = self._asked[rank][0]
        records = [
            (kind, *pair)
            for kind, places, host_places in (
                (RecordKind.PAGES, copies.pages, copies.host_pages),
                (RecordKind.STATES, copies.slots, copies.host_slots),
            )
            for pair in zip(array("i", places), array("i", host_places), strict=True)
        ]
        self._copy(rank, copies.to_host, *records[self._num_copied[rank]])
        self._num_copied[rank] += 1
        if self._num_copied[rank] == len(records):
            self._asked[rank].popleft()
            self._num_copied[rank] = 0
            self._answers[rank] += 1
        return True

    def _copy(
        self, rank: int, to_host: bool, kind: RecordKind, place: int, host_place: int
    ) -> None:
        ((at, size),) = self.memory._parts(rank, kind, host_place)
        records = self._records[rank][kind]
        if to_host:
            os.pwrite(self.fds[rank], records[place].ljust(size, LOST), at)
        else:
            records[place] = os.pread(self.fds[rank], size, at)

    def take_answer(self) -> bool:
        """Return whether all have made another copy, which is noted with it."""
        if not all(self._answers):
            return False
        self._answers = [number - 1 for number in self._answers]
        return True
