"""Predicts how a GGUF file's weights are executed, and the memory that they take."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.config.process_configs import ExecutionConfig
from headrace.engine_proc.worker.backend_selection import chosen
from headrace.engine_proc.worker.device_selection import NAMES, place
from headrace.engine_proc.worker.draft_opener import BY_MODELS, draft_bytes, open_draft
from headrace.engine_proc.worker.encoder_arithmetic import (
    EncoderArithmetic,
    arithmetic_of,
)
from headrace.engine_proc.worker.execution.cpu_executor import matrix_bytes
from headrace.engine_proc.worker.execution.held_matrices import (
    WeightDtype,
    activation_bits,
    held_format,
)
from headrace.engine_proc.worker.execution.memory_check import (
    adapter_bytes,
    core_bytes,
    weights_of_all,
)
from headrace.engine_proc.worker.loader import QUANTIZED, WEIGHTS, refuse_draft
from headrace.engine_proc.worker.models.compute_dtype import dtype_on_gpus
from headrace.engine_proc.worker.models.model import DecoderModel, open_model
from headrace.engine_proc.worker.models.mtp import MTP
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from headrace.engine_proc.worker.stages.stage import models_of
from headrace.model.gguf import BLOCK_TYPES
from headrace.system.machine import memory_limit

ROW_TYPES = {block.name: block for block in BLOCK_TYPES.values()}
INT8 = "int8"
UNROUNDED = ("router", "k_b", "v_b")  # matrices of layers that `--quantization fp8` leaves


class HeldWeights(NamedTuple):
    """All weights of one stored type that are executed alike."""

    stored: str  # Q4_K
    executed: str  # "as stored", or another type
    num_weights: int
    stored_bytes: int
    held_bytes: int

    @property
    def how(self) -> str:
        """How they are executed, for people."""
        if self.executed == "as stored":
            return self.executed
        if self.executed == INT8 and self.stored == "Q8_0":
            return "as stored, as int8"
        return f"{'decoded' if self.executed == 'F32' else 'rounded'} to {self.executed}"


def foresee_memory(config: ExecutionConfig) -> list[HeldWeights]:
    """Return the weights of a GGUF file by type, the largest ones first; none of other models.

    Where each stage has a machine of its own, they are those of the first one.

    Raises:
        ModelError: the file cannot be run.
        ConfigError: the flags ask for a feature of GPUs, and the model runs on the CPU.
    """
    path = Path(config.model_path)
    if not path.is_file():
        return []
    model = open_model(path, config.load_format)
    if config.has_remote_stages:
        model = models_of(model, config.pp)[0]
    on_gpus = place(config, model).name == "cuda"
    held: dict[tuple[str, str], HeldWeights] = {}
    for one in on_gpu(config, model) if on_gpus else in_core(config, model):
        key = one.stored, one.executed
        so_far = held.get(key, HeldWeights(*key, 0, 0, 0))
        held[key] = HeldWeights(*key, *(a + b for a, b in zip(so_far[2:], one[2:], strict=True)))
    return sorted(held.values(), key=lambda weights: -weights.held_bytes)


def foresee_arithmetic(config: ExecutionConfig) -> str:
    """Return what an encoder's layers multiply in the core, for people; "" of other models.

    Raises:
        ModelError: the model cannot be run.
        ConfigError: the flags ask for a feature of GPUs, and the model runs on the CPU.
    """
    _, model = chosen(config)
    if model is None or model.spec.encoder is None or place(config, model).name != "cpu":
        return ""
    return encoder_arithmetic(config, model).name


def encoder_arithmetic(config: ExecutionConfig, model: DecoderModel) -> EncoderArithmetic:
    """Return how the core multiplies an encoder's layers."""
    return arithmetic_of(config, dtype_of_flags(config), model)


def dtype_of_flags(config: ExecutionConfig) -> WeightDtype:
    """Return the format of weights, as the flags have it."""
    return QUANTIZED.get(config.quantization) or WEIGHTS[config.dtype]


