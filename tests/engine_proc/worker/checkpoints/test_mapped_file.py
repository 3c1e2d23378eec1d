"""A mapped file takes memory while it is read, and no longer."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from headrace.engine_proc.worker.checkpoints import mapped_file
from headrace.engine_proc.worker.checkpoints.mapped_file import (
    Extent,
    ReadAhead,
    extent_of,
    forget,
    map_file,
    release,
)

NUM_PAGES = 4096


def mapped_bytes(path: Path) -> int:
    """Return how much of a file is in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    found = 0
    for line in lines:
        if line.endswith(str(path)):
            rss = next(line for line in lines if line.startswith("Rss:"))
            found += int(rss.split()[1]) * 1024
    return found


def test_released_pages_leave_memory_and_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    numbers = np.random.default_rng(0).integers(0, 256, NUM_PAGES * mmap.PAGESIZE, np.uint8)
    path.write_bytes(numbers)
    view = map_file(path)[5:-7]  # whole pages, but for its ends
    assert int(view.sum()) == int(numbers[5:-7].sum())
    assert mapped_bytes(path) > len(view) * 0.9
    release(view.reshape(-1, 4)[:, 1:3])
    assert mapped_bytes(path) < len(view) * 0.1
    np.testing.assert_array_equal(view, numbers[5:-7])


def test_release_leaves_other_memory_alone() -> None:
    numbers = np.ones(NUM_PAGES * mmap.PAGESIZE, np.uint8)
    release(numbers)
    assert numbers.all()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Return what the system is told of a file from now on: which bytes it should read or drop."""
    calls: list[tuple[str, int, int]] = []

    def tell(what: str, extent: Extent) -> None:
        calls.append((what, extent.begin, extent.end))

    monkeypatch.setattr(mapped_file, "advise", lambda extent, _advice: tell("read", extent))
    monkeypatch.setattr(mapped_file, "forget", lambda extent: tell("forget", extent))
    return calls


def extents_in(path: Path, size: int, count: int) -> list[Extent | None]:
    """Return adjacent extents of a new file."""
    path.write_bytes(bytes(size * count))
    view = map_file(path)
    return [extent_of(view[size * i : size * (i + 1)]) for i in range(count)]


def test_bytes_are_asked_for_before_they_are_used(
    tmp_path: Path, told: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_file, "AHEAD_BYTES", 200)
    extents = extents_in(tmp_path / "numbers", 100, 4)
    ahead = ReadAhead([None, *extents], keeps_cache=True)
    ahead.use(0)
    assert told == [("read", 0, 100), ("read", 100, 200)]
    ahead.end_use(0)
    ahead.use(1)
    assert len(told) == 2  # enough is on its way
    ahead.end_use(1)
    ahead.use(2)
    assert told[2:] == [("read", 200, 300)]


def test_used_bytes_leave_the_cache_in_large_pieces(
    tmp_path: Path, told: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_file, "FORGOTTEN_BYTES", 150)
    monkeypatch.setattr(mapped_file, "HUGE_PAGE", 200)
    extents = extents_in(tmp_path / "numbers", 100, 5)
    ahead = ReadAhead(extents, keeps_cache=False)
    for index in range(5):
        ahead.use(index)
        ahead.end_use(index)
    dropped = [call for call in told if call[0] == "forget"]
    assert dropped == [("forget", 0, 200), ("forget", 200, 400)]


def test_forgotten_bytes_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    numbers = np.random.default_rng(0).integers(0, 256, NUM_PAGES * mmap.PAGESIZE, np.uint8)
    path.write_bytes(numbers)
    view = map_file(path)
    extent = extent_of(view)
    assert extent is not None
    release(view)
    forget(extent)
    np.testing.assert_array_equal(view, numbers)
    path.unlink()
    forget(extent)  # which is no failure
    np.testing.assert_array_equal(view, numbers)
