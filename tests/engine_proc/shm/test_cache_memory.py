"""The memory of pages: it outlives the workers that have it, one after the other."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from readable import readable
from servers import wait_until

from headrace.engine_proc.shm import cache_memory
from headrace.engine_proc.shm.cache_memory import (
    SYSTEM_PAGE,
    CacheMemory,
    clear,
    held_bytes,
    join_cache_ids,
    map_tables,
    release_pages,
)

MODEL, OTHER = b"m" * 16, b"o" * 16
NUM_BYTES = 1 << 16


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("pages")
    yield fd
    os.close(fd)


def write(memory: CacheMemory, text: bytes) -> None:
    ctypes.memmove(memory.address, text, len(text))


def read(memory: CacheMemory, size: int) -> bytes:
    return ctypes.string_at(memory.address, size)


def test_the_next_worker_of_a_model_finds_its_pages(fd: int) -> None:
    first = CacheMemory(fd, NUM_BYTES, MODEL)
    write(first, b"page")
    first.close()
    second = CacheMemory(fd, NUM_BYTES, MODEL)
    assert (read(second, 4), second.cache_id) == (b"page", first.cache_id)
    second.close()


@pytest.mark.parametrize(("num_bytes", "fingerprint"), [(NUM_BYTES + 1, MODEL), (NUM_BYTES, OTHER)])
def test_pages_of_another_model_or_size_are_cleared(
    fd: int, num_bytes: int, fingerprint: bytes
) -> None:
    first = CacheMemory(fd, NUM_BYTES, MODEL)
    write(first, b"page")
    first.close()
    second = CacheMemory(fd, num_bytes, fingerprint)
    assert read(second, 4) == bytes(4)
    assert second.cache_id != first.cache_id
    second.close()


def test_cleared_memory_is_given_back_and_has_another_id(fd: int) -> None:
    first = CacheMemory(fd, NUM_BYTES, MODEL)
    first.close()
    clear([fd])
    assert os.fstat(fd).st_blocks == 0
    second = CacheMemory(fd, NUM_BYTES, MODEL)
    assert second.cache_id != first.cache_id
    second.close()


HOLD = """
import sys
from headrace.engine_proc.shm.cache_memory import CacheMemory
CacheMemory(int(sys.argv[1]), 1 << 16, b"m" * 16)
print("held", flush=True)
sys.stdin.read()
"""


def hold(fd: int) -> "subprocess.Popen[str]":
    """Start a worker that has the memory until it is killed."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(fd)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_worker_waits_until_the_one_before_it_is_gone(fd: int) -> None:
    with hold(fd) as first, hold(fd) as second:
        try:
            assert first.stdout is not None and second.stdout is not None
            ready = readable([first.stdout, second.stdout], 60)
            (out,) = ready
            holder, waiter = (first, second) if out is first.stdout else (second, first)
            wait_until(lambda: f"WRITE {waiter.pid} " in waiting_locks(), "the other waits")
            assert waiter.stdout is not None
            assert not readable([waiter.stdout], 0)
            holder.kill()
            assert readable([waiter.stdout], 60)
        finally:
            first.kill()
            second.kill()


def waiting_locks() -> str:
    """Return the lines of locks that processes wait for."""
    lines = Path("/proc/locks").read_text().splitlines()
    return "\n".join(" ".join(line.split()) for line in lines if "->" in line)


def test_ids_are_joined_unless_a_worker_keeps_nothing() -> None:
    ids = [b"1" * 16, b"2" * 16]
    assert join_cache_ids(ids) == join_cache_ids(list(ids))
    assert join_cache_ids(ids) != join_cache_ids(ids[::-1])
    assert join_cache_ids([ids[0], b""]) == b""


def test_tables_are_found_again_and_begin_anew_with_other_sizes(fd: int) -> None:
    first, second = map_tables(fd, [64, 128])
    first[:1], second[:1] = b"1", b"2"
    assert [bytes(table[:1]) for table in map_tables(fd, [64, 128])] == [b"1", b"2"]
    assert [bytes(table[:1]) for table in map_tables(fd, [64, 96])] == [bytes(1)] * 2


def test_pages_are_given_back_while_a_worker_has_them(fd: int) -> None:
    memory = CacheMemory(fd, NUM_BYTES, MODEL)
    write(memory, b"x" * NUM_BYTES)
    before = os.fstat(fd).st_blocks
    num_bytes = release_pages([fd], lambda: None)
    assert os.fstat(fd).st_blocks < before / 4
    assert num_bytes == 512 * (before - os.fstat(fd).st_blocks)
    assert read(memory, NUM_BYTES) == bytes(NUM_BYTES)
    write(memory, b"page")
    memory.close()
    again = CacheMemory(fd, NUM_BYTES, MODEL)
    assert (read(again, 4), again.cache_id) == (b"page", memory.cache_id)
    again.close()


def test_pages_are_released_between_beats(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_memory, "PIECE_BYTES", SYSTEM_PAGE)
    memory = CacheMemory(fd, 3 * SYSTEM_PAGE, MODEL)
    os.pwrite(fd, b"x" * 3 * SYSTEM_PAGE, 0)
    held: list[int] = []
    release_pages([fd], lambda: held.append(held_bytes([fd]) // SYSTEM_PAGE))
    assert held == [4, 3, 2], "pages, and the one of the id"
    memory.close()


def test_memory_that_was_cleared_has_nothing_to_give_back(fd: int) -> None:
    release_pages([fd], lambda: None)
    assert os.fstat(fd).st_size == 0
