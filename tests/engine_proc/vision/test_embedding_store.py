"""Embeddings of images come back from disk as they were, or are not there."""

from pathlib import Path

import numpy as np
import pytest

from headrace.engine_proc.vision.embedding_store import RECORD_ROWS, EmbeddingStore, Floats

ROW_SIZE = 5
KEY, OTHER_KEY = b"k" * 16, b"o" * 16
ROWS = [1, RECORD_ROWS, RECORD_ROWS + 1, 3 * RECORD_ROWS]
FINGERPRINT = "f" * 32


def open_store(
    folder: Path, num_bytes: int = 1 << 20, fingerprint: str = FINGERPRINT
) -> EmbeddingStore:
    """Open a server's store."""
    store = EmbeddingStore.open(str(folder), num_bytes, fingerprint, "model", ROW_SIZE)
    assert store is not None
    return store


def rows_of(count: int, seed: int = 0) -> Floats:
    """Return rows of an image."""
    return np.random.default_rng(seed).random((count, ROW_SIZE), np.float32)


@pytest.mark.parametrize("count", ROWS)
def test_rows_come_back_after_a_restart(count: int, tmp_path: Path) -> None:
    open_store(tmp_path).write(KEY, rows_of(count))
    again = open_store(tmp_path)
    found = again.read(KEY, count)
    assert found is not None
    assert np.array_equal(found, rows_of(count))
    assert again.read(OTHER_KEY, count) is None
    assert again.read(KEY, count + 1) is None, "it was prepared otherwise"


def test_rows_of_another_server_are_read(tmp_path: Path) -> None:
    mine, other = (open_store(tmp_path) for _ in range(2))
    other.write(KEY, rows_of(2))
    mine.refresh()
    found = mine.read(KEY, 2)
    assert found is not None
    assert np.array_equal(found, rows_of(2))
    assert open_store(tmp_path, fingerprint="0" * 32).read(KEY, 2) is None, "of another model"


def test_damaged_rows_are_not_there(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write(KEY, rows_of(2))
    (file,) = tmp_path.glob("*/embeddings-0.kv")
    data = bytearray(file.read_bytes())
    at = data.index(rows_of(2).tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert store.read(KEY, 2) is None


def test_image_that_lost_a_record_to_others_is_not_there(tmp_path: Path) -> None:
    record_bytes = RECORD_ROWS * ROW_SIZE * 4
    store = open_store(tmp_path, num_bytes=4 * 4096 + 2 * record_bytes)
    store.write(KEY, rows_of(2 * RECORD_ROWS))
    assert store.read(KEY, 2 * RECORD_ROWS) is not None
    store.write(OTHER_KEY, rows_of(1))
    assert store.read(KEY, 2 * RECORD_ROWS) is None
    assert store.read(OTHER_KEY, 1) is not None


def test_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file")
    assert EmbeddingStore.open(folder, 1 << 20, FINGERPRINT, "model", ROW_SIZE) is None
