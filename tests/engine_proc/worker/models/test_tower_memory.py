"""What a vision tower takes of memory is known before it is loaded, and leaves the rest less."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_configs import execution_config
from mmproj_twins import make_twins
from safetensors.numpy import load_file, save_file
from tiny_vision import FAMILIES, make_vision_folder

from headrace.engine_proc.vision.tower import load
from headrace.engine_proc.worker import loader
from headrace.engine_proc.worker.models.tower_memory import TowerMemory, tower_memory

DECODERS = ("language_model", "text_model")


def num_parameters(module: Any) -> int:
    """Return the numbers of a tower and its projector."""
    return sum(
        own.numel()
        for name, own in module.named_parameters()
        if name.partition(".")[0] not in DECODERS
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_of_a_folder_s_tower_is_that_of_modules(family: str, tmp_path: Path) -> None:
    make_vision_folder(tmp_path, family)
    found = tower_memory(execution_config(tmp_path, image_row_size=64))
    assert found.held_bytes == found.stored_bytes == 4 * num_parameters(load(tmp_path))


def test_matrices_of_bf16_stay_so_in_the_core(tmp_path: Path) -> None:
    wide: dict[str, int] = {}
    for family in ("smolvlm", "llava"):
        folder = tmp_path / family
        make_vision_folder(folder, family).bfloat16().save_pretrained(folder)
        found = tower_memory(execution_config(folder, image_row_size=64))
        wide[family] = found.held_bytes - found.stored_bytes
        assert 2 * found.stored_bytes == 4 * num_parameters(load(folder))
    assert 0 < wide["smolvlm"] < wide["llava"]


def test_memory_of_a_projector_file_is_that_of_modules(tmp_path: Path) -> None:
    twins = make_twins(tmp_path, "smolvlm")
    config = execution_config(twins.decoder, image_row_size=64, mmproj=str(twins.mmproj))
    assert tower_memory(config) == TowerMemory(0, 4 * num_parameters(load(twins.folder)))


def test_a_tower_leaves_less_for_weights_and_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_vision_folder(tmp_path, "llava")
    monkeypatch.setattr(loader, "memory_limit", lambda: 1 << 30)
    config = execution_config(tmp_path, image_row_size=64, reserved_bytes=100)
    tower = tower_memory(config).held_bytes
    assert loader.free_memory(config) == (1 << 30) - 100 - tower
    text = execution_config(tmp_path, reserved_bytes=100)
    assert (tower_memory(text), loader.free_memory(text)) == (TowerMemory(), (1 << 30) - 100)


def test_the_core_does_not_load_the_head_of_siglip(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "gemma3")
    before = tower_memory(execution_config(tmp_path, image_row_size=64))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.vision_tower.vision_model.head.probe"] = np.zeros((1, 1, 8), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    after = tower_memory(execution_config(tmp_path, image_row_size=64))
    assert after == TowerMemory(before.stored_bytes + 4 * 8, before.held_bytes)
