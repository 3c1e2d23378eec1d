"""The choice of all-reduce for a tensor on GPUs. Pure, by values that all ranks know alike, so
that all choose the same. A rank that chose differently would wait for ever.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum

KB, MB = 1 << 10, 1 << 20
VECTOR_BYTES = 16
DTYPES = ("float32", "float16", "bfloat16")
WORLDS = (2, 4, 6, 8)
MAX_BYTES = 8 * MB  # of a call; what is larger takes several, in slices
STAGED_BYTES = 128 * KB  # of one-shot in a graph: to copy so much takes less than a second barrier
# Up to here every rank reads all inputs: more bytes, and a barrier less. vLLM's, for NVLink.
ONE_SHOT_BYTES = {2: MAX_BYTES, 4: 512 * KB, 6: 256 * KB, 8: 256 * KB}
P2P_DISABLE = "NCCL_P2P_DISABLE"  # of NCCL: GPUs are not to read each other's memory
MIN_FUSED_WORLD = 4  # with two ranks, adding and norming in the same kernel gained nothing


class Topology(IntEnum):
    """The connection between the GPUs of a group: the worst of all pairs."""

    NONE = 0  # not at all
    PCIE = 1
    NVLINK = 2


class Algorithm(Enum):
    """The all-reduce implementation. The last two are `csrc/collectives/all_reduce.cuh`.

    Both give a number the same bits in a tensor of any size. NCCL's depend on the size.
    """

    NCCL = "NCCL"
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"


@dataclass(frozen=True)
class AllReduceChoice:
    """The algorithm and the reason. `registered` reads inputs where they lie, which graphs can."""

    algorithm: Algorithm
    registered: bool
    reason: str


def choose(
    num_bytes: int,
    dtype: str,
    world: int,
    topology: Topology,
    capturing: bool = False,
    max_bytes: int = MAX_BYTES,
) -> AllReduceChoice:
    """Choose for a tensor of `num_bytes`.

    Args:
        dtype: as in DTYPES.
        capturing: whether a graph is captured, whose inputs can be registered.
        max_bytes: what the workspace holds; larger tensors are cut into slices of that.
    """
    why_not = why_not_ours(world, topology) or why_not_this(num_bytes, dtype)
    if why_not:
        return AllReduceChoice(Algorithm.NCCL, False, why_not)
    most = ONE_SHOT_BYTES[world]
    if num_bytes <= most or most == MAX_BYTES:
        is_staged = num_bytes <= STAGED_BYTES
        return AllReduceChoice(Algorithm.ONE_SHOT, capturing and not is_staged, described(most))
    return AllReduceChoice(Algorithm.TWO_SHOT, capturing, f"more than {size(most)}")


def fuses(
    num_bytes: int, row_bytes: int, dtype: str, world: int, topology: Topology, max_bytes: int
) -> bool:
    """Whether the residual and the norm are done in the same kernel, rows of `row_bytes` each."""
    choice = choose(num_bytes, dtype, world, topology, max_bytes=max_bytes)
    small = choice.algorithm is Algorithm.ONE_SHOT
    return small and world >= MIN_FUSED_WORLD and row_bytes % VECTOR_BYTES == 0


def why_not_ours(world: int, topology: Topology, disabled: str = "") -> str:
    """Return why a group never uses our own; "" is that it does.

    Args:
        disabled: the flag or variable that says so.
    """
    if disabled:
        return disabled
    if world not in WORLDS:
        return f"{world} GPUs; ours is for {', '.join(map(str, WORLDS))}"
    if topology is Topology.NONE:
        return "the GPUs cannot read each other's memory"
    if world > 2 and topology is not Topology.NVLINK:
        return f"{world} GPUs without NVLink between all of them"
    return ""


def disabled_by(flag: bool, environment: Mapping[str, str]) -> str:
    """Return what says that a group is not to use our own; "" is that nothing does.

    Args:
        flag: whether `--disable-custom-all-reduce` is given.
    """
    if flag:
        return "--disable-custom-all-reduce"
    return f"{P2P_DISABLE} is set" if environment.get(P2P_DISABLE, "0") != "0" else ""


def why_not_this(num_bytes: int, dtype: str) -> str:
    """Return why a tensor is not for our own; "" is that it is."""
    if dtype not in DTYPES:
        return f"{dtype} is none of {', '.join(DTYPES)}"
    return "" if num_bytes else "there is nothing to sum"


def describe(world: int, topology: Topology, disabled: str = "") -> str:
    """Return what a group of GPUs will use, for people."""
    why_not = why_not_ours(world, topology, disabled)
    if why_not:
        return f"NCCL: {why_not}"
    links = "NVLink" if topology is Topology.NVLINK else "PCIe"
    one_shot = ONE_SHOT_BYTES[world]
    steps = "one-shot" if one_shot == MAX_BYTES else f"{described(one_shot)}, then two-shot"
    return f"{steps}, in slices of {size(MAX_BYTES)}: {world} GPUs, {links}"


def described(one_shot: int) -> str:
    """Return what one-shot is for, in human-readable form."""
    return f"one-shot to {size(one_shot)}"


def size(num_bytes: int) -> str:
    """Return a size in human-readable form."""
    return f"{num_bytes // MB} MiB" if num_bytes % MB == 0 else f"{num_bytes // KB} KiB"
