"""A mapped file takes memory while it is read, and no longer."""

import mmap
from pathlib import Path

import numpy as np

from headrace.engine_proc.worker.checkpoints.mapped_file import map_file, release

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
