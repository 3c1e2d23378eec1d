"""Whether a model runs on GPUs or on the CPU, and why.

Whoever looks for GPUs loads torch, so it is asked last, and only where there may be some.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headrace.engine_proc.worker.model import read_json
from headrace.errors import ModelError
from headrace.vision import vision_family

NVIDIA = Path("/dev/nvidiactl")  # is there where the driver is
INTERPRET = "TRITON_INTERPRET"  # of Triton: kernels are interpreted, on the CPU, for tests


class Device(NamedTuple):
    """Where a model runs: "cpu" or "cuda"; and the reason."""

    name: str
    why: str


def choose(asked: str, why_not: str, find_gpus: Callable[[], str]) -> Device:
    """Say where `--device` has a model run.

    Args:
        why_not: why GPUs cannot run it, as it is asked for; "" is that they can.
        find_gpus: returns why there are none to run it; "" is that there are.

    Raises:
        ModelError: it was to be a GPU.
    """
    if asked == "cpu":
        return Device("cpu", "--device says so")
    reason = why_not or find_gpus()
    if not reason:
        return Device("cuda", "--device says so" if asked == "cuda" else "there is a GPU")
    if asked == "cuda":
        raise ModelError(f"--device cuda: {reason}; use --device cpu")
    return Device("cpu", reason)


def sees_whole_images(path: Path) -> bool:
    """Whether the tokens of an image see each other in the model of a path."""
    family = vision_family(read_json(path / "config.json")) if path.is_dir() else None
    return family is not None and family.sees_whole


def why_not_on_gpus(path: Path, *, quantization: str, dtype: str, kv_cache_dtype: str) -> str:
    """Return why GPUs cannot run one of our decoders with these flags; "" is that they can."""
    if sees_whole_images(path):
        return "in this model the tokens of an image see each other, which GPU workers cannot do"
    if quantization not in ("none", "fp8"):
        return f"--quantization {quantization} is for CPUs"
    own = "bfloat16" if dtype == "auto" else dtype
    if kv_cache_dtype not in ("auto", "fp8", own):
        return f"--kv-cache-dtype {kv_cache_dtype} is not that of the weights, {own}"
    return ""


def check_on_cpu(*, quantization: str, kv_cache_dtype: str, why: str) -> None:
    """Raise `ModelError` if a model that runs on the CPU, for the reason, needs a GPU to do so."""
    for flag, value in (("--quantization", quantization), ("--kv-cache-dtype", kv_cache_dtype)):
        if value == "fp8":
            raise ModelError(f"{flag} fp8 is for GPUs, and the model runs on the CPU: {why}")


def find_gpus(asked: str, num: int) -> str:
    """Return why this machine has not `num` GPUs for `--device asked`; "" is that it has."""
    if os.environ.get(INTERPRET) == "1":
        return "" if asked == "cuda" else f"{INTERPRET}=1 is for tests, which say --device cuda"
    if not NVIDIA.exists():
        return "this machine has no NVIDIA GPU"
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is missing"
    from headrace.engine_proc.worker.cuda.gpus import find

    return find(num)
