"""SigLIP towers in the core give the rows that transformers gives, and need no torch for it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from engine_configs import execution_config
from mmproj_twins import make_twins, write_mmproj
from tiny_vision import make_vision_folder, picture, prepare

from headrace.engine_proc.vision.siglip_patches import stretched
from headrace.engine_proc.vision.siglip_tower import SiglipTower
from headrace.engine_proc.vision.tower import Tower, load
from headrace.errors import ModelError
from headrace.model.vision_families import why_no_core_tower

FAMILIES = ("smolvlm", "idefics3", "gemma3", "lfm2_vl")
SIZES = [(80, 60), (40, 90), (64, 64)]


def opened(folder: Path, dtype: str = "float32") -> SiglipTower:
    return SiglipTower.open(execution_config(folder, image_row_size=64, dtype=dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    make_vision_folder(tmp_path, family)
    tower, modules = opened(tmp_path), Tower(load(tmp_path))
    images = [prepare(tmp_path, picture(seed, *size)) for seed, size in enumerate(SIZES)]
    found = tower.encode(images)
    for image, rows in zip(images, found, strict=True):
        (expected,) = modules.encode([image])
        assert rows.dtype == np.float32 and np.abs(expected).max() > 0.1
        np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-4)
        (alone,) = tower.encode([image])
        np.testing.assert_array_equal(alone, rows)  # batch mates change no bit


@pytest.mark.parametrize("family", ["smolvlm", "idefics3", "gemma3"])
def test_pixels_past_the_last_patch_are_not_seen(family: str, tmp_path: Path) -> None:
    twins = make_twins(tmp_path, family)
    enlarge(twins.folder)
    write_mmproj(twins.mmproj, twins.folder, family)
    modules, tower = Tower(load(twins.folder)), opened(twins.folder)
    config = execution_config(twins.decoder, image_row_size=64, mmproj=str(twins.mmproj))
    of_file = SiglipTower.open(config)
    for seed, size in enumerate(SIZES):
        image = prepare(twins.folder, picture(seed, *size))
        (expected,) = modules.encode([image])
        for own in (tower, of_file):
            np.testing.assert_allclose(own.encode([image])[0], expected, rtol=0, atol=1e-4)


def enlarge(folder: Path) -> None:
    """Make tiles larger by some pixels, which are no patch."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edge = config["vision_config"]["image_size"] + 4
    config["vision_config"]["image_size"] = edge
    path.write_text(json.dumps(config))
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    if "max_image_size" in settings:
        settings |= {"max_image_size": {"longest_edge": edge}, "size": {"longest_edge": 2 * edge}}
    else:
        settings["size"] = {"height": edge, "width": edge}
    path.write_text(json.dumps(settings))


@pytest.mark.parametrize("family", ["smolvlm", "gemma3"])
def test_rows_of_a_projector_file_are_the_folder_s(family: str, tmp_path: Path) -> None:
    twins = make_twins(tmp_path, family)
    image = prepare(twins.folder, picture(1))
    config = execution_config(twins.decoder, image_row_size=64, mmproj=str(twins.mmproj))
    tower = SiglipTower.open(config)
    (rows,), (expected,) = (one.encode([image]) for one in (tower, opened(twins.folder)))
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_by_default_rounding_is_that_of_weights(family: str, tmp_path: Path) -> None:
    make_vision_folder(tmp_path, family)
    images = [prepare(tmp_path, picture(1))]
    exact = opened(tmp_path).encode(images)
    for own, expected in zip(opened(tmp_path, "auto").encode(images), exact, strict=True):
        np.testing.assert_array_equal(own, expected)  # weights are fp32
    make_vision_folder(tmp_path, family).bfloat16().save_pretrained(tmp_path)
    (rounded,), (wide,) = (opened(tmp_path, dtype).encode(images) for dtype in ("auto", "float32"))
    (modules,) = Tower(load(tmp_path)).encode(images)
    np.testing.assert_allclose(wide, modules, rtol=0, atol=1e-4)
    assert 0 < np.abs(rounded - wide).max() < 0.05 * np.abs(wide).max()


@pytest.mark.parametrize(
    ("family", "published"),
    [
        ("gemma3", {"vision_tower.": "vision_tower.vision_model."}),
        ("lfm2_vl", {"model.vision_tower.": "model.vision_tower.vision_model."}),
        ("smolvlm", {"model.vision_model.": "vision_model.", "model.connector.": "connector."}),
    ],
)
def test_weights_may_have_older_names(
    family: str, published: dict[str, str], tmp_path: Path
) -> None:
    make_vision_folder(tmp_path, family)
    image = prepare(tmp_path, picture(1))
    expected = opened(tmp_path).encode([image])
    file = tmp_path / "model.safetensors"
    renamed = {}
    for name, tensor in safetensors.torch.load_file(file).items():
        prefix = next((p for p in published if name.startswith(p)), "")
        renamed[published.get(prefix, "") + name.removeprefix(prefix)] = tensor
    safetensors.torch.save_file(renamed, file, {"format": "pt"})
    np.testing.assert_array_equal(opened(tmp_path).encode([image]), expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.vision_model.embeddings.position_ids", torch.int64),
        ("model.text_model.layers.0.mlp.up_proj.qweight", torch.int32),
        ("model.text_model.mask", torch.bool),
    ],
)
def test_tensors_that_a_tower_has_not_may_be_of_any_type(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    make_vision_folder(tmp_path, "smolvlm")
    image, file = prepare(tmp_path, picture(1)), tmp_path / "model.safetensors"
    expected = opened(tmp_path).encode([image])
    more = {name: torch.zeros(1, 16, dtype=dtype)}
    safetensors.torch.save_file(safetensors.torch.load_file(file) | more, file, {"format": "pt"})
    np.testing.assert_array_equal(opened(tmp_path).encode([image]), expected)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "smolvlm")
    file = tmp_path / "model.safetensors"
    whole = safetensors.torch.load_file(file)
    for gone in ("connector.modality_projection.proj.weight", "vision_model.post_layernorm.bias"):
        safetensors.torch.save_file(
            {n: t for n, t in whole.items() if n != f"model.{gone}"}, file, {"format": "pt"}
        )
        with pytest.raises(ModelError, match=f"'{gone.partition('.')[2]}' .* is missing"):
            opened(tmp_path)


