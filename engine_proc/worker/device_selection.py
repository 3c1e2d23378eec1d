"""Chooses GPUs or the CPU for a model, with the reason.

The search for GPUs imports torch, so it comes last, and only on machines that may have some.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace import extras
from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.worker.models.compute_dtype import dtype_on_gpus
from headrace.engine_proc.worker.models.model import DecoderModel
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, NormPlacement
from headrace.engine_proc.worker.stages.stage import stages
from headrace.errors import ConfigError, ModelError
from headrace.system.machine import VISIBLE, are_gpus_hidden, has_gpus

NAMES = {"cpu": "the CPU", "cuda": "GPUs"}  # of devices, for people
INTERPRET = "TRITON_INTERPRET"  # of Triton: kernels are interpreted, on the CPU, for tests


class Device(NamedTuple):
    """The device of a model, "cpu" or "cuda", and the reason."""

    name: str
    why: str


def choose(asked: str, why_not: str, find_gpus: Callable[[], str]) -> Device:
    """Return the device that `--device` resolves to.

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


def place(config: ExecutionConfig, model: DecoderModel) -> Device:
    """Return where one of our decoders runs.

    Raises:
        ModelError: it cannot run on the device that --device names.
        ConfigError: the flags ask for a feature that it has not there.
    """
    if lack := lacking_kernel(model.spec):
        why_not = f"a {model.spec.architecture} model has {lack}, which GPU workers cannot run"
    else:
        why_not = why_not_on_gpus(config, dtype_on_gpus(config, model))
    device = choose(config.device, why_not, partial(find_gpus, config.device, config.tp))
    if device.name == "cpu":
        check_on_cpu(config, device.why)
        check_stages(config, model.spec)
    return device


def place_modules(config: ExecutionConfig) -> Device:
    """Return where transformers' modules run a model.

    Raises:
        ModelError: it cannot run on the device that --device names.
        ConfigError: the flags ask for what transformers' modules have not, there.
    """
    why_not = ""
    if config.pp > 1:
        raise ConfigError(f"--pp {config.pp}: transformers' modules have no stages; leave it out")
    if config.tp > 1:
        why_not = f"transformers' modules run on one GPU, not on --tp {config.tp}"
    device = choose(config.device, why_not, partial(find_gpus, config.device, config.tp))
    if device.name == "cpu":
        check_on_cpu(config, device.why)
    elif config.kv_cache_dtype == "fp8" or config.attention_backend != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} --attention-backend "
            f"{config.attention_backend}: transformers' modules have none of these; leave them out"
        )
    return device


def falls_to_modules(config: ExecutionConfig, model: DecoderModel) -> bool:
    """Whether transformers' modules run one of our decoders.

    They do where `--device` says GPUs, and these lack a kernel. They have no states and no images.
    """
    return (
        config.device == "cuda"
        and lacking_kernel(model.spec) != ""
        and model.spec.state_numbers == 0
        and config.image_row_size == 0
        and config.model_impl != "headrace"
        and Path(config.model_path).is_dir()
    )


def lacking_kernel(spec: DecoderSpec) -> str:
    """Return what a decoder has that no kernel of GPUs computes; "" is nothing."""
    has_more = spec.per_layer is not None or spec.altup is not None or spec.layer_scale
    lacks = {
        "windows of latent attention": spec.latent is not None
        and any(own.window is not None for own in spec.layers),
        "tokens that see their whole text": spec.encoder is not None,
        "norms around its layers of another kind than Gemma's": has_more
        and (spec.placement != NormPlacement.PRE_POST or spec.norm_bias),
        "several residuals without embeddings for each layer": spec.altup is not None
        and (spec.per_layer is None or spec.layer_scale),
    }
    return next((what for what, is_there in lacks.items() if is_there), "")


def why_not_on_gpus(config: ExecutionConfig, dtype: str) -> str:
    """Return why GPUs cannot run one of our decoders with these flags; "" where they can.

    Args:
        dtype: the type that GPUs would compute in.
    """
    if config.pp > 1:
        return f"--pp {config.pp} is for CPUs"
    if config.quantization not in ("none", "fp8"):
        return f"--quantization {config.quantization} is for CPUs"
    if config.kv_cache_dtype not in ("auto", "fp8", dtype):
        return f"--kv-cache-dtype {config.kv_cache_dtype} is not that of the weights, {dtype}"
    return ""


def check_on_cpu(config: ExecutionConfig, why: str) -> None:
    """Check the flags of a model that runs on the CPU.

    Args:
        why: the reason that it runs there, for the error's text.

    Raises:
        ConfigError: a flag asks for a feature of GPUs.
    """
    for flag, value, for_gpus, instead in (
        ("--quantization", config.quantization, ("fp8",), "int8 or int8_weight_only"),
        ("--dtype", config.dtype, ("float16",), "bfloat16 or float32"),
        ("--kv-cache-dtype", config.kv_cache_dtype, ("fp8", "float16"), "bfloat16 or float32"),
        ("--attention-backend", config.attention_backend, ("triton", "flashinfer"), "auto"),
    ):
        if value in for_gpus:
            raise ConfigError(
                f"{flag} {value} is for GPUs, and the model runs on the CPU: {why}; use {instead}"
            )


def check_stages(config: ExecutionConfig, spec: DecoderSpec) -> None:
    """Check that a decoder on the CPU has as many stages as the flags ask for.

    Raises:
        ModelError: it cannot be cut into so many.
        ConfigError: it takes images.
    """
    if config.pp == 1:
        return
    if config.image_row_size:
        raise ConfigError(f"--pp {config.pp}: this model takes images; give --max-images 0")
    stages(spec, config.pp)


def find_gpus(asked: str, num: int) -> str:
    """Return why this machine has not `num` GPUs for `--device asked`; "" is that it has."""
    if is_interpreted():
        return "" if asked == "cuda" else f"{INTERPRET}=1 is for tests, which say --device cuda"
    if are_gpus_hidden():
        return f"{VISIBLE} hides all GPUs"
    if not has_gpus():
        return "this machine has no NVIDIA GPU"
    lack = extras.missing("gpu")
    if lack:
        return lack
    from headrace.engine_proc.worker.cuda.kernels.gpu_requirements import find

    return find(num)


def is_interpreted() -> bool:
    """Whether kernels of GPUs run on the CPU."""
    return os.environ.get(INTERPRET) == "1"