def foresee_draft(config: ExecutionConfig) -> int:
    """Return the bytes that the weights of a draft model take beside the model's; 0 without one.

    Raises:
        ModelError: it cannot draft for this model.
        ConfigError: both do not fit into the memory, or the model does not run in the core.
    """
    if config.speculative not in BY_MODELS:
        return 0
    choice, model = chosen(config)
    where = choice.executor if model is None else NAMES[place(config, model).name]
    if model is None or where != NAMES["cpu"]:
        refuse_draft(config, where)
    assert model is not None
    dtype = dtype_of_flags(config)
    rounds = config.dtype != "float32"
    if config.speculative == MTP:
        path, overrides = Path(config.model_path), config.hf_overrides
        whole = open_model(path, config.load_format, drafts=True, hf_overrides=overrides)
        own = core_bytes(model.spec, model.weights, dtype, rounds)
        return core_bytes(whole.spec, whole.weights, dtype, rounds) - own
    draft = open_draft(config, model, dtype, memory_limit())
    assert draft is not None
    return draft_bytes(draft, config)


def foresee_adapters(config: ExecutionConfig) -> int:
    """Return the bytes that adapters take at most beside a model on the CPU; 0 without any.

    Raises:
        ModelError: the model cannot be run.
        ConfigError: the flags ask for a feature of GPUs, and the model runs on the CPU.
    """
    if not config.enable_lora:
        return 0
    _, model = chosen(config)
    if model is None or place(config, model).name != "cpu":
        return 0
    return adapter_bytes(config, model.spec, model.weights)


def foresee_second_embedding(config: ExecutionConfig) -> int:
    """Return the bytes of a tied embedding that the last stage has on this machine, too; or 0.

    Raises:
        ModelError: the model cannot be run, or has no stages.
    """
    if config.pp == 1 or config.has_remote_stages:
        return 0
    path, overrides = Path(config.model_path), config.hf_overrides
    model = open_model(path, config.load_format, hf_overrides=overrides)
    dtype = dtype_of_flags(config)
    twice = weights_of_all(config, models_of(model, config.pp), dtype)
    return twice - weights_of_all(config, [model], dtype)


def in_core(config: ExecutionConfig, model: DecoderModel) -> Iterator[HeldWeights]:
    """Yield each weight as the C++ core holds it."""
    dtype = dtype_of_flags(config)
    is_exact = config.dtype == "float32"
    if model.spec.encoder is not None:
        arithmetic = encoder_arithmetic(config, model)
        dtype, is_exact = arithmetic.weight_dtype, arithmetic.is_exact
    rounds = activation_bits(dtype, not is_exact) != 0
    for name, shape in weight_shapes(model.spec).items():
        weight, stored = model.weights[name], stored_bytes(model, name)
        if len(shape) == 1:
            executed, nbytes = "F32", 4 * shape[0]
        else:
            format = held_format(name, weight, dtype, rounds)
            executed, nbytes = format or INT8, matrix_bytes(format, shape)
        if executed == weight.format:
            executed = "as stored"
        yield HeldWeights(weight.format, executed, 1, stored, nbytes)


def on_gpu(config: ExecutionConfig, model: DecoderModel) -> Iterator[HeldWeights]:
    """Yield each weight as GPUs hold it."""
    dtype = dtype_on_gpus(config, model)
    wide = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
    for name, shape in weight_shapes(model.spec).items():
        stored = model.weights[name].format
        is_matrix = name.startswith("layers.") and len(shape) == 2
        is_rounded = is_matrix and name.rpartition(".")[2] not in UNROUNDED
        executed = "F8_E4M3" if is_rounded and config.quantization == "fp8" else wide
        nbytes = math.prod(shape) * {"F32": 4, "F8_E4M3": 1}.get(executed, 2)
        in_file = stored_bytes(model, name)
        if stored == "MXFP4" and ".experts." in name:
            executed, nbytes = stored, in_file
        executed = "as stored" if stored == executed else executed
        yield HeldWeights(stored, executed, 1, in_file, nbytes)


def stored_bytes(model: DecoderModel, name: str) -> int:
    """Return what a weight takes in its file."""
    weight = model.weights[name]
    block = ROW_TYPES[weight.format]
    return math.prod(weight.shape) // block.numbers * block.nbytes
