"""The KV cache in shared memory that outlives workers and engine: pages, states, and their tables.

The supervisor holds a memfd per worker and one for the tables, and its descendants inherit them.
They have no name, and take only the memory that is written.

A worker's memory:

    0    pages, then states (`cache_bytes` of `cache_sizes.py`); then pages of a draft model
    end  cache id, 16 bytes: new whenever the memory is cleared
         fingerprint, 16 bytes, of the model and of how it is executed
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b

CACHE_ID_BYTES = 16
FINGERPRINT_BYTES = 16
SYSTEM_PAGE = 4096  # of csrc/cpu/model.cpp: states begin at one
BLOCK_BYTES = 512  # of `st_blocks`
PIECE_BYTES = 1 << 30  # that are given to the system at a time


class CacheMemory:
    """The memory of a worker, which has it alone.

    A worker that was killed may compute for a moment longer. So each holds a lock, which the kernel
    releases once all of its threads are gone, and the next waits for that.

    Args:
        fd: an inherited memfd, of any size.
        num_bytes: of pages and states, the draft model's included.
        fingerprint: memory of another one, or of another size, is cleared.
    """

    def __init__(self, fd: int, num_bytes: int, fingerprint: bytes) -> None:
        assert len(fingerprint) == FINGERPRINT_BYTES
        # A lock belongs to what was opened, and the supervisor's descriptor is of the same.
        self._lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        size = num_bytes + CACHE_ID_BYTES + FINGERPRINT_BYTES
        is_whole = os.fstat(fd).st_size == size
        kept = os.pread(fd, size - num_bytes, num_bytes) if is_whole else b""
        self.cache_id = kept[:CACHE_ID_BYTES]
        if kept[CACHE_ID_BYTES:] != fingerprint:
            self.cache_id = os.urandom(CACHE_ID_BYTES)
            os.ftruncate(fd, 0)
            os.ftruncate(fd, size)
            os.pwrite(fd, self.cache_id + fingerprint, num_bytes)
        self._map = mmap.mmap(fd, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        """Let the next worker have it. The memory must not be used any more."""
        os.close(self._lock_fd)


def join_cache_ids(cache_ids: Sequence[bytes]) -> bytes:
    """Return the id of the memory of all workers; none, if that of some dies with them."""
    if not all(cache_ids):
        return b""
    return blake2b(b"".join(cache_ids), digest_size=CACHE_ID_BYTES).digest()


def clear(fds: Sequence[int]) -> None:
    """Give memory back to the system, and with it all that it holds. No worker may use it."""
    for fd in fds:
        os.ftruncate(fd, 0)


def release_pages(fds: Sequence[int], beat: Callable[[], None]) -> int:
    """Give the memory of pages and states to the system while workers have it. Its id stays.

    What was there reads as zeros, so no table may tell of it any more.

    Args:
        beat: called before each piece: each takes the system some time.

    Returns:
        The bytes that were there.
    """
    before = held_bytes(fds)
    for fd in fds:
        size = os.fstat(fd).st_size - CACHE_ID_BYTES - FINGERPRINT_BYTES
        size -= size % SYSTEM_PAGE
        if size > 0:
            with mmap.mmap(fd, size) as memory:
                for start in range(0, size, PIECE_BYTES):
                    beat()
                    memory.madvise(mmap.MADV_REMOVE, start, min(PIECE_BYTES, size - start))
    return before - held_bytes(fds)


def held_bytes(fds: Sequence[int]) -> int:
    """Return how much memory descriptors hold."""
    return sum(BLOCK_BYTES * os.fstat(fd).st_blocks for fd in fds)


def map_tables(fd: int, sizes: Sequence[int]) -> list[memoryview]:
    """Return the memory of tables that lie one after the other.

    It holds zeros where there were none of these sizes.
    """
    if os.fstat(fd).st_size != sum(sizes):
        os.ftruncate(fd, 0)
        os.ftruncate(fd, sum(sizes))
    memory = memoryview(mmap.mmap(fd, 0))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [memory[end - size : end] for end, size in zip(ends, sizes, strict=True)]
