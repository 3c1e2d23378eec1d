"""Processes above the memory limit of their kind are found."""

import mmap
import os
from pathlib import Path

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField
from headrace.runtime.roles import ROLES
from headrace.supervision.watchdog import MEMORY_SHARES, MemoryWatchdog
from headrace.system.machine import memory_limit
from headrace.system.procfs import own_bytes, resident_bytes

MB = 1 << 20


def test_there_is_a_share_for_every_role() -> None:
    assert MEMORY_SHARES.keys() == ROLES.keys()


def test_process_above_its_memory_share_is_reported() -> None:
    board = Board.create([Seat("tokenizer", 0), Seat("tokenizer", 1), Seat("worker", 0)])
    for pid, slot in enumerate(board.slots):
        slot.enter(State.READY)
        slot[CommonField.PID] = pid
    has: dict[int, int | None] = {0: 251 * MB, 1: 250 * MB, 2: 900 * MB}
    memory_watchdog = MemoryWatchdog(1000 * MB, lambda _: 1000 * MB, lambda pid: has[pid])
    told = [(Seat("tokenizer", 0), "has 251 MiB of memory, more than its 250")]
    assert memory_watchdog.check(board.slots, 0) == told
    has[0] = None  # it has ended
    assert memory_watchdog.check(board.slots, 0) == []
    has[0] = 900 * MB
    board.slots[0][CommonField.STATE] = State.DEAD
    assert memory_watchdog.check(board.slots, 0) == []


def test_memory_is_read_by_kind_only_where_there_is_much() -> None:
    board = Board.create([Seat("tokenizer", 0), Seat("tokenizer", 1)])
    for pid, slot in enumerate(board.slots):
        slot.enter(State.READY)
        slot[CommonField.PID] = pid
    asked: list[int] = []
    resident = [250 * MB, 251 * MB]
    watchdog = MemoryWatchdog(1000 * MB, resident.__getitem__, asked.append)
    assert watchdog.check(board.slots, 0) == []
    assert asked == [1]


def test_memory_of_files_is_not_a_processs_own(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(64 * MB))
    before = own_bytes(os.getpid())
    assert before is not None
    with (
        (tmp_path / "weights").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as weights,
    ):
        assert not any(weights[:: mmap.PAGESIZE])
        mapped = own_bytes(os.getpid())
    with mmap.mmap(-1, 128 * MB) as hoard:
        for page in range(0, len(hoard), mmap.PAGESIZE):
            hoard[page] = 1
        grown = own_bytes(os.getpid())
    assert mapped is not None
    assert grown is not None
    assert resident_bytes(os.getpid()) >= mapped
    assert mapped - before < 16 * MB
    assert grown - mapped > 100 * MB
    assert own_bytes(2**22 + 1) is None


@pytest.mark.parametrize(("limit", "bytes"), [("max", 8 * MB), (str(3 * MB), 3 * MB), ("", 8 * MB)])
def test_a_container_has_less_memory_than_the_machine(
    tmp_path: Path, limit: str, bytes: int
) -> None:
    files = {"proc/meminfo": "MemTotal: 8192 kB\n", "sys/fs/cgroup/memory.max": limit}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == bytes
