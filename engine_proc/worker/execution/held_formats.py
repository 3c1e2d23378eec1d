"""The formats in which the C++ core holds matrices, by `WeightDtype` and what is stored."""

from enum import StrEnum

from headrace.engine_proc.worker.checkpoints.weights import Format, Weight
from headrace.engine_proc.worker.execution.held_matrices import HeldMatrix

GROUP = 32  # numbers under one scale, of Q8_0 and Q4_0
# The order of these is the numbering of csrc/cpu.
FORMATS: tuple[Format | None, ...] = (
    Format.F32, Format.BF16, Format.Q8_0, Format.Q4_0, Format.Q4_1,
    Format.Q4_K, Format.Q6_K, Format.Q5_0, Format.Q5_1, Format.Q5_K, Format.Q2_K,
    Format.Q3_K, Format.IQ4_NL, Format.IQ4_XS, Format.MXFP4,
    None,  # int8, which no file has
)  # fmt: skip
BF12 = len(FORMATS)  # bf16 in 12 bits, without loss
FIXED16 = BF12 + 1  # 13-bit integers under a scale of each 256 columns; so are activations


class WeightDtype(StrEnum):
    """The format of weights in memory."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # rounded, in groups of 32 with a scale; activations are rounded likewise
    INT8_WEIGHT_ONLY = "int8_weight_only"  # as Q8_0, where more than 8 bits are stored
    PACKED = "packed"  # as stored: 4, 6 and 8 bits stay so
    FIXED16 = "fixed16"  # matrices of layers in 16-bit integers, unless stored in fewer bits
    INT4 = "int4"  # as Q4_0, where 8 bits or more are stored


def activation_bits(dtype: WeightDtype, rounds_activations: bool) -> int:
    """Return how many bits activations have where they meet quantized weights; 0: fp32."""
    if dtype == WeightDtype.INT8:
        return 8
    return 16 if rounds_activations and dtype != WeightDtype.INT8_WEIGHT_ONLY else 0


def packed_format(tensor: Weight, dtype: WeightDtype, rounds_to_integers: bool) -> Format | None:
    """Return the format in which a stored matrix is held; None is int8, which no file has.

    Q8_0 is int8 as it is, in another order.
    """
    stored = tensor.format if tensor.format in FORMATS else Format.F32
    match dtype:
        case WeightDtype.INT8:
            return None
        case WeightDtype.INT8_WEIGHT_ONLY:
            is_wide = stored in (Format.F32, Format.BF16)
            return Format.Q8_0 if is_wide and tensor.shape[1] % GROUP == 0 else stored
        case WeightDtype.INT4:
            is_wide = stored in (Format.F32, Format.BF16, Format.Q8_0)
            return Format.Q4_0 if is_wide and tensor.shape[1] % GROUP == 0 else stored
        case WeightDtype.PACKED:
            return None if stored == Format.Q8_0 and rounds_to_integers else stored
        case WeightDtype.FIXED16:
            is_wide = stored in (Format.F32, Format.BF16)
            return Format.F32 if is_wide else stored
        case WeightDtype.FLOAT32:
            return Format.F32
        case WeightDtype.BFLOAT16:
            return Format.BF16


def held_format(
    name: str, tensor: Weight, dtype: WeightDtype, rounds_to_integers: bool
) -> Format | None:
    """Return the format in which a matrix is held.

    Routers are multiplied in fp32; embeddings of positions and types are added in it.
    """
    if name.endswith("router") or name in ("positions", "token_types"):
        return Format.F32
    if dtype == WeightDtype.FIXED16 and not name.startswith("layers."):
        dtype = WeightDtype.PACKED
    return packed_format(tensor, dtype, rounds_to_integers)


def is_fixed16(matrix: HeldMatrix) -> bool:
    """Return whether a matrix is held in 16-bit integers where `WeightDtype` says so."""
    is_exact = matrix.place.layer < 0 or matrix.names[0].endswith("router")
    return matrix.format == Format.F32 and not is_exact
