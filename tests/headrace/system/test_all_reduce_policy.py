"""What sums a tensor of GPUs is the same on all ranks, and as the table says."""

import inspect

import pytest

from headrace.system import all_reduce_policy
from headrace.system.all_reduce_policy import (
    KB,
    MAX_BYTES,
    MB,
    STAGED_BYTES,
    Algorithm,
    Topology,
    choose,
    describe,
    disabled_by,
    fuses,
)

NCCL, ONE, TWO = Algorithm.NCCL, Algorithm.ONE_SHOT, Algorithm.TWO_SHOT
NONE, PCIE, NVLINK = Topology.NONE, Topology.PCIE, Topology.NVLINK


@pytest.mark.parametrize(
    ("num_bytes", "dtype", "world", "topology", "algorithm"),
    [
        (16, "bfloat16", 2, NVLINK, ONE),
        (MAX_BYTES, "float32", 2, NVLINK, ONE),
        (9 * MAX_BYTES, "float32", 2, NVLINK, ONE),
        (4 * MB, "float16", 2, PCIE, ONE),
        (4 * MB, "float16", 2, NONE, NCCL),
        (512 * KB, "bfloat16", 4, NVLINK, ONE),
        (512 * KB + 16, "bfloat16", 4, NVLINK, TWO),
        (MAX_BYTES, "bfloat16", 4, NVLINK, TWO),
        (9 * MAX_BYTES, "bfloat16", 4, NVLINK, TWO),
        (16, "bfloat16", 4, PCIE, NCCL),
        (256 * KB, "bfloat16", 6, NVLINK, ONE),
        (256 * KB + 16, "bfloat16", 6, NVLINK, TWO),
        (256 * KB, "bfloat16", 8, NVLINK, ONE),
        (256 * KB + 16, "bfloat16", 8, NVLINK, TWO),
        (64, "float32", 3, NVLINK, NCCL),
        (64, "float32", 16, NVLINK, NCCL),
        (64, "float64", 2, NVLINK, NCCL),
        (64, "int32", 2, NVLINK, NCCL),
        (0, "float32", 2, NVLINK, NCCL),
        (8, "float32", 2, NVLINK, ONE),
        (1000, "float32", 2, NVLINK, ONE),
    ],
)
@pytest.mark.parametrize("capturing", [False, True])
def test_the_table(
    *, num_bytes: int, dtype: str, world: int, topology: Topology, algorithm: Algorithm,
    capturing: bool,
) -> None:  # fmt: skip
    choice = choose(num_bytes, dtype, world, topology, capturing)
    assert choice.algorithm is algorithm
    is_staged = algorithm is ONE and num_bytes <= STAGED_BYTES
    assert choice.registered == (capturing and algorithm is not NCCL and not is_staged)
    assert choice.reason


def test_nothing_but_what_all_ranks_know_alike_is_asked() -> None:
    known = {"num_bytes", "dtype", "world", "topology", "capturing", "max_bytes"}
    assert set(inspect.signature(choose).parameters) == known
    source = inspect.getsource(all_reduce_policy)
    imported = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    assert imported[0] == "from collections.abc import Mapping"
    assert imported[1:] == ["from dataclasses import dataclass", "from enum import Enum, IntEnum"]


@pytest.mark.parametrize(
    ("num_bytes", "row_bytes", "world", "fused"),
    [
        (64 * KB, 8 * KB, 4, True),
        (64 * KB, 8 * KB, 2, False),
        (512 * KB, 8 * KB, 8, False),
        (80, 40, 4, False),
        (80, 80, 4, True),
    ],
)
def test_small_sums_of_many_gpus_are_fused(
    num_bytes: int, row_bytes: int, world: int, fused: bool
) -> None:
    assert fuses(num_bytes, row_bytes, "bfloat16", world, NVLINK, MAX_BYTES) == fused


@pytest.mark.parametrize(
    ("world", "topology", "disabled", "text"),
    [
        (2, PCIE, "", "one-shot, in slices of 8 MiB: 2 GPUs, PCIe"),
        (8, NVLINK, "", "one-shot to 256 KiB, then two-shot, in slices of 8 MiB: 8 GPUs, NVLink"),
        (4, PCIE, "", "NCCL: 4 GPUs without NVLink between all of them"),
        (3, NVLINK, "", "NCCL: 3 GPUs; ours is for 2, 4, 6, 8"),
        (2, NONE, "", "NCCL: the GPUs cannot read each other's memory"),
        (2, NVLINK, "NCCL_P2P_DISABLE is set", "NCCL: NCCL_P2P_DISABLE is set"),
    ],
)
def test_it_is_described_in_a_line(
    world: int, topology: Topology, disabled: str, text: str
) -> None:
    assert describe(world, topology, disabled) == text


@pytest.mark.parametrize(
    ("flag", "variables", "why"),
    [
        (False, {}, ""),
        (False, {"NCCL_P2P_DISABLE": "0"}, ""),
        (False, {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE is set"),
        (True, {"NCCL_P2P_DISABLE": "1"}, "--disable-custom-all-reduce"),
    ],
)
def test_a_flag_and_a_variable_turn_it_off(
    *, flag: bool, variables: dict[str, str], why: str
) -> None:
    assert disabled_by(flag, variables) == why
