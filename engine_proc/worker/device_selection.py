"""Whether a model runs on GPUs or on the CPU, and why.

Whoever looks for GPUs loads torch, so it is asked last, and only where there may be some.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace.engine_proc.worker.models.compute_dtype import dtype_on_gpus
from headrace.engine_proc.worker.models.model import DecoderModel, read_json
from headrace.errors import ConfigError, ModelError
from headrace.model.vision_families import vision_family
from headrace.system.machine import VISIBLE, are_gpus_hidden, has_gpus

IN_MODULES = "transformers' modules do"  # why a model runs on the CPU
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


def place(
    path: Path,
    model: DecoderModel,
    asked: str,
    num_gpus: int,
    *,
    quantization: str,
    dtype: str,
    kv_cache_dtype: str,
    attention_backend: str,
) -> Device:
    """Return where one of our decoders runs, given `--device` and what flags ask for.

    Args:
        num_gpus: that are to run it together.

    Raises:
        ModelError: nowhere.
        ConfigError: on the CPU, where flags ask for what GPUs alone have.
    """
    flags = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    why_not = why_not_on_gpus(path, dtype=dtype_on_gpus(dtype, model, **flags), **flags)
    device = choose(asked, why_not, partial(find_gpus, asked, num_gpus))
    if device.name == "cpu":
        check_on_cpu(dtype=dtype, attention_backend=attention_backend, why=device.why, **flags)
    return device


def sees_whole_images(path: Path) -> bool:
    """Whether the tokens of an image see each other in the model of a path."""
    family = vision_family(read_json(path / "config.json")) if path.is_dir() else None
    return family is not None and family.sees_whole


def why_not_on_gpus(path: Path, *, quantization: str, dtype: str, kv_cache_dtype: str) -> str:
    """Return why GPUs cannot run one of our decoders with these flags; "" is that they can.

    Args:
        dtype: what they would compute it in.
    """
    if sees_whole_images(path):
        return "in this model the tokens of an image see each other, which GPU workers cannot do"
    if quantization not in ("none", "fp8"):
        return f"--quantization {quantization} is for CPUs"
    if kv_cache_dtype not in ("auto", "fp8", dtype):
        return f"--kv-cache-dtype {kv_cache_dtype} is not that of the weights, {dtype}"
    return ""


def beyond_kernels(error: ModelError) -> ModelError:
    """The error for a model that GPUs were to run, and that our own code cannot."""
    return ModelError(f"--device cuda runs what our own code knows: {error}; use --device cpu")


def check_on_cpu(
    *, quantization: str, dtype: str, kv_cache_dtype: str, attention_backend: str, why: str
) -> None:
    """Raise `ConfigError` if a model that runs on the CPU, for the reason, needs a GPU to do so."""
    for flag, value, for_gpus, instead in (
        ("--quantization", quantization, ("fp8",), "int8 or int8_weight_only"),
        ("--dtype", dtype, ("float16",), "bfloat16 or float32"),
        ("--kv-cache-dtype", kv_cache_dtype, ("fp8", "float16"), "bfloat16 or float32"),
        ("--attention-backend", attention_backend, ("triton", "flashinfer"), "auto"),
    ):
        if value in for_gpus:
            raise ConfigError(
                f"{flag} {value} is for GPUs, and the model runs on the CPU: {why}; use {instead}"
            )


def find_gpus(asked: str, num: int) -> str:
    """Return why this machine has not `num` GPUs for `--device asked`; "" is that it has."""
    if is_interpreted():
        return "" if asked == "cuda" else f"{INTERPRET}=1 is for tests, which say --device cuda"
    if are_gpus_hidden():
        return f"{VISIBLE} hides all GPUs"
    if not has_gpus():
        return "this machine has no NVIDIA GPU"
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is missing"
    from headrace.engine_proc.worker.cuda.kernels.gpu_requirements import find

    return find(num)


def is_interpreted() -> bool:
    """Whether kernels of GPUs run on the CPU."""
    return os.environ.get(INTERPRET) == "1"
