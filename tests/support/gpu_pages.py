"""Stand-ins for GPUs whose pages are copied to memory of the host and back, step by step."""

import os
from array import array
from collections import deque

from headrace.engine_proc.shm.cache_memory import CacheMemory, join_cache_ids
from headrace.engine_proc.shm.page_memory import PageMemory
from headrace.ipc.worker_messages import CacheLayout, CopyPages, RecordKind

LOST = b"?"  # what is in memory that nothing has written


class GpuPages:
    """Pages of several GPUs, which each copy one page at a time of what they were asked for.

    Attributes:
        cache_id: of the host's memory.
        memory: of the host, as records.
    """

    def __init__(self, num_pages: int, layout: CacheLayout) -> None:
        self._layout = layout
        self._num_pages = num_pages
        self.fds = [os.memfd_create("host pages") for _ in layout.page_bytes]
        self.memory = PageMemory(self.fds, layout)
        self.cache_id = b""
        self.lose(keeps_host=False)

    def lose(self, keeps_host: bool = True) -> None:
        """Begin anew, as workers do after a death."""
        ids = []
        for fd, page_bytes in zip(self.fds, self._layout.page_bytes, strict=True):
            if not keeps_host:
                os.ftruncate(fd, 0)
            memory = CacheMemory(fd, self._layout.num_pages * page_bytes, bytes(16))
            ids.append(memory.cache_id)
            memory.close()
        self.cache_id = join_cache_ids(ids)
        self.pages = [[LOST] * self._num_pages for _ in self.fds]  # by GPU
        self._asked = [deque[CopyPages]() for _ in self.fds]
        self._num_copied = [0] * len(self.fds)  # pages of the oldest
        self._answers = [0] * len(self.fds)

    def close(self) -> None:
        """Give all memory back."""
        for fd in self.fds:
            os.close(fd)

    def shares(self, record: bytes) -> list[bytes]:
        """Cut a record into the shares of the GPUs."""
        sizes = self._layout.page_bytes
        return [record[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]

    def compute(self, page: int, record: bytes) -> None:
        """Write a page, as a step does."""
        for pages, share in zip(self.pages, self.shares(record), strict=True):
            pages[page] = share

    def read(self, page: int) -> bytes:
        """Return a page."""
        return b"".join(pages[page] for pages in self.pages)

    def read_host(self, host_page: int) -> bytes:
        """Return a page of the host."""
        into = memoryview(bytearray(self._layout.record_bytes(RecordKind.PAGES)))
        assert self.memory.read(RecordKind.PAGES, host_page, into)
        return bytes(into)

    def ask(self, copies: CopyPages) -> None:
        """Take a message to all workers."""
        for asked in self._asked:
            asked.append(copies)

    def advance(self, rank: int) -> bool:
        """Have a GPU copy its next page; return whether there was one."""
        if not self._asked[rank]:
            return False
        copies = self._asked[rank][0]
        pages, host_pages = array("i", copies.pages), array("i", copies.host_pages)
        self._copy(
            rank, copies.to_host, pages[self._num_copied[rank]], host_pages[self._num_copied[rank]]
        )
        self._num_copied[rank] += 1
        if self._num_copied[rank] == len(pages):
            self._asked[rank].popleft()
            self._num_copied[rank] = 0
            self._answers[rank] += 1
        return True

    def _copy(self, rank: int, to_host: bool, page: int, host_page: int) -> None:
        size = self._layout.page_bytes[rank]
        if to_host:
            share = self.pages[rank][page].ljust(size, LOST)
            os.pwrite(self.fds[rank], share, host_page * size)
        else:
            self.pages[rank][page] = os.pread(self.fds[rank], size, host_page * size)

    def take_answer(self) -> bool:
        """Return whether all have made another copy, which is noted with it."""
        if not all(self._answers):
            return False
        self._answers = [number - 1 for number in self._answers]
        return True
