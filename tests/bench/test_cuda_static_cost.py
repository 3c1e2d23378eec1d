"""The static cost model: its bytes are those that kernels touch, its launches those that run."""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
from gpu_tests import first_of, rarely
from ipc_ranks import MAX_BYTES, Rank, capture_sums, ranks_do
from mutants.quick_interpreter import quick_interpreter
from random_decoders import GEMMA_SPECS, HYBRIDS, MIXTURES, NUM_PAGES, SPECS, batch, random_weights
from torch import Tensor
from touched_bytes import TouchedBytes

from headrace.engine_proc.worker.cuda.attention.tile_schedule import Tiling
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.cuda.sharded_ops import ShardedOps
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.specs.decoder_spec import (
    DecoderSpec,
    GatedDeltaNetSpec,
    LayerSpec,
)
from headrace.engine_proc.worker.parallel.ipc_workspace import COUNTERS, COUNTERS_AT
from headrace.engine_proc.worker.parallel.peers import Peers
from headrace.engine_proc.worker.parallel.shard import shards
from support.launch_costs import barriers_of, is_small
from support.step_costs import (
    StepCost,
    shape_of,
    step_cost,
    storage_of,
    with_states,
)
from support.step_launches import LaunchRecorder, RecordedAllReduce, launches_of

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter counts bytes"
)
ROOT = Path(__file__).parents[2]
DEADLINE_S = 300
TILING = Tiling(rows=16, keys=16, split_keys=16, enough_programs=6)
SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "num_kv_heads": 1}
DELTA_NET = GatedDeltaNetSpec(
    num_key_heads=2, num_value_heads=4, key_dim=12, value_dim=8, kernel_size=4
)
ONE_MIXTURE = next(layer for layer in MIXTURES["qwen2_moe"].layers if layer.mixture)
DECODERS = {
    # Sums of as many terms have parts.
    "gemma": dataclasses.replace(SPECS["gemma"], **SIZES | {"intermediate_size": 300}),
    "mixture": dataclasses.replace(MIXTURES["qwen2_moe"], **SIZES, layers=(ONE_MIXTURE,)),
    "delta nets": dataclasses.replace(
        HYBRIDS["qwen3_next"], **SIZES, layers=(LayerSpec(mixer=DELTA_NET), LayerSpec())
    ),
    "llama": dataclasses.replace(SPECS["llama"], **SIZES),
    "olmo": dataclasses.replace(SPECS["olmo"], **SIZES),
    "mamba2": HYBRIDS["mamba2"],
    "gemma3n": GEMMA_SPECS["gemma3n"],
    "gemma4": GEMMA_SPECS["gemma4"],
    "gemma4, experts": dataclasses.replace(
        GEMMA_SPECS["gemma4, experts"], layers=GEMMA_SPECS["gemma4, experts"].layers[:1]
    ),
}
PARTS = [(0, 0, 9), (2, 40, 41), (1, 20, 21)]  # programs share the tile of the second
PADDING = 2  # tokens, sequences and rows
MODEL = "gemma"
LAUNCHED = f"""
import json
from gpu_static import META, pretend, weights_of
from test_cuda_static_cost import DECODERS, cost_of_first
from headrace.engine_proc.worker.cuda import cuda_executor
pretend(90)
cuda_executor.load_weights = lambda spec, *_, **__: weights_of(spec, 0)
cost = cost_of_first("{MODEL}", META)
print(json.dumps([[launch.kernel for launch in cost.launches], dict(cost.num_bytes)]))
"""


