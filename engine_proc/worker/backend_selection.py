"""Predicts the executor that `loader.py` will choose for a model, from the heads of its files."""

from pathlib import Path
from typing import NamedTuple

from headrace.config.config import ServerConfig, VisionConfig
from headrace.engine_proc.worker.device_selection import (
    IN_MODULES,
    beyond_kernels,
    check_on_cpu,
    place,
)
from headrace.engine_proc.worker.models.model import (
    NO_DUMMY,
    DecoderModel,
    NotLowered,
    open_model,
    read_json,
)
from headrace.errors import ModelError
from headrace.model.pooling import PoolingKind, read_pooling

CORE, KERNELS, TRANSFORMERS = "the C++ core", "kernels on GPUs", "transformers"


class BackendChoice(NamedTuple):
    """An executor, and the reason."""

    executor: str
    why: str


def foresee(
    path: Path,
    *,
    impl: str,
    load_format: str,
    quantization: str,
    device: str = "cpu",
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    attention_backend: str = "auto",
    tp: int = 1,
) -> BackendChoice:
    """Say what will run a model with the flags of these names. No torch is loaded without a GPU.

    Raises:
        ModelError: nothing will. What transformers cannot run it says only when it tries.
    """
    try:
        found, model = chosen(path, "headrace" if device == "cuda" else impl, load_format)
    except NotLowered as error:
        raise beyond_kernels(error) if device == "cuda" else error from None
    flags = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "attention_backend": attention_backend,
    }
    if model is not None:
        where = place(path, model, device, tp, quantization=quantization, **flags)
        executor = CORE if where.name == "cpu" else KERNELS
        return BackendChoice(executor, f"{found.why}; {where.why}")
    if load_format == "dummy":
        raise ModelError(NO_DUMMY.format(path=path))
    if quantization != "none":
        raise ModelError(
            f"{path}: runs in transformers ({found.why}), which cannot do --quantization "
            f"{quantization}"
        )
    check_on_cpu(quantization=quantization, why=IN_MODULES, **flags)
    return found


def foresee_with(config: ServerConfig | VisionConfig, path: Path) -> BackendChoice:
    """Say what will run a model with a configuration's flags.

    Raises:
        ModelError: as `foresee`.
    """
    return foresee(
        path,
        impl=config.model_impl,
        load_format=config.load_format,
        quantization=config.quantization,
        device=config.device,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        attention_backend=config.attention_backend,
        tp=config.tp,
    )


def chosen(path: Path, impl: str, load_format: str) -> tuple[BackendChoice, DecoderModel | None]:
    """Say what `--model-impl` comes to; and the model, if it is one of our own decoders."""
    pooling = read_pooling(path, read_json(path / "config.json")) if path.is_dir() else None
    if pooling is not None and pooling.kind is PoolingKind.HEAD and impl != "headrace":
        return BackendChoice(TRANSFORMERS, "it is a cross-encoder"), None
    if impl == "transformers":
        if not path.is_dir():
            raise ModelError(f"{path}: only folders can be run with --model-impl transformers")
        return BackendChoice(TRANSFORMERS, "--model-impl says so"), None
    try:
        model = open_model(path, load_format)
    except NotLowered as error:
        if impl == "headrace":
            raise
        return BackendChoice(TRANSFORMERS, str(error).removeprefix(f"{path}: ")), None
    return BackendChoice(CORE, f"it knows {model.spec.architecture} models"), model
