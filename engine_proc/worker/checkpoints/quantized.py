"""Checkpoints whose matrices are quantized: which of their tensors together are a weight.

Read are AutoAWQ's, GPTQ's and compressed-tensors' 4 bits, gpt-oss's MXFP4, and 8-bit floats (e4m3)
with a scale for a matrix, a row or a block. Of scales of activations only those of keys and values
are read: others are rounded by scales of their own, or not at all.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.fp8_weight import Fp8Weight
from headrace.engine_proc.worker.checkpoints.int4_packings import (
    WORD_CODES,
    Awq,
    Gptq,
    Packing,
    PackQuantized,
)
from headrace.engine_proc.worker.checkpoints.int4_weight import Int4Weight, PackedMatrix
from headrace.engine_proc.worker.checkpoints.weights import Format, StoredTensor, Weight
from headrace.errors import ModelError

CONFIG_FIELDS = ("quantization_config", "compression_config")
FP8_BLOCK = (128, 128)
NUMBERS = (Format.F32, Format.F16, Format.BF16)  # of all that is not codes
KV_SCALES = ("{0}_scale", "attn.{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale")
ADDED_TO_ZEROS = {"gptq": 1, "gptq_v2": 0}  # by `checkpoint_format`
# What is read with a matrix, or not needed.
OTHER_PARTS = frozenset(
    {
        "qzeros",
        "scales",
        "g_idx",
        "weight_scale",
        "weight_scale_inv",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
        "input_scale",
        "k_scale",
        "v_scale",
        "output_scale",
    }
)

Tensors = Mapping[str, StoredTensor]
Settings = Mapping[str, Any]


def quantization_of(config: Settings) -> Settings | None:
    """Return the quantization of a config, if it has one.

    Raises:
        ModelError: we do not read such a checkpoint.
    """
    name = next((name for name in CONFIG_FIELDS if config.get(name)), None)
    if name is None:
        return None
    settings = config[name]
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not isinstance(method, str) or method not in READERS:
        raise ModelError(
            f"the config has {name!r} of quant_method {method!r}; supported are "
            + ", ".join(READERS)
        )
    return dict(settings)


def weights_of(settings: Settings, tensors: Tensors) -> dict[str, Weight]:
    """Return the weights that tensors are, each matrix by the name of its module and `.weight`.

    Raises:
        ModelError: a tensor of a matrix is missing or differs in shape from the others, or the
            quantization is not supported.
    """
    read = READERS[settings["quant_method"]]
    weights: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in ("qweight", "weight_packed"):
            weights[f"{module}.weight"] = read(settings, tensors, module)
        elif part == "weight" and tensor.format == Format.F8_E4M3:
            weights[name] = read_fp8(settings, tensors, module)
        elif tensor.format == Format.U8 and settings["quant_method"] == "mxfp4":
            weights[name] = tensor  # of two that `expert_stacks` joins
        elif part not in OTHER_PARTS:
            if tensor.format not in NUMBERS:
                raise wrong_shape(name, tensor, "of " + ", ".join(NUMBERS))
            weights[name] = tensor
    return weights


def kv_scales_of(tensors: Tensors, num_layers: int) -> tuple[tuple[float, float], ...]:
    """Return the scale of each layer's keys and values in 8 bits; none if no layer has one."""
    scales = tuple(
        (kv_scale(tensors, layer, "k"), kv_scale(tensors, layer, "v"))
        for layer in range(num_layers)
    )
    return () if all(pair == (1.0, 1.0) for pair in scales) else scales


def kv_scale(tensors: Tensors, layer: int, which: str) -> float:
    """Return a layer's scale of keys or values, wherever a quantizer writes it; 1 if it does not.

    What is not positive has not been measured.
    """
    for part in KV_SCALES:
        stored = tensors.get(f"model.layers.{layer}.self_attn.{part.format(which)}")
        if stored is not None and stored.shape in ((), (1,)) and stored.format in NUMBERS:
            scale = float(stored.to_float32().reshape(-1)[0])
            return scale if scale > 0 else 1.0
    return 1.0