def make(
    spec: DecoderSpec, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> CudaExecutor:
    return CudaExecutor(
        spec,
        random_weights(spec),
        num_pages=NUM_PAGES,
        num_states=20,
        page_tokens=16,
        device=device,
        dtype=dtype,
        tiling=TILING,
    )


def run(executor: CudaExecutor, step: Batch) -> tuple[StepCost, TouchedBytes]:
    """Run a step, and some padding."""
    own = executor.buffers.send(step)
    sizes = Sizes(*(size + PADDING for size in dataclasses.astuple(own)))
    touched = TouchedBytes()
    with touched.noted():
        launches = launches_of(executor, LaunchRecorder(), sizes)
    experts = [own.tensors["experts"] for own in launches if own.kernel == "sort_kernel"]
    chosen = [(own.unique() >= 0).sum().item() for own in experts]
    return step_cost(executor, launches, shape_of(executor, step, sizes, sum(chosen))), touched


def by_storage(tensors: dict[str, Tensor], counted: Counter[str]) -> Counter[int]:
    found = Counter[int]()
    for name, num in counted.items():
        found[storage_of(tensors[name])] += round(num)
    return found


@pytest.mark.parametrize("name", first_of(3, [*DECODERS]))
def test_bytes_are_those_that_kernels_touch(name: str) -> None:
    spec, step = DECODERS[name], batch(PARTS)
    with quick_interpreter():
        executor = make(spec)
        cost, touched = run(executor, with_states(step) if spec.state_numbers else step)
    pairs = zip(cost.launches, cost.costs, strict=True)
    ours = [(launch, own) for launch, own in pairs if not launch.kernel.startswith("aten::")]
    assert len(ours) > 10
    for (launch, own), *found in zip(ours, touched.read, touched.written, strict=True):
        small = {storage_of(x) for name, x in launch.tensors.items() if is_small(launch, name)}
        for counted, wanted in zip((own.read, own.written), found, strict=True):
            counts = by_storage(launch.tensors, counted)
            differ = {key for key in counts | wanted if counts[key] != wanted[key]} - small
            names = [name for name, x in launch.tensors.items() if storage_of(x) in differ]
            assert not names, (launch.kernel, counts, wanted)


def cost_of_first(name: str, device: str | torch.device) -> StepCost:
    """Return the cost of the first step in bf16, of which nothing runs on torch's meta device."""
    executor, step = make(DECODERS[name], torch.bfloat16, device), batch(PARTS)
    sizes = Sizes(len(step.token_ids), len(PARTS), len(step.logit_rows))
    if executor.device.type == "cpu":
        executor.buffers.send(step)
    launches = launches_of(executor, LaunchRecorder(), sizes)
    return step_cost(executor, launches, shape_of(executor, step, sizes, 0))


def without_interpreter(*arguments: str) -> Any:
    """Return the last line that Python prints, JSON, where kernels are compiled and do not run."""
    paths = [ROOT / "tests" / "bench", ROOT / "tests" / "support", ROOT / "bench"]
    env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_is_counted_is_what_runs() -> None:
    """The same is launched, and moved, where nothing runs and where the interpreter does."""
    kernels, num_bytes = without_interpreter("-c", LAUNCHED)
    with quick_interpreter():
        cost = cost_of_first(MODEL, "cpu")
    assert kernels == [launch.kernel for launch in cost.launches]
    assert num_bytes == cost.num_bytes
    assert len(kernels) > 30


def test_barriers_are_those_that_ranks_meet_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier leaves the call's number in the flags of its phase."""
    most = {2: 1024}
    monkeypatch.setattr("headrace.system.all_reduce_policy.ONE_SHOT_BYTES", most)
    monkeypatch.setattr("headrace.system.all_reduce_policy.STAGED_BYTES", 512)
    num_lanes = (64, 192, 4096)  # in fp32: staged, read in place, and in two shots

    def body(rank: Rank) -> list[int]:
        found = []
        for num in num_lanes:
            graph, _ = capture_sums(rank, [rank.gpu.tensor(torch.zeros(num))])
            rank.gpu.replay(graph)
            rank.gpu.synchronize()
            found.append(barriers_met(rank))
        return found

    first, second = ranks_do(2, body)
    assert first == second
    launches: list[Any] = []
    ours = RecordedAllReduce(launches, 2, in_graph=True)
    for num in num_lanes:
        ours.all_reduce(torch.empty(num, device="meta"))
    assert [launch.kernel for launch in launches] == ["one-shot", "one-shot", "two-shot"]
    assert [barriers_of(launch) for launch in launches] == first == [1, 2, 2]


def barriers_met(rank: Rank) -> int:
    """Return at how many barriers the last call has met others, which may be at the next one's."""
    memory = rank.gpu.read(rank.all_reduce._group._own, COUNTERS_AT + COUNTERS.size)
    flags = torch.frombuffer(bytearray(memory[:COUNTERS_AT]), dtype=torch.int64)
    next_call, _, _ = COUNTERS.unpack(memory[COUNTERS_AT:])
    newest = (flags & 0xFFFFFFFF).view(2, -1).amax(1).tolist()
    return sum(number >= next_call - 1 for number in newest)


def test_calls_are_those_that_ranks_launch() -> None:
    num_lanes = (8, 30, 5000, MAX_BYTES // 4 + 8)  # padded, whole, and in two slices

    def body(rank: Rank) -> Counter[str]:
        before = Counter(rank.gpu.num_launched)
        for num in num_lanes:
            rank.all_reduce.all_reduce(rank.values(num, torch.float32))
        rank.gpu.synchronize()
        return Counter(rank.gpu.num_launched) - before

    launched, _ = ranks_do(2, body)
    launches: list[Any] = []
    ours = RecordedAllReduce(launches, 2, in_graph=False)
    ours._gpu.max_bytes = MAX_BYTES
    for num in num_lanes:
        ours.all_reduce(torch.empty(num, device="meta"))
    names = Counter(f"{own.kernel.replace('-', '_')}_float32" for own in launches)
    assert names == launched
    assert names.total() == len(num_lanes) + 1


def test_logits_of_several_gpus_are_copied_once() -> None:
    """Where all have as many, and whole vectors: gathered, then in fp32 where they stay."""
    spec = dataclasses.replace(SPECS["llama"], vocab_size=128)
    recorder = LaunchRecorder()
    group = RecordedAllReduce(recorder.launches, 2, in_graph=True)
    shared = ShardedOps(spec, Peers(shards(spec, random_weights(spec), 2), group))
    own = torch.empty(5, 64, dtype=torch.bfloat16, device="meta")
    out = torch.empty(5, 128, device="meta")
    with recorder:
        shared.all_logits(own, out)
    assert [launch.kernel for launch in recorder.launches] == ["gather", "aten::copy_"]


@rarely
def test_a_step_of_one_token_reads_a_models_matrices() -> None:
    name = "Qwen2.5 1.5B, B=1 of 512"
    script = str(ROOT / "bench" / "cuda_static_cost.py")
    rows = without_interpreter(script, "--models", name)["quantities"]
    found = {row["quantity"]: row["medians"] for row in rows}
    of_layer = 1536 * (12 + 2 * 2) * 128 + 1536 * 1536 + 3 * 1536 * 8960
    num_bytes = 2 * (28 * of_layer + 1536 * 151936)
    assert found[f"{name}: moved"]["weights"] == pytest.approx(num_bytes / 1e9, rel=1e-3)
    times = found[f"{name}: expected"]
    ratio = found[f"{name}: measured to expected"]["H200"]
    assert ratio == pytest.approx(times["H200 measured"] / times["H200"], rel=1e-3)
