"""Predicts the executor that `loader.py` will choose for a model, from the heads of its files."""

from pathlib import Path
from typing import NamedTuple

from headrace import extras
from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.worker.device_selection import (
    NAMES,
    falls_to_modules,
    lacking_kernel,
    place,
    place_modules,
)
from headrace.engine_proc.worker.models.model import DecoderModel, NotLowered, open_model
from headrace.engine_proc.worker.stages.stage import stages
from headrace.errors import ModelError

CORE, KERNELS, TRANSFORMERS = "the C++ core", "kernels on GPUs", "transformers"


class BackendChoice(NamedTuple):
    """An executor, and the reason."""

    executor: str
    why: str
    on_gpus: bool = False


def foresee(config: ExecutionConfig) -> BackendChoice:
    """Return the executor that will run a model. No torch is loaded without a GPU.

    Raises:
        ModelError: none can. Limits of transformers are found only when it loads the model.
        ConfigError: the flags ask for a feature of GPUs, and the model runs on the CPU; or the
            packages that run it are missing.
    """
    path = Path(config.model_path)
    found, model = chosen(config)
    if model is not None and falls_to_modules(config, model):
        found = BackendChoice(TRANSFORMERS, f"no kernel of GPUs has {lacking_kernel(model.spec)}")
    elif model is not None:
        where = place(config, model)
        executor = CORE if where.name == "cpu" else KERNELS
        return BackendChoice(executor, f"{found.why}; {where.why}", where.name == "cuda")
    if config.quantization != "none":
        raise ModelError(
            f"{path}: runs in transformers ({found.why}), which cannot do --quantization "
            f"{config.quantization}"
        )
    device = place_modules(config)
    extras.require("modules", f"{path}: runs in transformers ({found.why})")
    why = f"{found.why}; on {NAMES[device.name]}: {device.why}"
    return BackendChoice(found.executor, why, device.name == "cuda")


def foresee_stages(config: ExecutionConfig) -> list[range]:
    """Return the layers of each stage.

    Raises:
        ModelError: the model has no stages.
    """
    path, overrides = Path(config.model_path), config.hf_overrides
    spec = open_model(path, config.load_format, hf_overrides=overrides).spec
    return [stage.layers for stage in stages(spec, config.pp)]


def chosen(config: ExecutionConfig) -> tuple[BackendChoice, DecoderModel | None]:
    """Return the resolved `--model-impl`, and the model if it is one of our own decoders."""
    path, impl = Path(config.model_path), config.model_impl
    if impl == "transformers":
        if not path.is_dir():
            raise ModelError(f"{path}: only folders can be run with --model-impl transformers")
        return BackendChoice(TRANSFORMERS, "--model-impl says so"), None
    try:
        model = open_model(path, config.load_format, hf_overrides=config.hf_overrides)
    except NotLowered as error:
        if impl == "headrace" or config.hf_overrides is not None:
            raise
        return BackendChoice(TRANSFORMERS, str(error).removeprefix(f"{path}: ")), None
    return BackendChoice(CORE, f"it runs {model.spec.architecture} models"), model
