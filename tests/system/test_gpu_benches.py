"""Benchmarks of GPUs run to their end: on the CPU with a tiny model, and without a GPU at once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INTERPRETER = ROOT / "tests/support/mutants/quick_interpreter.py"
DEADLINE_S = 500
TINY = ("--device", "cpu", "--rounds", "1")
SHAPE = ("--shape", "tiny")
RUNS = {
    "cuda_throughput": ("--requests", "6", "--longest", "200"),
    "cuda_trickle": ("--tokens", "17", "--at-once", "4"),
    "cuda_idle": ("--streams", "2", "--tokens", "200", "--seconds", "0.2", "--rounds", "2"),
    "cuda_prefill": ("--tokens", "8", "--shape", "micro"),
    "cuda_kernels": ("--most", "2", "--calls", "1", "--shape", "micro"),
    "cuda_page_copies": (
        *("--sequences", "2", "--context", "3", "--pages", "2", "--steps", "1", "--shape", "micro"),
    ),
    "cuda_mixers": ("--most", "2", "--calls", "1"),
    "cuda_decode": ("--sequences", "2", "--context", "3", "--steps", "1", "--shape", "micro"),
}
# One with a server, and one without; `make families` has them all.
FEW = ("cuda_trickle", "cuda_decode")
# Those that run in this process.
KERNELS = {"cuda_prefill", "cuda_decode", "cuda_kernels", "cuda_mixers", "cuda_page_copies"}
WITHOUT_SHAPE = {"cuda_mixers"}
# Counts on torch's meta device, which no hour on a GPU is spent on.
WITHOUT_GPU = {"bench/cuda_static_cost.py"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are made."""
    return tmp_path_factory.mktemp("cache")


def run(cache: Path, name: str, *args: str, **env: str) -> Any:
    """Run a benchmark; return the line of JSON that ends what it says."""
    paths = {"PYTHONPATH": str(ROOT / "bench"), "XDG_CACHE_HOME": str(cache)}
    interpreter = [str(INTERPRETER)] if "TRITON_INTERPRET" in env else []
    done = subprocess.run(
        [sys.executable, *interpreter, str(ROOT / f"bench/{name}.py"), *args],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, **paths, **env},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", RUNS if "FAMILIES_TABLE" in os.environ else FEW)
def test_a_benchmark_measures_a_tiny_model(name: str, cache: Path) -> None:
    env = {"TRITON_INTERPRET": "1"} if name in KERNELS else {}
    shape = () if name in WITHOUT_SHAPE else SHAPE
    told = run(cache, name, *TINY, *shape, *RUNS[name], **env)
    assert not told["not_measured"]
    assert told["quantities"]
    for quantity in told["quantities"]:
        assert min(quantity["medians"].values()) > 0


def test_the_first_hour_runs_all_benchmarks_of_gpus() -> None:
    command = ["bash", str(ROOT / "bench/first_gpu_hour.sh"), "--list"]
    *parts, last = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    ).stdout.splitlines()
    words = {word.removeprefix("--ignore=") for part in parts for word in part.split()}
    paths = {word for word in words if word.startswith(("bench/", "tests/"))}
    assert all((ROOT / path).exists() for path in paths)
    benches = {str(path.relative_to(ROOT)) for path in ROOT.glob("bench/cuda_*.py")}
    assert benches - WITHOUT_GPU <= paths
    limits = [int(part.split()[1]) for part in parts]
    assert last == f"{sum(limits) // 60} minutes at most"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_a_benchmark_without_a_gpu_says_so_and_ends(cache: Path) -> None:
    told = run(cache, "cuda_generate_batch")
    assert told["not_measured"] == [
        "transformers' continuous batching beside ours: this machine has no GPU"
    ]
    assert not told["quantities"]
