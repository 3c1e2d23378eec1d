"""A tower runs where its decoder does; on a GPU in the model's own type, many images at once."""

from pathlib import Path
from typing import Any

import pytest
from engine_configs import execution_config
from tiny_vision import make_vision_folder

from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.vision import placement
from headrace.engine_proc.vision.placement import (
    CALL_BYTES,
    CPU_NUMBERS,
    GPU_NUMBERS,
    Placement,
    placement_of,
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
def test_where_the_decoder_stays_on_the_cpu_so_does_the_tower(folder: Path, tmp_path: Path) -> None:
    make_vision_folder(tmp_path, "gemma3")
    assert placement_of(config_of(tmp_path)) == CPU
    assert placement_of(config_of(folder, quantization="int8")) == CPU


@pytest.mark.usefixtures("gpu")
def test_in_fp32_images_go_alone_and_have_twice_the_memory(folder: Path) -> None:
    assert placement_of(config_of(folder, dtype="float32")) == Placement(
        "cuda:0", "float32", 0, 2 * CALL_BYTES
    )


def test_where_kernels_are_interpreted_the_gpu_is_the_cpu(folder: Path) -> None:
    assert device_selection.is_interpreted()
    assert placement_of(config_of(folder, device="cuda")) == Placement("cpu", "auto", GPU_NUMBERS)


def test_what_nothing_can_run_is_the_workers_to_say(folder: Path, tmp_path: Path) -> None:
    assert placement_of(config_of(folder, quantization="fp8")) == CPU
    assert placement_of(config_of(tmp_path)) == CPU
