"""Safetensors files: read as they are, refused by name when broken."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.engine_proc.worker.checkpoints.safetensors import open_folder, read_file
from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.errors import ModelError


def write(path: Path, header: Any, body: bytes = b"\0" * 64) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)
    return path


def entry(dtype: str = "F32", shape: Any = (4, 4), data_offsets: Any = (0, 64)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_those_that_were_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype)}
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = open_folder(tmp_path)
    assert tensors.keys() == saved.keys()
    for name, tensor in saved.items():
        np.testing.assert_array_equal(tensors[name].to_float32(), tensor.float().numpy())


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    tensors = open_folder(tmp_path)
    assert tensors["a"].shape == (2,)
    assert tensors["b"].format == Format.F32


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {"total_size": 20}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "one.safetensors"})
    with pytest.raises(ModelError, match=r"one\.safetensors: missing"):
        open_folder(tmp_path)


def test_a_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    save_file({"b": torch.ones(2)}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors"})
    with pytest.raises(ModelError, match=r"one\.safetensors: lacks 'a'"):
        open_folder(tmp_path)


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (entry(dtype="F8_E4M3"), "'w' is stored as F8_E4M3; supported are F32, F16, BF16"),
        (entry(data_offsets=(0, 60)), "'w' has offsets 0 to 60, but F32 .* takes 64 bytes"),
        (entry(data_offsets=(-4, 60)), "'w' has offsets -4 to 60"),
        (entry(data_offsets=(64, 128)), "truncated: tensor 'w' ends at byte"),
        (entry(shape=(-4, -4)), "'w' has offsets"),
        (entry(shape="4x4"), "'w' has a broken header"),
        ({"dtype": "F32"}, "'w' has a broken header"),
    ],
)
def test_a_broken_entry_names_file_and_tensor(
    broken: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.safetensors", {"w": broken})
    with pytest.raises(ModelError, match=complaint) as refused:
        read_file(path)
    assert str(path) in str(refused.value)


def test_a_broken_header_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content in (b"", b"abc", b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            read_file(path)
    for header in (b"not json", [1, 2], b"\xff\xff"):
        with pytest.raises(ModelError, match="not a JSON object"):
            read_file(write(path, header))


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(3, 5), "b": torch.randn(7)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            read_file(path)


@pytest.mark.parametrize(
    "header", [b'{"a\xff": {}}', b'{"a": {"dtype": "\xff"}}', b'{"a": ' + b"[" * 5000]
)
def test_a_header_that_is_no_text_or_too_deep_is_named(header: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", header)
    with pytest.raises(ModelError, match=r"model\.safetensors: "):
        open_folder(tmp_path)
    path.unlink()
    (tmp_path / "model.safetensors.index.json").write_bytes(header)
    with pytest.raises(ModelError, match=r"index\.json: cannot be read"):
        open_folder(tmp_path)