def test_errors_name_the_file_of_the_tower(tmp_path: Path) -> None:
    twins = make_twins(tmp_path, "smolvlm")
    write_mmproj(twins.mmproj, twins.folder, "smolvlm", tensors={"v.post_ln.bias": None})
    config = execution_config(twins.decoder, image_row_size=64, mmproj=str(twins.mmproj))
    with pytest.raises(ModelError, match=f"^{re.escape(str(twins.mmproj))}: "):
        SiglipTower.open(config)
    path = twins.folder / "config.json"
    wrong = json.loads(path.read_text())
    wrong["vision_config"]["num_attention_heads"] = 5
    path.write_text(json.dumps(wrong))
    with pytest.raises(ModelError, match=f"^{re.escape(str(twins.folder))}: .*num_attention_heads"):
        opened(twins.folder)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "gemma3")
    file = tmp_path / "model.safetensors"
    whole = safetensors.torch.load_file(file)
    name = "multi_modal_projector.mm_input_projection_weight"
    safetensors.torch.save_file(whole | {name: whole[name][:-1].clone()}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"'mm_input_.*' .* has shape \[31, 64\], not \[32, 64\]"):
        opened(tmp_path)


@pytest.mark.parametrize(("height", "width"), [(4, 4), (3, 7), (16, 16), (40, 24), (1, 30)])
def test_positions_are_stretched_as_by_torch(height: int, width: int) -> None:
    square = np.random.default_rng(0).normal(size=(16, 16, 5)).astype(np.float32)
    planes = torch.from_numpy(square).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(
        planes, (height, width), mode="bilinear", align_corners=False, antialias=True
    )
    found = stretched(square, height, width).reshape(height, width, 5)
    np.testing.assert_allclose(found, expected[0].permute(1, 2, 0).numpy(), atol=1e-5)


def test_tiles_of_another_size_or_padded_are_refused(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "smolvlm")
    tower, image = opened(tmp_path), prepare(tmp_path, picture(1))
    with pytest.raises(ValueError, match="not 3 x 32 x 32 without padding"):
        tower.encode([{"pixel_values": image["pixel_values"][..., :24]}])
    with pytest.raises(ValueError, match="not 3 x 32 x 32 without padding"):
        tower.encode([image | {"pixel_attention_mask": image["pixel_attention_mask"] * 0}])
    patches = {"pixel_values": np.zeros((1, 8192, 48), np.float32)}
    make_vision_folder(tmp_path, "lfm2_vl")
    with pytest.raises(ValueError, match="64 x 128 patches, of 4096 at most"):
        opened(tmp_path).encode([patches | {"spatial_shapes": np.array([[64, 128]])}])


@pytest.mark.parametrize(
    ("changes", "is_core"),
    [
        ({}, True),
        ({"image_size": 384, "patch_size": 14}, True),
        ({"image_size": 364, "patch_size": 14}, True),
        ({"image_size": 406, "patch_size": 14}, False),  # transformers' rounding skips positions
        ({"hidden_act": "quick_gelu"}, False),
    ],
)
def test_what_the_core_does_not_run_is_left_to_modules(
    changes: dict[str, Any], is_core: bool, tmp_path: Path
) -> None:
    make_vision_folder(tmp_path, "smolvlm")
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"] |= changes
    assert (why_no_core_tower(config) == "") == is_core
    side = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]
    assert (positions(side) == [*range(side)]) == (is_core or "hidden_act" in changes)


def positions(side: int) -> list[int]:
    """Return where transformers' Idefics3 finds the patches of a line to be."""
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    places = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    found = torch.bucketize(places.clamp(max=1 - 1e-6), boundaries, right=True)
    return [int(place) for place in found]


def test_rows_need_no_torch(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "gemma3")
    np.save(tmp_path / "pixels.npy", prepare(tmp_path, picture(1))["pixel_values"])
    code = (
        "import sys; sys.modules |= {'torch': None, 'transformers': None}; import numpy as np\n"
        "from engine_configs import execution_config\n"
        "from headrace.engine_proc.vision.main import open_tower\n"
        "folder = sys.argv[1]\n"
        "tower, _ = open_tower(execution_config(folder, image_row_size=64, device='cpu'))\n"
        "print(tower.encode([{'pixel_values': np.load(f'{folder}/pixels.npy')}])[0].shape)"
    )
    path = ":".join(sys.path)
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path, "PATH": ""},
    )
    assert run.stdout == "(4, 64)\n", run.stderr