def read_awq(settings: Settings, tensors: Tensors, module: str) -> Weight:
    """Read a matrix of AutoAWQ."""
    version = setting(settings, "version", str, "gemm").lower()
    if version != "gemm":
        raise ModelError(f"quant_method awq of version {version!r} is not supported; 'gemm' is")
    need_4_bits(setting(settings, "bits", int, 4), "awq")
    parts = {part: need(tensors, module, part) for part in ("qweight", "qzeros", "scales")}
    packing = Awq(**parts)
    return int4_weight(settings, tensors, module, packing, packing.qzeros)


def read_gptq(settings: Settings, tensors: Tensors, module: str) -> Weight:
    """Read a matrix of GPTQ."""
    format = setting(settings, "checkpoint_format", str, "gptq")
    if format not in ADDED_TO_ZEROS:
        supported = " and ".join(ADDED_TO_ZEROS)
        raise ModelError(f"a checkpoint_format of {format!r} is not supported; {supported} are")
    need_4_bits(setting(settings, "bits", int, 4), "gptq")
    parts = {part: need(tensors, module, part) for part in ("qweight", "qzeros", "scales")}
    packing = Gptq(**parts, added_to_zeros=ADDED_TO_ZEROS[format])
    return int4_weight(settings, tensors, module, packing, packing.qzeros)


