"""Where the C++ core has each weight, and how: those of all experts are rows of one matrix."""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from headrace.engine_proc.worker.checkpoints.weights import Format, Weight
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_shapes import XIELU, weight_shapes

GROUP = 32  # numbers under one scale, of Q8_0 and Q4_0


class CoreFormat(StrEnum):
    """A format of the C++ core that no file has."""

    BF12 = "BF12"  # bf16 in 12 bits, without loss
    FIXED16 = "FIXED16"  # 13-bit integers under a scale of each 256 columns; so are activations


HeldFormat = Format | CoreFormat | None  # None is int8
# The order of these is the numbering of csrc/cpu.
FORMATS: tuple[HeldFormat, ...] = (
    Format.F32, Format.BF16, Format.Q8_0, Format.Q4_0, Format.Q4_1,
    Format.Q4_K, Format.Q6_K, Format.Q5_0, Format.Q5_1, Format.Q5_K, Format.Q2_K,
    Format.Q3_K, Format.IQ4_NL, Format.IQ4_XS, Format.MXFP4,
    None, CoreFormat.BF12, CoreFormat.FIXED16,
)  # fmt: skip
LANES = 16  # of csrc/cpu/matrix.h: weights are packed in blocks of this many rows
# The order of these is the numbering of csrc/cpu/model.h.
MATRICES = (
    "q", "k", "v", "o", "gate", "up", "down",
    "router", "shared.gate", "shared.up", "shared.down",
    "in_b", "in_c", "in_x", "out", "attn_gate",
    "delta.q", "delta.k", "delta.v", "delta.z", "delta.b", "delta.a", "delta.out",
    "delta.z_in", "delta.a_in",
    "in_z", "in_dt",
    "q_a", "q_b", "kv_a", "k_b", "v_b",
    "per_layer.gate", "per_layer.out", "laurel.left", "laurel.right",
    "dt",
)  # fmt: skip
VECTORS = (
    "attn_norm",
    "attn_post_norm",
    "mlp_norm",
    "mlp_post_norm",
    "q_norm",
    "k_norm",
    "sinks",
    *(f"{name}.bias" for name in MATRICES[:8]),
    "router.selection_bias",
    "shared.gate.bias",
    "shared.up.bias",
    "shared.down.bias",
    *(f"{norm}.bias" for norm in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")),
    "conv",
    *(f"{name}.bias" for name in ("conv", "in_b", "in_c", "in_x", "out", "attn_gate")),
    *(f"delta.{name}" for name in ("q.conv", "k.conv", "v.conv", "a.bias", "rate", "gated_norm")),
    *(f"{name}.bias" for name in ("in_z", "in_dt")),
    "conv_x",
    "conv_b",
    "conv_c",
    *(f"{name}.bias" for name in ("conv_x", "conv_b", "conv_c")),
    "dt_bias",
    "decay",
    "skip",
    "ssm_norm",
    "q_a_norm",
    "kv_a_norm",
    "q_a.bias",
    "kv_a.bias",
    "v_norm",  # which no file has
    "per_layer.norm",
    "scale",
    "laurel.norm",
    "altup.norm",
    "altup.scale",
    *(SMALL_MATRICES := ("altup.router", "altup.predict", "altup.correct")),
    "router.norm",
    "router.scales",
    "expert_norm",
    "expert_post_norm",
    "shared_post_norm",
    "dt_norm",
    "b_norm",
    "c_norm",
    "xielu",
)
OUTER_MATRICES = (
    "embed",
    "head",
    "per_layer.embed",
    "per_layer.proj",
    "altup.in",
    "altup.out",
    "positions",
    "token_types",
    "mtp.proj",
)
OUTER_VECTORS = (
    "norm",
    "norm.bias",
    "head.bias",
    "per_layer.proj_norm",
    "embed_norm",
    "embed_norm.bias",
    "mtp.embed_norm",
    "mtp.hidden_norm",
    "mtp.norm",
)


class Place(NamedTuple):
    """Where the core has a weight: rows of a matrix, or numbers of a vector, from one on."""

    layer: int  # -1 outside of all
    slot: int
    first_row: int = 0
    is_expert: bool = False


class HeldMatrix(NamedTuple):
    """A matrix of the core, of one weight or of those of all experts."""

    place: Place  # of the first
    names: list[str]
    num_rows: int
    format: HeldFormat


def place_of(spec: DecoderSpec, name: str) -> Place:
    """Return a weight's place. Experts begin with whole blocks of 16 rows."""
    if name.startswith("altup."):  # of further residuals, one after the other
        projection, _, residual = name.rpartition(".")
        first_row = (int(residual) - 1) * spec.hidden_size
        return Place(-1, OUTER_MATRICES.index(projection), first_row)
    if not name.startswith("layers."):
        outer = OUTER_MATRICES if name in OUTER_MATRICES else OUTER_VECTORS
        return Place(-1, outer.index(name))
    _, index, local = name.split(".", 2)
    layer, first_row = int(index), 0
    mixture = spec.layers[layer].mixture
    is_expert = local.startswith("experts.")
    if mixture is not None and is_expert:
        _, expert, local = local.split(".", 2)
        width = spec.hidden_size if local.startswith("down") else mixture.intermediate_size
        first_row = (int(expert) - mixture.own_experts.start) * (-(-width // LANES) * LANES)
    elif mixture is not None and local == "shared.router":  # a row of the router
        local, first_row = "router", mixture.num_experts
    elif local in XIELU:
        local, first_row = "xielu", XIELU.index(local)  # of one vector
    slots = MATRICES if local in MATRICES else VECTORS
    return Place(layer, slots.index(local), first_row, is_expert)


def is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the core has a weight as numbers, not as a matrix that it multiplies by."""
    return len(shape) == 1 or name.endswith(SMALL_MATRICES)


def held_matrices(
    spec: DecoderSpec, format_of: Callable[[str], HeldFormat]
) -> dict[tuple[int, int], HeldMatrix]:
    """Return the matrices of the core by layer and slot; `format_of` says how a weight is held.

    Experts of one matrix that are stored in several formats are decoded.
    """
    held: dict[tuple[int, int], HeldMatrix] = {}
    for name, shape in weight_shapes(spec).items():
        if is_vector(name, shape):
            continue
        place = place_of(spec, name)
        format = format_of(name)
        names = [name]
        if before := held.get((place.layer, place.slot)):
            names = [*before.names, name]
            format = format if format == before.format else Format.F32
            place = before.place
        num_rows = place_of(spec, name).first_row + shape[0]
        held[place.layer, place.slot] = HeldMatrix(place, names, num_rows, format)
    return held


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


def packed_format(tensor: Weight, dtype: WeightDtype, rounds_to_integers: bool) -> HeldFormat:
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
            return CoreFormat.FIXED16 if is_wide else stored
        case WeightDtype.FLOAT32:
            return Format.F32
        case WeightDtype.BFLOAT16:
            return Format.BF16


def held_format(
    name: str, tensor: Weight, dtype: WeightDtype, rounds_to_integers: bool
) -> HeldFormat:
    """Return the format in which a matrix is held.

    Routers are multiplied in fp32; embeddings of positions and types are added in it.
    """
    if name.endswith("router") or name in ("positions", "token_types"):
        return Format.F32
    if dtype == WeightDtype.FIXED16 and not name.startswith("layers."):
        dtype = WeightDtype.PACKED
    return packed_format(tensor, dtype, rounds_to_integers)
