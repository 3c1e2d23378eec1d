"""Weights are read from their files into buffers, through the system's cache or past it."""

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import numpy.typing as npt
import pytest

from headrace.engine_proc.worker.checkpoints.file_reader import ALIGNMENT, FileReader
from headrace.engine_proc.worker.checkpoints.mapped_file import extent_of, map_file
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight
from headrace.errors import ModelError

NUM_ROWS, NUM_COLS = 300, 4000  # rows that begin anywhere in a page
PATIENCE_S = 60
NUMBERS = np.random.default_rng(0).integers(0, 256, (NUM_ROWS, NUM_COLS), np.uint8)

Bytes = npt.NDArray[np.uint8]


def mapped_bytes(path: Path) -> int:
    """Return how much of a file is in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    found = 0
    for line in lines:
        if line.endswith(str(path)):
            rss = next(line for line in lines if line.startswith("Rss:"))
            found += int(rss.split()[1]) * 1024
    return found


@pytest.fixture
def tensor(tmp_path: Path) -> StoredTensor:
    """Return a tensor that fills a file."""
    path = tmp_path / "numbers"
    path.write_bytes(NUMBERS.tobytes())
    return StoredTensor(Format.U8, NUMBERS.shape, map_file(path))


def reader_of(tensor: StoredTensor, keeps_cache: bool = True) -> FileReader:
    return FileReader([None, extent_of(tensor.data)], keeps_cache=keeps_cache)


def data_of(weight: Weight) -> Bytes:
    return weight.stored().data


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_parts_of_tensors_are_read_and_not_mapped(tensor: StoredTensor, keeps_cache: bool) -> None:
    reader, columns = reader_of(tensor, keeps_cache), tensor.columns(1000, NUM_COLS)
    for part, expected in (
        (tensor.rows(3, 100), NUMBERS[3:100]),
        (tensor, NUMBERS.reshape(-1)),
        (columns, NUMBERS[:, 1000:]),
        (columns.rows(NUM_ROWS - 2, NUM_ROWS), NUMBERS[-2:, 1000:]),
    ):
        np.testing.assert_array_equal(data_of(reader.read(part)), expected)
    extent = extent_of(tensor.data)
    assert extent is not None and mapped_bytes(extent.file.path) == 0


def test_files_are_read_past_the_cache_where_they_can(
    tensor: StoredTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = extent_of(tensor.data)
    assert extent is not None
    descriptor = extent.file.descriptor
    try:
        os.close(os.open(extent.file.path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system reads through the cache alone")

    def refuse(*_: object) -> int:
        raise OSError("this file system cannot")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)
        reader_of(tensor, keeps_cache=False)
    assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
    reader_of(tensor, keeps_cache=True)
    assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
    reader_of(tensor, keeps_cache=False)
    assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT


def test_threads_have_buffers_of_their_own(tensor: StoredTensor) -> None:
    reader, both = reader_of(tensor), Barrier(2)

    def read(row: int) -> Bytes:
        data = data_of(reader.read(tensor.rows(row, row + 1)))
        both.wait(PATIENCE_S)
        return data.copy()

    with ThreadPoolExecutor(2) as pool:
        for row, data in enumerate(pool.map(read, range(2))):
            np.testing.assert_array_equal(data, NUMBERS[row : row + 1])


def test_what_no_file_has_is_left_as_it_is(tensor: StoredTensor) -> None:
    ones = StoredTensor.of(np.ones((2, 3), np.float32))
    assert reader_of(tensor).read(ones) is ones


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_a_file_that_became_shorter_is_named(tensor: StoredTensor, keeps_cache: bool) -> None:
    reader, extent = reader_of(tensor, keeps_cache), extent_of(tensor.data)
    assert extent is not None
    os.truncate(extent.file.path, NUM_COLS * 10)
    np.testing.assert_array_equal(data_of(reader.read(tensor.rows(0, 10))), NUMBERS[:10])
    with pytest.raises(ModelError, match="numbers: has become shorter than 44000 bytes"):
        reader.read(tensor.rows(9, 11))


def test_reads_that_end_early_go_on_with_a_whole_page(
    tensor: StoredTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, begins = os.preadv, []

    def read_some(descriptor: int, buffers: list[memoryview], at: int) -> int:
        begins.append(at)
        return read(descriptor, [buffers[0][:10_000]], at)

    monkeypatch.setattr(os, "preadv", read_some)
    part = reader_of(tensor).read(tensor.rows(3, 100))
    np.testing.assert_array_equal(data_of(part), NUMBERS[3:100])
    assert len(begins) > 1 and not any(at % ALIGNMENT for at in begins)
