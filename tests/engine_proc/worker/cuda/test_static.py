"""What kernels take of a GPU's processors is what `bench/results/cuda_static.json` says.

`make gpu-static` compiles all of it anew. Here some are, with the Triton that is installed.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from gpu_models import MODELS, format_of
from gpu_tests import rarely

from headrace.engine_proc.worker.cuda.attention.paged_attention import TILING

ROOT = Path(__file__).parents[4]
SUPPORT = ROOT / "tests" / "support"
TABLE = ROOT / "bench" / "results" / "cuda_static.json"
PINNED, NEWER = "Triton 3.7.1", "Triton 3.9.0"  # the first is torch 2.13's, for GPUs
BARRIERS = {PINNED: 2, NEWER: 3}  # of a block of keys in a prompt, on a Hopper
KIB = 1 << 10
SHARED_BYTES = {"80": 163 * KIB, "89": 99 * KIB, "90": 227 * KIB, "100": 227 * KIB}
# Bytes of a thread's stack: what a kernel may lack in registers, at most. The first word that a
# variant's name has counts. Loops over keys use none on a Hopper: `gpu_static.py` refuses that.
STACK_BYTES = {
    (PINNED, "100"): {
        "latent_attention_kernel": 2144,
        "SEES_AHEAD=True": 440,
        "IS_CHUNKED=True": 416,
    }
    | {"HEAD_DIM=256": 448, "attention_kernel": 368, "report_kernel": 16}
    | {"draw_kernel": 8, "limit_kernel": 408}
    | {"gated_linear_kernel": 0, "linear_kernel": 32, "expert_kernel": 8}
    | {"int4_kernel": 8, "delta_block_kernel": 208, "ssd_kernel": 344},
    (PINNED, "90"): {"latent_attention_kernel": 744, "SEES_AHEAD=True": 392, "IS_CHUNKED=True": 320}
    | {"HEAD_DIM=256": 344, "attention_kernel": 312, "report_kernel": 24}
    | {"draw_kernel": 8, "limit_kernel": 336}
    | {"gated_linear_kernel": 0, "linear_kernel": 88, "delta_block_kernel": 16}
    | {"ssd_kernel": 256},
    (PINNED, "89"): {"latent_attention_kernel": 32, "SEES_AHEAD=True": 216, "IS_CHUNKED=True": 392}
    | {"HEAD_DIM=256": 0, "attention_kernel": 296, "draw_kernel": 8, "limit_kernel": 272}
    | {"gated_linear_kernel": 152, "linear_kernel": 152, "expert_kernel": 112}
    | {"router_kernel": 8, "delta_block_kernel": 40, "ssd_kernel": 248},
    (PINNED, "80"): {"latent_attention_kernel": 48, "SEES_AHEAD=True": 312, "IS_CHUNKED=True": 496}
    | {"HEAD_DIM=256": 200, "attention_kernel": 408, "report_kernel": 8}
    | {"draw_kernel": 8, "limit_kernel": 280}
    | {"gated_linear_kernel": 136, "linear_kernel": 120, "expert_kernel": 144}
    | {"norm_kernel": 8, "delta_block_kernel": 56, "ssd_kernel": 264},
    (NEWER, "100"): {
        "latent_attention_kernel": 1208,
        "SEES_AHEAD=True": 424,
        "IS_CHUNKED=True": 392,
    }
    | {"HEAD_DIM=256": 416, "attention_kernel": 352}
    | {"gated_linear_kernel": 0, "linear_kernel": 56, "expert_kernel": 8}
    | {"router_kernel": 8, "delta_block_kernel": 184, "ssd_kernel": 352},
    (NEWER, "90"): {"latent_attention_kernel": 1200, "SEES_AHEAD=True": 488, "IS_CHUNKED=True": 248}
    | {"HEAD_DIM=256": 496, "attention_kernel": 272, "draw_kernel": 8}
    | {"gated_linear_kernel": 0, "linear_kernel": 40, "delta_block_kernel": 48}
    | {"ssd_kernel": 368},
    (NEWER, "89"): {"latent_attention_kernel": 32, "SEES_AHEAD=True": 392, "IS_CHUNKED=True": 344}
    | {"HEAD_DIM=256": 0, "attention_kernel": 472}
    | {"gated_linear_kernel": 152, "linear_kernel": 152, "expert_kernel": 64}
    | {"fp8_kernel": 8, "ssd_kernel": 256},
    (NEWER, "80"): {"latent_attention_kernel": 8, "SEES_AHEAD=True": 384, "IS_CHUNKED=True": 472}
    | {"HEAD_DIM=256": 192, "attention_kernel": 632, "report_kernel": 8}
    | {"draw_kernel": 8, "limit_kernel": 40}
    | {"gated_linear_kernel": 136, "linear_kernel": 120, "delta_block_kernel": 72}
    | {"ssd_kernel": 264},
}
NEWER_WHOLE = [arch for compiler, arch in STACK_BYTES if compiler == NEWER]
OF_EACH = ["inputs_kernel", "schedule_kernel", "norm_kernel", "linear_kernel", "draw_kernel"]
OF_EACH += ["weigh_kernel", "limit_kernel"]
OF_EACH += ["rope_store_kernel", "attention_kernel", "gated_linear_kernel", "report_kernel"]
DEADLINE_S = 300
SOME = "attention_kernel.*BLOCK_ROWS=128|schedule_kernel.*TILE_TOKENS=32|rope_store|inputs"
SOME += "|norm_kernel.*NUM=4096.*RESIDUAL=True"
# Between them, these launch all kernels of the table.
OTHERS = "Qwen3 8B, (fp8|int4)|DeepSeek V3|Gemma 3n|Gemma 4 26B|Nemotron H|Qwen3 Next|Jamba"
COMPILED = f"""
import json, re, triton, gpu_static, kernel_compiler
variants = gpu_static.variants("Llama 3 8B, TP 1", 90)
known = {{variant.name.split()[0] for variant in variants}}
some = [variant for variant in variants if re.search({SOME!r}, variant.name)]
rows = dict(gpu_static.compile_all(some, 90))
others = {{own.name.split()[0]: own for own in gpu_static.variants({OTHERS!r}, 90)}}
variants += [variant for kernel, variant in others.items() if kernel not in known]
hashes = {{variant.name: kernel_compiler.source_hash(variant, 90) for variant in variants}}
(wide,) = [variant for variant in some if variant.name.startswith("attention_kernel")]
attention = kernel_compiler.compile_variant(wide, 90)
loop = kernel_compiler.shortest_loop(attention.asm["cubin"])
in_flight = kernel_compiler.bytes_in_flight(attention)
print(json.dumps([f"Triton {{triton.__version__}}", rows, hashes, loop._asdict(), in_flight]))
"""


def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_a_processor_has_the_memory_that_kernels_share(arch: str) -> None:
    rows = table()[PINNED]
    assert len(rows) > 900
    most = SHARED_BYTES[arch]
    assert {name for name, row in rows.items() if row.get(arch, [0])[0] > most} == set()


def test_every_generation_has_the_kernels_of_a_decoder() -> None:
    found = {(name.split()[0], arch) for name, row in table()[PINNED].items() for arch in row}
    assert set(product(OF_EACH, SHARED_BYTES)) <= found


@pytest.mark.parametrize("arch", NEWER_WHOLE)
def test_a_newer_triton_takes_no_more_memory_than_there_is(arch: str) -> None:
    pinned, newer = (
        {name: row[arch] for name, row in table()[compiler].items() if arch in row}
        for compiler in (PINNED, NEWER)
    )
    assert set(newer) == set(pinned)
    assert max(row[0] for row in newer.values()) <= SHARED_BYTES[arch]


@pytest.mark.parametrize(("compiler", "arch"), STACK_BYTES)
def test_registers_do_for_all_but_some_kernels(compiler: str, arch: str) -> None:
    found = {name: row[arch] for name, row in table()[compiler].items() if arch in row}
    assert len(found) > 600
    most = STACK_BYTES[compiler, arch]
    for name, row in found.items():
        words = name.split()
        assert row[2] <= next((most[word] for word in most if word in words), 0), name


def run(arguments: list[str], cache: Path) -> str:
    """Return what Python prints, with Triton's compiler in place of its interpreter."""
    env = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": str(SUPPORT),
    }
    result = subprocess.run(
        [sys.executable, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@rarely
def test_gpus_without_8_bit_floats_have_the_other_kernels(tmp_path: Path) -> None:
    """Of a model whose experts are in e4m3, where `make gpu-static` compiles for an A100."""
    listing = (
        "import gpu_static; print(*[v.name for v in gpu_static.variants('Jamba', 80)], sep=';')"
    )
    names = run(["-c", listing], tmp_path).strip().split(";")
    assert not any("fp8" in name for name in names)
    rows = table()[PINNED]
    assert {"conv_kernel", "scan_kernel"} <= {name.split()[0] for name in names}
    assert all("80" in rows[name] for name in names)


def test_a_misspelt_format_of_experts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [format_of(name) for name in ("Qwen3 8B, fp8", "Llama 3 8B, TP 1")] == [1, 0]
    monkeypatch.setitem(MODELS, "Mixtral 8x7B, imt4", MODELS["Mixtral 8x7B, int4"])
    with pytest.raises(KeyError, match="IMT4"):
        format_of("Mixtral 8x7B, imt4")


def test_kernels_take_what_the_table_says(tmp_path: Path) -> None:
    """A change that costs is seen in review: it changes the table, as does any other.

    `make gpu-static GPU_ARCHITECTURES=90 ARGS="--missing --models 'Llama 3 8B, TP 1'"` has these
    rows anew in a minute, and with `TRITON=3.9.0` those of the other Triton.
    """
    compiler, found, hashes, loop, in_flight = json.loads(run(["-c", COMPILED], tmp_path))
    # The next block's keys and values, of 128 numbers in bf16, are on their way in a prompt.
    assert in_flight == (TILING.num_stages - 1) * 2 * TILING.keys * 128 * 2
    assert loop["copies"] * 16 * 8 * 32 == in_flight  # 16 bytes for each thread of 8 warps
    wanted = table()
    if compiler not in wanted:
        pytest.skip(f"the table has no {compiler}")
    rows = {name: wanted[compiler].get(name, {}).get("90") for name in hashes}
    assert {name: row[-1] for name, row in rows.items() if row} == hashes, "of another source"
    kernels = [{name.split()[0] for name in names} for names in (hashes, wanted[compiler])]
    assert kernels[0] == kernels[1], "`test_compilation.py` compiles those alone that have no row"
    assert found == {name: rows[name] for name in found}
    assert len(found) == 5
    assert (loop["barriers"], loop["loads"]) == (BARRIERS[compiler], 4)  # page numbers are loaded
