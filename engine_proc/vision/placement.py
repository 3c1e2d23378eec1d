"""Chooses what runs the vision tower, and its device, dtype and batch size.

The tower runs where the decoder runs: on its first GPU, or on the CPU. Torch is imported only to
find GPUs.
"""

from dataclasses import dataclass
from pathlib import Path

from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.worker.backend_selection import KERNELS, foresee
from headrace.engine_proc.worker.device_selection import is_interpreted
from headrace.engine_proc.worker.models.model import config_with_images
from headrace.errors import ConfigError, ModelError
from headrace.model.vision_families import why_no_core_tower

CPU_NUMBERS = 256 * 1176  # as many patches of Qwen2.5-VL's: more gain 10 %, and wait for all
GPU_NUMBERS = 1 << 25  # 64 images of LLaVA's, 28,500 of those patches
# Of a GPU, for a call: twice of what so many take in 16 bits. On a CPU, in 32, a call of LLaVA's
# takes 120 bytes for each number, one of Qwen2.5-VL's 90.
CALL_BYTES = 4 << 30


@dataclass(frozen=True)
class Placement:
    """The device, dtype and batch size of a tower."""

    device: str  # as torch names it
    dtype: str  # as `tower.load` takes it
    max_numbers: int  # as in `TowerReady`
    call_bytes: int = 0  # of a GPU, for calls


def placement_of(config: ExecutionConfig) -> Placement:
    """Choose. With `--dtype float32` each image goes alone, and its rows depend on nothing else."""
    is_exact = config.dtype == "float32"
    if not runs_on_gpus(config):
        return Placement("cpu", "float32", 0 if is_exact else CPU_NUMBERS)
    max_numbers = 0 if is_exact else GPU_NUMBERS
    if is_interpreted():
        return Placement("cpu", config.dtype, max_numbers)
    return Placement("cuda:0", config.dtype, max_numbers, CALL_BYTES * (2 if is_exact else 1))


def why_in_modules(config: ExecutionConfig) -> str:
    """Return why transformers' modules run the tower; "" is that the C++ core does.

    Raises:
        ModelError: the model's config cannot be read.
    """
    if runs_on_gpus(config):
        return "the decoder runs on GPUs"
    if config.load_format == "dummy":
        return "--load-format dummy makes its weights up"
    return why_no_core_tower(config_with_images(Path(config.model_path), config.mmproj))


def runs_on_gpus(config: ExecutionConfig) -> bool:
    """Whether the decoder runs on GPUs. If no device can run it, its worker reports the reason."""
    try:
        prognosis = foresee(config)
    except (ConfigError, ModelError):
        return False
    return prognosis.executor == KERNELS
