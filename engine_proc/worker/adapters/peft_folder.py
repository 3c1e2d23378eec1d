"""Reads adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`.

Ranks are those of the tensors. What is no product of low rank is refused, and so is an unknown
field with a value. So a new variant of LoRA fails when it is loaded, instead of answering nonsense.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine_proc.worker.adapters.expert_factors import (
    WRAPPED,
    ExpertStacks,
    of_parameters,
    parameter_of,
)
from headrace.engine_proc.worker.adapters.factors import AdapterRefused, Factors
from headrace.engine_proc.worker.checkpoints.safetensors import EXECUTABLE, read_file
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor
from headrace.errors import BAD_JSON, ModelError, without_middle

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
MAX_CONFIG_BYTES = 4 << 20
PREFIX = "base_model.model."
# The last part of a tensor's name: which factor it is. Old files name the adapter in it.
FACTOR = re.compile(
    r"^(?P<module>.+)\."
    r"(?P<part>lora_(embedding_)?[AB]|lora_magnitude_vector)(\.default)?(\.weight)?$"
)
# The patterns that are taken: names, or ends of names.
MODULE_NAME = re.compile(r"(\^|\.\*\\\.)?[\w.\\]+\$?")
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
# PEFT may save the base's embedding beside its factors.
BASE = ".base_layer"
# Fields that do not change the products of a trained adapter, or that the tensors repeat.
INERT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
# Ways to begin that leave the base as it is. Others change it, and PEFT adapts what is left.
BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


class PeftConfig(msgspec.Struct):
    """The fields of `adapter_config.json` that say how factors are used."""

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    init_lora_weights: Any = True
    alpha_pattern: dict[str, float] = {}
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None


def read_config(folder: Path) -> PeftConfig:
    """Read the config of an adapter.

    Raises:
        AdapterRefused: it is missing or broken, or asks for what is not done.
    """
    path = folder / CONFIG
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise AdapterRefused(f"{path}: is larger than {MAX_CONFIG_BYTES} bytes")
        data = path.read_bytes()
        fields = msgspec.json.decode(data, type=dict[str, Any])
        config = msgspec.json.decode(data, type=PeftConfig)
    except (OSError, *BAD_JSON) as error:
        raise AdapterRefused(f"{path}: cannot be read: {error}") from None
    why = why_not(config, fields)
    if why:
        raise AdapterRefused(f"{path}: {without_middle(why)}")
    return config


def why_not(config: PeftConfig, fields: Mapping[str, Any]) -> str:
    """Return why an adapter of this config cannot be used; "" if it can."""
    if config.peft_type != "LORA":
        return f"peft_type is {config.peft_type!r}; only LORA is supported"
    if config.bias != "none":
        return f"bias is {config.bias!r}: trained biases are not supported; merge the adapter"
    if config.init_lora_weights not in BEGINNINGS:
        return (
            f"init_lora_weights is {config.init_lora_weights!r}, which changes the base model; "
            "save the adapter with path_initial_model_for_weight_conversion"
        )
    if not math.isfinite(config.lora_alpha):
        return "lora_alpha is not finite"
    if config.fan_in_fan_out:
        return "fan_in_fan_out is true: no supported model has such modules"
    for pattern in config.alpha_pattern:
        if not MODULE_NAME.fullmatch(pattern):
            return f"alpha_pattern has {pattern!r}, which is not the name of a module"
    unknown = sorted(
        name
        for name, value in fields.items()
        if value and name not in INERT and name not in PeftConfig.__struct_fields__
    )
    return f"{unknown[0]} is set, and is not supported" if unknown else ""


def alpha_of(config: PeftConfig, module: str) -> float:
    """Return the alpha of a module: of the first pattern that its name ends with, or all's."""
    for pattern, alpha in config.alpha_pattern.items():
        name = pattern.removeprefix(r".*\.").strip("^$").replace("\\", "")
        is_whole = pattern.startswith("^")
        if module == name or (module.endswith(f".{name}") and not is_whole):
            return alpha
    return config.lora_alpha


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of an adapter, as views of its file."""
    path = folder / WEIGHTS
    if not path.exists():
        pickle = next((name for name in PICKLES if (folder / name).exists()), None)
        if pickle is not None:
            raise AdapterRefused(
                f"{folder / pickle}: is a pickle, which can run code; save it as safetensors"
            )
        raise AdapterRefused(f"{folder}: has no {WEIGHTS}")
    try:
        entries = read_file(path, EXECUTABLE)
    except ModelError as error:
        raise AdapterRefused(str(error)) from None
    return {
        name: StoredTensor(Format(entry.dtype), tuple(entry.shape), data)
        for name, (entry, data) in entries.items()
    }


def read_peft(folder: Path, stacks: ExpertStacks) -> dict[str, Factors]:
    """Return the factors of an adapter by the tensors that they change, see `expert_stacks`.

    Raises:
        AdapterRefused: a file is missing or broken, or has what is not supported.
    """
    config = read_config(folder)
    parts: dict[str, dict[str, StoredTensor]] = {}
    factors: dict[str, Factors] = {}
    stacked: dict[str, Factors] = {}
    for name, tensor in read_tensors(folder).items():
        found = FACTOR.match(name)
        module = name.removeprefix(PREFIX).removesuffix(".weight")
        if found is not None:
            module = found["module"].removeprefix(PREFIX)
            parts.setdefault(module, {})[found["part"]] = tensor
        elif is_saved(config, module) and name.endswith(".weight"):
            factors[f"{module}.weight"] = Factors(None, tensor)
        elif not module.endswith(WRAPPED):  # PEFT may save the base's embedding beside factors
            raise AdapterRefused(f"{folder}: tensor {name!r} is no factor of a linear layer")
    for module, own in parts.items():
        parameter = parameter_of(module, config.target_parameters or ())
        into, name = (factors, f"{module}.weight") if parameter is None else (stacked, parameter)
        into[name] = factors_of(folder, config, parameter or module, own)
    try:
        return factors | of_parameters(stacked, stacks)
    except AdapterRefused as error:
        raise AdapterRefused(f"{folder}: {error}") from None


def is_saved(config: PeftConfig, module: str) -> bool:
    """Whether a module is one of `modules_to_save`."""
    return any(
        module == name or module.endswith(f".{name}") for name in config.modules_to_save or ()
    )


def transposed(tensor: StoredTensor) -> StoredTensor:
    """Return a matrix of an embedding as a linear layer has it."""
    return StoredTensor.of(tensor.to_float32().T)


def factors_of(
    folder: Path, config: PeftConfig, module: str, parts: Mapping[str, StoredTensor]
) -> Factors:
    """Return the factors of a module."""
    if {EMBEDDING_A, EMBEDDING_B} == parts.keys():
        a, b = parts[EMBEDDING_A], parts[EMBEDDING_B]
        if len(a.shape) == len(b.shape) == 2:
            parts = {"lora_A": transposed(b), "lora_B": transposed(a)}
    if not {"lora_A", "lora_B"} <= parts.keys():
        raise AdapterRefused(f"{folder}: {module} has only one of lora_A and lora_B")
    magnitude = parts.get("lora_magnitude_vector")
    if config.use_dora != (magnitude is not None):
        raise AdapterRefused(
            f"{folder}: use_dora is {str(config.use_dora).lower()}, and {module} has "
            f"{'a' if magnitude else 'no'} magnitude"
        )
    return Factors(
        parts["lora_A"],
        parts["lora_B"],
        alpha_of(config, module),
        is_rank_stabilized=config.use_rslora,
        magnitude=magnitude,
    )