def read_compressed(settings: Settings, tensors: Tensors, module: str) -> Weight:
    """Read a "pack-quantized" matrix of compressed-tensors."""
    groups = setting(settings, "config_groups", dict, {}).values()
    for group in groups:
        scheme = setting(group, "weights", dict, {}) if isinstance(group, dict) else {}
        need_4_bits(setting(scheme, "num_bits", int, 4), "compressed-tensors")
    packed, scales = need(tensors, module, "weight_packed"), need(tensors, module, "weight_scale")
    has_zeros = f"{module}.weight_zero_point" in tensors
    zeros = need(tensors, module, "weight_zero_point") if has_zeros else None
    packing = PackQuantized(packed, scales, zeros)
    num_columns = packing.shape[1]
    if len(scales.shape) != 2 or not scales.shape[1] or num_columns % scales.shape[1]:
        raise wrong_shape(f"{module}.weight_scale", scales, f"groups of {num_columns} columns")
    size = {"group_size": num_columns // scales.shape[1]}
    return int4_weight(size, tensors, module, packing, zeros)


def read_fp8(settings: Settings, tensors: Tensors, module: str) -> Weight:
    """Read a matrix of 8-bit floats."""
    codes = tensors[f"{module}.weight"]
    if len(codes.shape) != 2:
        raise wrong_shape(f"{module}.weight", codes, "a matrix")
    part = "weight_scale_inv" if f"{module}.weight_scale_inv" in tensors else "weight_scale"
    stored = need(tensors, module, part)
    num_rows, num_columns = codes.shape
    scales = stored.to_float32()
    if scales.size == 1:
        return Fp8Weight(codes, scales.reshape(1, 1), (num_rows, num_columns))
    if scales.shape in ((num_rows,), (num_rows, 1)):
        return Fp8Weight(codes, scales.reshape(-1, 1), (1, num_columns))
    block = setting(settings, "weight_block_size", list, list(FP8_BLOCK))
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise ModelError(f"the quantization config has 'weight_block_size': {block}, not two sizes")
    wanted = [-(-size // of) for size, of in zip(codes.shape, block, strict=True)]
    if list(scales.shape) != wanted:
        raise wrong_shape(
            f"{module}.{part}", stored, f"a scale for all, {num_rows} rows or {wanted} blocks"
        )
    return Fp8Weight(codes, scales, (block[0], block[1]))


def no_packing(settings: Settings, tensors: Tensors, module: str) -> Weight:
    """Refuse packed codes in a checkpoint of floats."""
    method = settings["quant_method"]
    raise ModelError(f"tensor {module + '.qweight'!r} is not part of a checkpoint in {method}")


READERS: dict[str, Callable[[Settings, Tensors, str], Weight]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "fp8": no_packing,
    "mxfp4": no_packing,
    "compressed-tensors": read_compressed,
}


def int4_weight(
    settings: Settings,
    tensors: Tensors,
    module: str,
    packing: Packing,
    zeros: StoredTensor | None,
) -> Weight:
    """Return a packed matrix, its tensors checked against each other."""
    num_rows, num_columns = packing.shape
    size = setting(settings, "group_size", int, -1)
    size = num_columns if size == -1 else size
    if size < 1 or num_columns % size:
        raise ModelError(
            f"tensor {module + '.qweight'!r} has {num_columns} columns, which are no groups of "
            f"{size}"
        )
    num_groups = num_columns // size
    is_transposed = isinstance(packing, PackQuantized)
    name = f"{module}.{'weight_scale' if is_transposed else 'scales'}"
    wanted = (num_rows, num_groups) if is_transposed else (num_groups, num_rows)
    if packing.scales.shape != wanted:
        raise wrong_shape(name, packing.scales, f"{list(wanted)} of group_size {size}")
    wanted = (num_groups, -(-num_rows // WORD_CODES))
    wanted = wanted[::-1] if is_transposed else wanted
    if zeros is not None and zeros.shape != wanted:
        name = f"{module}.{'weight_zero_point' if is_transposed else 'qzeros'}"
        raise wrong_shape(name, zeros, f"{list(wanted)} of group_size {size}")
    group_of = read_order(tensors, module, num_columns, size)
    return Int4Weight.of(PackedMatrix(packing, size, group_of))


def read_order(
    tensors: Tensors, module: str, num_columns: int, group_size: int
) -> npt.NDArray[np.int32] | None:
    """Return the group of each column; None if groups are adjacent columns."""
    part = "g_idx" if f"{module}.g_idx" in tensors else "weight_g_idx"
    stored = tensors.get(f"{module}.{part}")
    if stored is None:
        return None
    name = f"{module}.{part}"
    if stored.shape != (num_columns,) or stored.format != Format.I32:
        raise wrong_shape(name, stored, f"a group for each of {num_columns} columns")
    group_of = stored.data.view("<i4")
    if (group_of == -1).all() or np.array_equal(group_of, np.arange(num_columns) // group_size):
        return None
    if group_of.min() < 0 or group_of.max() >= num_columns // group_size:
        raise ModelError(f"tensor {name!r} names a group that is not there")
    return group_of


def need(tensors: Tensors, module: str, part: str) -> StoredTensor:
    """Return a tensor of a matrix."""
    name = f"{module}.{part}"
    if name not in tensors:
        raise ModelError(f"tensor {name!r} is missing; the other tensors of {module!r} need it")
    tensor = tensors[name]
    if part in ("qweight", "qzeros", "weight_packed", "weight_zero_point"):
        if tensor.format != Format.I32 or len(tensor.shape) != 2:
            raise wrong_shape(name, tensor, "rows of I32")
    elif tensor.format not in NUMBERS:
        raise wrong_shape(name, tensor, "of " + ", ".join(NUMBERS))
    return tensor


def need_4_bits(bits: int, method: str) -> None:
    """Refuse other codes."""
    if bits != 4:
        raise ModelError(f"quant_method {method} of {bits} bits is not supported; 4 bits are")


def setting(settings: Settings, name: str, kind: type, default: Any) -> Any:
    """Return a setting, of one type."""
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ModelError(f"the quantization config has {name!r}: {value!r}, not {kind.__name__}")
    return value


def wrong_shape(name: str, tensor: StoredTensor, right: str) -> ModelError:
    """The error for a tensor that does not fit the others of its matrix."""
    return ModelError(f"tensor {name!r} is {tensor.format} {list(tensor.shape)}, not {right}")
