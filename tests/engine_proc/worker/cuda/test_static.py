"""What kernels take of a GPU's processors is what `bench/results/cuda_static.json` says.

`make gpu-static` compiles all of it anew. Here some are, with the Triton that is installed.
"""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
TABLE = ROOT / "bench" / "results" / "cuda_static.json"
PINNED, NEWER = "Triton 3.7.1", "Triton 3.9.0"  # the first is torch 2.13's, for GPUs
KIB = 1 << 10
SHARED_BYTES = {"80": 163 * KIB, "89": 99 * KIB, "90": 227 * KIB, "100": 227 * KIB}
# Bytes of a thread's stack: what a kernel may lack in registers, at most. Loops over keys use
# none on a Hopper: `gpu_static.py` refuses that.
STACK_BYTES = {
    "100": {"attention_kernel": 368, "heads of 256": 448, "draw_kernel": 568, "int4_kernel": 8}
    | {"linear_kernel": 2752, "latent_attention_kernel": 2144},
    "90": {"attention_kernel": 328, "heads of 256": 344, "draw_kernel": 560}
    | {"expert_kernel": 40, "latent_attention_kernel": 744},
    "89": {"attention_kernel": 288, "heads of 256": 80, "draw_kernel": 560}
    | {"gated_linear_kernel": 152, "linear_kernel": 64},
    "80": {"attention_kernel": 408, "heads of 256": 200, "draw_kernel": 560}
    | {"gated_linear_kernel": 136, "linear_kernel": 64, "norm_kernel": 8},
}
OF_EACH = ["inputs_kernel", "schedule_kernel", "norm_kernel", "linear_kernel", "draw_kernel"]
OF_EACH += ["rope_store_kernel", "attention_kernel", "gated_linear_kernel", "report_kernel"]
DEADLINE_S = 300
SOME = "attention_kernel|schedule_kernel|rope_store|norm_kernel.*NUM=4096|inputs"


def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_a_processor_has_the_memory_that_kernels_share(arch: str) -> None:
    rows = table()[PINNED]
    assert len(rows) > 600
    most = SHARED_BYTES[arch]
    too_large = {name for name, row in rows.items() if row.get(arch, [0])[0] > most}
    of_256 = re.compile("attention_kernel .* HEAD_DIM=256")
    heads_of_256 = {name for name, row in rows.items() if arch in row and of_256.match(name)}
    assert too_large == (heads_of_256 if arch == "89" else set())  # Ada has too little for those


def test_every_generation_has_the_kernels_of_a_decoder() -> None:
    found = {(name.split()[0], arch) for name, row in table()[PINNED].items() for arch in row}
    assert set(product(OF_EACH, SHARED_BYTES)) <= found


def test_a_newer_triton_takes_no_more_memory_than_there_is() -> None:
    rows = [row["90"] for row in table()[NEWER].values()]
    assert len(rows) > 550
    assert max(shared for shared, _, _ in rows) <= SHARED_BYTES["90"]


@pytest.mark.parametrize("arch", STACK_BYTES)
def test_registers_do_for_all_but_some_kernels(arch: str) -> None:
    found = {name: row[arch] for name, row in table()[PINNED].items() if arch in row}
    assert len(found) > 370
    for name, row in found.items():
        kind = "heads of 256" if "HEAD_DIM=256" in name else name.split()[0]
        assert row[2] <= STACK_BYTES[arch].get(kind, 0), name


def test_kernels_take_what_the_table_says(tmp_path: Path) -> None:
    """A change that costs is seen in review: it changes the table."""
    support = ROOT / "tests" / "support"
    env = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": str(support),
    }
    command = [sys.executable, str(support / "gpu_static.py"), "90"]
    command += ["--models", "Llama 3 8B, TP 1", "--pattern", SOME]
    result = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    ((compiler, found),) = json.loads(result.stdout).items()
    wanted = table()
    if compiler not in wanted:
        pytest.skip(f"the table has no {compiler}")
    assert found == {name: {"90": wanted[compiler][name]["90"]} for name in found}
    assert len(found) == 8
