"""Where the C++ core has each weight: those of all experts are rows of one matrix."""

from collections.abc import Callable
from typing import NamedTuple

from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_shapes import XIELU, weight_shapes

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
    format: Format | None  # None is int8


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
    spec: DecoderSpec, format_of: Callable[[str], Format | None]
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
