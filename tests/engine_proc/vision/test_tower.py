"""The tower gives the rows that transformers gives, of one image and of several in one call."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tiny_vision import IMAGE_PROCESSORS, SIZED, make_vision_folder, picture, prepare

from headrace.engine_proc.vision import tower as module
from headrace.engine_proc.vision.tower import BY_IMAGE, Floats, Tensors, Tower, load, move_to_gpu
from headrace.errors import ConfigError, ModelError

SIZES = [(80, 60), (40, 90), (64, 64), (80, 60)]
RELATIVES = ("idefics3", "qwen3_vl_moe", "glm4v_moe", "gemma4_whole")  # with another one's tower
TOWERS = [family for family in IMAGE_PROCESSORS if family not in RELATIVES]


def alone(tower: Tower, image: Tensors) -> Floats:
    """Return the rows of an image that is encoded alone."""
    (rows,) = tower.encode([image])
    return rows


@pytest.mark.parametrize("family", IMAGE_PROCESSORS)
def test_rows_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = make_vision_folder(tmp_path, family)
    tower = Tower(load(tmp_path))
    images = [prepare(tmp_path, picture(seed, *size)) for seed, size in enumerate(SIZES)]
    found = [alone(tower, image) for image in images]
    for image, rows in zip(images, found, strict=True):
        expected = reference(model, image)
        assert rows.shape == expected.shape and rows.dtype == np.float32
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(rows, expected, atol=1e-4)
        np.testing.assert_array_equal(alone(tower, image), rows)
    assert not np.allclose(found[0], found[-1], atol=1e-2)  # another picture, same size


def test_weights_of_a_tower_can_be_made_up(tmp_path: Path) -> None:
    """As those of its decoder can, for a folder without any."""
    make_vision_folder(tmp_path, "llava")
    real = alone(Tower(load(tmp_path)), prepare(tmp_path, picture(0)))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    made_up = [
        alone(Tower(load(tmp_path, is_dummy=True)), prepare(tmp_path, picture(0))) for _ in range(2)
    ]
    np.testing.assert_array_equal(*made_up)
    assert made_up[0].shape == real.shape


@pytest.mark.parametrize("family", TOWERS)
def test_rows_of_several_images_are_those_of_each(family: str, tmp_path: Path) -> None:
    make_vision_folder(tmp_path, family)
    tower = Tower(load(tmp_path))
    sizes = SIZES[:1] * len(SIZES) if family in SIZED else SIZES  # those of one size go together
    images = [prepare(tmp_path, picture(seed, *size)) for seed, size in enumerate(sizes)]
    expected = [alone(tower, image) for image in images]
    for order in ([0, 1, 2, 3], [3, 1], [2]):
        found = tower.encode([images[place] for place in order])
        assert [rows.shape for rows in found] == [expected[place].shape for place in order]
        for rows, place in zip(found, order, strict=True):
            np.testing.assert_allclose(rows, expected[place], rtol=0, atol=2e-5)


def test_images_of_other_shapes_do_not_go_together(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "llava")
    image = prepare(tmp_path, picture(1))
    wide = {"pixel_values": image["pixel_values"].repeat(2, axis=3)}
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        Tower(load(tmp_path)).encode([image, wide])


@pytest.mark.parametrize("family", TOWERS)
def test_tower_in_model_dtype_differs_by_rounding_only(family: str, tmp_path: Path) -> None:
    make_vision_folder(tmp_path, family).bfloat16().save_pretrained(tmp_path)
    own = Tower(load(tmp_path, "auto"))
    assert own.module.dtype == torch.bfloat16
    images = [prepare(tmp_path, picture(seed)) for seed in range(2)]
    wide = Tower(load(tmp_path)).encode(images)
    for rows, expected in zip(own.encode(images), wide, strict=True):
        assert rows.dtype == np.float32
        assert 0 < np.abs(rows - expected).max() < 0.05 * np.abs(expected).max()


class Gpu:
    """What `move_to_gpu` wants of torch, of a GPU of 100 GiB of which there are so many left."""

    def __init__(self, free_gib: int) -> None:
        self.free = free_gib << 30
        self.share = 1.0
        self.cuda = self.backends = self.cudnn = self
        self.uint8 = torch.uint8
        self.total_memory = 100 << 30
        self.held = 0

    def to(self, _device: str) -> None:
        self.held += 1 << 30  # a tower's weights

    def memory_reserved(self, _device: str) -> int:
        return self.held

    def get_device_properties(self, _device: str) -> "Gpu":
        return self

    def set_per_process_memory_fraction(self, share: float, _device: str) -> None:
        self.share = share

    def empty(self, num_bytes: int, *, dtype: Any, device: str) -> None:
        self.held += num_bytes
        if self.held > min(self.free, self.share * self.total_memory):
            raise RuntimeError("CUDA error: out of memory")


def test_gpu_calls_keep_to_the_memory_taken_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(free_gib=6)
    monkeypatch.setattr(module, "torch", gpu)
    has = move_to_gpu(gpu, "cuda:0", 4 << 30)
    assert gpu.held == 5 << 30
    assert gpu.held < has < gpu.held + (1 << 28)
    assert gpu.share == has / (100 << 30)
    full = Gpu(free_gib=4)
    monkeypatch.setattr(module, "torch", full)
    with pytest.raises(ConfigError, match="the GPU has no room for the vision tower: end others"):
        move_to_gpu(full, "cuda:0", 4 << 30)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("family", IMAGE_PROCESSORS)
def test_rows_from_a_gpu_are_those_from_the_cpu(family: str, tmp_path: Path) -> None:
    make_vision_folder(tmp_path, family)
    images = [prepare(tmp_path, picture(seed, *size)) for seed, size in enumerate(SIZES)]
    expected = [alone(Tower(load(tmp_path)), image) for image in images]
    model = load(tmp_path)
    assert move_to_gpu(model, "cuda:0", 1 << 30) > 1 << 30
    tower = Tower(model, "cuda:0")
    for rows, own in zip(tower.encode(images), expected, strict=True):
        np.testing.assert_allclose(rows, own, atol=1e-3)
    for image in images:
        np.testing.assert_array_equal(alone(tower, image), alone(tower, image))
    tower.check()


def test_tiles_need_no_batch_and_masks_may_be_bytes(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "smolvlm")
    tower = Tower(load(tmp_path))
    image = prepare(tmp_path, picture(1))
    bare = {
        "pixel_values": image["pixel_values"][0],
        "pixel_attention_mask": image["pixel_attention_mask"][0].astype(np.uint8),
    }
    np.testing.assert_array_equal(alone(tower, bare), alone(tower, image))


def reference(model: Any, image: dict[str, Any]) -> Any:
    """Return what the whole model makes of one image."""
    names = ("pixel_values", "pixel_attention_mask", "spatial_shapes", *BY_IMAGE)
    tensors = {name: torch.from_numpy(image[name]) for name in names if name in image}
    with torch.inference_mode():
        features = model.get_image_features(**tensors)
    parts = [features.pooler_output, *(getattr(features, "deepstack_features", None) or [])]
    return torch.cat([torch.cat(list(part)).flatten(0, -2) for part in parts], -1).numpy()


def test_nothing_of_the_decoder_is_loaded(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "smolvlm")
    names = [name for name, _ in load(tmp_path).text_model.named_parameters()]
    assert not any("layers" in name for name in names)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "smolvlm")
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del weights["model.connector.modality_projection.proj.weight"]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"'connector\.modality_projection.*' is missing"):
        load(tmp_path)


def test_a_model_of_text_has_no_tower(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="a llama model takes no images"):
        load(tmp_path)
