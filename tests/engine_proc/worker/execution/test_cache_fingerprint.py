"""Pages are found again only by what computes the same ones."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import PIL
import pytest
from engine_configs import execution_config

from headrace.engine_proc.worker.execution import cache_fingerprint
from headrace.engine_proc.worker.execution.cache_fingerprint import (
    OF_IMAGES,
    content_digest,
    content_fingerprint,
)

ROW_SIZE = 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"a decoder and a tower")
    (tmp_path / "mmproj.gguf").write_bytes(b"a tower")
    return tmp_path


def fingerprint_in(folder: Path, row_size: int = ROW_SIZE, **changes: Any) -> str:
    config = execution_config(folder / "model", image_row_size=row_size, **changes)
    return content_fingerprint(config, content_digest(config))


def test_pages_of_another_tower_are_not_found(folder: Path) -> None:
    mmproj = str(folder / "mmproj.gguf")
    found = [fingerprint_in(folder), fingerprint_in(folder, mmproj=mmproj)]
    found.append(fingerprint_in(folder, mmproj=mmproj, dtype="float32"))
    (folder / "mmproj.gguf").write_bytes(b"another tower")
    found.append(fingerprint_in(folder, mmproj=mmproj))
    (folder / "model" / "preprocessor_config.json").write_text("{}")
    found.append(fingerprint_in(folder, mmproj=mmproj))
    assert len(set(found)) == len(found)
    assert fingerprint_in(folder, mmproj=mmproj) == found[-1]


@pytest.mark.parametrize("library", ["PIL", *OF_IMAGES])
def test_pages_of_images_by_other_libraries_are_not_found(
    library: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_images, of_texts = fingerprint_in(folder), fingerprint_in(folder, 0)
    newer = {library: "99.0"}
    monkeypatch.setattr(cache_fingerprint, "version", lambda name: newer.get(name, version(name)))
    monkeypatch.setattr(PIL, "__version__", newer.get("PIL", PIL.__version__))
    assert fingerprint_in(folder) != of_images
    assert fingerprint_in(folder, 0) == of_texts


def test_a_library_of_images_that_is_missing_is_named_by_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    with_all = fingerprint_in(folder)
    monkeypatch.setattr(cache_fingerprint, "version", missing)
    monkeypatch.setattr(cache_fingerprint, "is_installed", lambda _: False)
    assert fingerprint_in(folder) != with_all
