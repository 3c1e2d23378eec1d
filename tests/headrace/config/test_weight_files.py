"""Whether two machines have the same weights."""

from pathlib import Path

import pytest

from headrace.config.weight_files import PIECE_BYTES, sampled_digest, weight_bytes

NUM_BYTES = 8 << 20
CHANGED = NUM_BYTES // 1000  # a run of bytes that a sample meets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    for part in range(2):
        (tmp_path / f"model-{part}.safetensors").write_bytes(bytes(NUM_BYTES // 2))
    return tmp_path


def change(path: Path, start: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(data)


def test_a_copy_of_a_model_has_its_digest(folder: Path) -> None:
    before = sampled_digest(folder)
    copy = folder.rename(folder.with_name("other"))
    (copy / "README.md").write_text("x")
    assert sampled_digest(copy) == before
    assert weight_bytes(copy) == NUM_BYTES


@pytest.mark.parametrize("start", [0, 12345, NUM_BYTES // 2 - CHANGED - PIECE_BYTES])
def test_a_fine_tune_of_the_same_size_has_another_digest(folder: Path, start: int) -> None:
    before = sampled_digest(folder)
    change(folder / "model-1.safetensors", start, b"x" * (CHANGED + PIECE_BYTES))
    assert sampled_digest(folder) != before


def test_another_config_has_another_digest(folder: Path) -> None:
    before = sampled_digest(folder)
    (folder / "config.json").write_text('{"rope_theta": 5}')
    assert sampled_digest(folder) != before


def test_a_file_counts_with_its_size(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(PIECE_BYTES + 1))
    before = sampled_digest(path)
    path.write_bytes(bytes(PIECE_BYTES + 2))
    assert sampled_digest(path) != before
