"""The tower gives the rows that transformers gives, the same bits whatever it encoded before."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tiny_vision import IMAGE_PROCESSORS, make_vision_folder, picture, prepare

from headrace.engine_proc.vision.tower import Tower
from headrace.errors import ModelError

SIZES = [(80, 60), (40, 90), (64, 64), (80, 60)]


@pytest.mark.parametrize("family", IMAGE_PROCESSORS)
def test_rows_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_vision_folder(tmp_path, family)
    tower = Tower(tmp_path)
    images = [prepare(tmp_path, picture(seed, *size)) for seed, size in enumerate(SIZES)]
    found = [tower.encode(image) for image in images]
    for image, rows in zip(images, found, strict=True):
        expected = reference(model, image)
        assert rows.shape == expected.shape and rows.dtype == np.float32
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(rows, expected, atol=1e-4)
        np.testing.assert_array_equal(tower.encode(image), rows)
    assert not np.allclose(found[0], found[-1], atol=1e-2)  # another picture, same size


def test_tiles_need_no_batch_and_masks_may_be_bytes(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "smolvlm")
    tower = Tower(tmp_path)
    image = prepare(tmp_path, picture(1))
    bare = {
        "pixel_values": image["pixel_values"][0],
        "pixel_attention_mask": image["pixel_attention_mask"][0].astype(np.uint8),
    }
    np.testing.assert_array_equal(tower.encode(bare), tower.encode(image))


def reference(model: Any, image: dict[str, Any]) -> Any:
    """Return what the whole model makes of one image."""
    names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    tensors = {name: torch.from_numpy(image[name]) for name in names if name in image}
    with torch.inference_mode():
        features = model.get_image_features(**tensors).pooler_output
    return torch.cat(list(features)).flatten(0, -2).numpy()


def test_nothing_of_the_decoder_is_loaded(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "smolvlm")
    names = [name for name, _ in Tower(tmp_path).module.text_model.named_parameters()]
    assert not any("layers" in name for name in names)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "smolvlm")
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del weights["model.connector.modality_projection.proj.weight"]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"'connector\.modality_projection.*' is missing"):
        Tower(tmp_path)


def test_a_model_of_text_has_no_tower(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="a llama model takes no images"):
        Tower(tmp_path)
