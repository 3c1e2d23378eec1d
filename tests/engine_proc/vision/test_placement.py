"""A tower runs where its decoder does; on a GPU in the model's own type, many images at once."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_configs import execution_config
from tiny_vision import make_vision_folder

from headrace.config.model_card import read_model
from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.vision import placement
from headrace.engine_proc.vision.main import open_tower
from headrace.engine_proc.vision.placement import (
    CALL_BYTES,
    CPU_NUMBERS,
    GPU_NUMBERS,
    Placement,
    placement_of,
    why_in_modules,
)
from headrace.engine_proc.worker import device_selection

CPU = Placement("cpu", "float32", CPU_NUMBERS)
EXACT = Placement("cpu", "float32", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that GPUs can run."""
    folder = tmp_path_factory.mktemp("smolvlm")
    make_vision_folder(folder, "smolvlm")
    return folder


def config_of(folder: Path, **changes: Any) -> ExecutionConfig:
    return execution_config(folder, image_row_size=64, **changes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had a GPU."""
    monkeypatch.setattr(device_selection, "find_gpus", lambda _asked, _num: "")
    monkeypatch.setattr(placement, "is_interpreted", lambda: False)


def test_without_a_gpu_it_is_the_cpu_and_fp32(folder: Path) -> None:
    assert placement_of(config_of(folder, device="cpu")) == CPU
    assert placement_of(config_of(folder)) == CPU
    assert placement_of(config_of(folder, dtype="bfloat16")) == CPU
    assert placement_of(config_of(folder, dtype="float32")) == EXACT


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu_it_is_the_first_one(folder: Path) -> None:
    expected = Placement("cuda:0", "auto", GPU_NUMBERS, CALL_BYTES)
    assert placement_of(config_of(folder)) == expected
    assert placement_of(config_of(folder, device="cuda", tp=2)) == expected
    assert placement_of(config_of(folder, dtype="float16")).dtype == "float16"
    assert placement_of(config_of(folder, device="cpu")) == CPU


@pytest.mark.usefixtures("gpu")
def test_where_the_decoder_stays_on_the_cpu_so_does_the_tower(folder: Path) -> None:
    assert placement_of(config_of(folder, quantization="int8")) == CPU
    assert placement_of(config_of(folder, pp=2)) == CPU


@pytest.mark.usefixtures("gpu")
def test_in_fp32_images_go_alone_and_have_twice_the_memory(folder: Path) -> None:
    assert placement_of(config_of(folder, dtype="float32")) == Placement(
        "cuda:0", "float32", 0, 2 * CALL_BYTES
    )


def test_where_kernels_are_interpreted_the_gpu_is_the_cpu(folder: Path) -> None:
    assert device_selection.is_interpreted()
    assert placement_of(config_of(folder, device="cuda")) == Placement("cpu", "auto", GPU_NUMBERS)


@pytest.mark.usefixtures("gpu")
def test_a_tower_beside_a_decoder_on_a_gpu_is_in_modules(folder: Path) -> None:
    assert why_in_modules(config_of(folder)) == "the decoder runs on GPUs"
    assert why_in_modules(config_of(folder, device="cpu")) == ""
    assert why_in_modules(config_of(folder, quantization="int8")) == "", "its decoder is on the CPU"


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("gemma3", {"image_size": 70, "patch_size": 14}, "2 rows a side do not divide 5 patches"),
        (
            "gemma3",
            {"model_type": "clip_vision_model", "hidden_act": None},
            "its model_type is 'clip_vision_model', not 'siglip_vision_model'",
        ),
        (
            "lfm2_vl",
            {"model_type": "siglip_vision_model"},
            "its model_type is 'siglip_vision_model', not 'siglip2_vision_model'",
        ),
        ("gemma3", {"num_channels": 1}, "its num_channels is 1, not 3"),
        ("gemma3", {"hidden_act": "gelu"}, "its hidden_act is 'gelu', not 'gelu_pytorch_tanh'"),
        ("llava", {}, "the tower of a llava model is no SigLIP"),
    ],
)
def test_a_tower_that_the_core_cannot_take_is_in_modules(
    family: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    make_vision_folder(tmp_path, family)
    change(tmp_path, changes)
    assert why_in_modules(config_of(tmp_path)) == why
    assert not read_model(tmp_path).has_core_tower


def change(folder: Path, changes: dict[str, Any]) -> None:
    """Change the config of a tower."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] |= changes
    path.write_text(json.dumps(config))


def test_made_up_weights_are_those_of_modules(tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "gemma3")
    assert "makes its weights up" in why_in_modules(config_of(tmp_path, load_format="dummy"))
    assert why_in_modules(config_of(tmp_path)) == ""


def test_a_gemma_whose_tower_the_core_cannot_take_is_encoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its five patches a side become two rows, of the first four."""
    make_vision_folder(tmp_path, "gemma3", image_size=70)
    assert read_model(tmp_path).image_run == 4
    pixels = np.random.default_rng(0).normal(size=(1, 3, 70, 70))
    image = {"pixel_values": pixels.astype(np.float32)}
    with caplog.at_level(logging.INFO):
        tower, _ = open_tower(config_of(tmp_path, device="cpu"))
    (rows,) = tower.encode([image])
    module = transformers.AutoModel.from_pretrained(tmp_path, dtype="float32").eval()
    features = module.get_image_features(torch.from_numpy(image["pixel_values"]))
    np.testing.assert_array_equal(rows, features.pooler_output.detach().numpy().reshape(4, 64))
    assert "modules: 2 rows a side do not divide 5 patches" in caplog.text


def test_what_nothing_can_run_is_the_workers_to_say(folder: Path, tmp_path: Path) -> None:
    assert placement_of(config_of(folder, quantization="fp8")) == CPU
    assert placement_of(config_of(tmp_path)) == CPU
