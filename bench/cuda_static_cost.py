"""Count what a step on a GPU moves, launches and sums, and what that is to take; without a GPU.

Method: `CudaExecutor` launches a step of a whole model on torch's meta device, where nothing runs.
        Each launch's bytes are counted once, from what it is given, and lengths from the batch.
        A step is padded to the graph that does it. "expected" is each launch at the slower of
        memory and products, one after the other, and nothing in between. It is no floor: what one
        launch leaves in a cache for the next counts as moved. "measured" is what an H200 took, as
        saved. What a launch takes beside follows from it. Experts are chosen as if each were as
        likely. Of a kernel's loop, what is "on its way" has been asked for while another part is
        multiplied.
Run:    PYTHONPATH=bench:tests/support python bench/cuda_static_cost.py --save
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
from gpu_models import LLAMA_8B, LLAMA_70B, MODELS, QWEN3_NEXT, STATES, decoder
from gpu_static import META, pretend, weights_of
from kernel_compiler import (
    CompiledLaunches,
    Variant,
    bytes_in_flight,
    compile_variant,
    programs_at_once,
    shortest_loop,
    usage_of,
)

from headrace.engine_proc.worker.cuda import cuda_executor
from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Sizes, buckets_of
from headrace.engine_proc.worker.cuda.mixtures.expert_linear import ExpertFormat
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.dummy_weights import dummy_weights
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.parallel.peers import Peers
from headrace.engine_proc.worker.parallel.shard import shards
from support.report import RESULTS, Quantity, Report, parser
from support.step_costs import (
    KINDS,
    Gpu,
    StepCost,
    experts_chosen,
    shape_of,
    step_cost,
    with_states,
)
from support.step_launches import LaunchRecorder, RecordedAllReduce, launches_of

ARCH = 90
PAGE_TOKENS = 32
MAX_SEQUENCES, MAX_TOKENS = 512, 8192
# Memory and products of the H200 are what it measured: 4.2 of its 4.8 TB/s, and torch's product.
# An H100 has 3.35 TB/s, of which the same share is reckoned. NVLink has 450 GB/s one way.
GPUS = {"H200": Gpu(4.2e12, 690e12, 450e9), "H100": Gpu(2.93e12, 690e12, 450e9)}
MEASURED, SAVED = "H200 measured", "h200"
GB, MS = 1e9, 1e-3
LOOPS_OF, LOOPS = "Llama 3 8B", ("linear_kernel", "gated_linear_kernel", "attention_kernel")
SIZES = {"NUM_COLUMNS": "columns", "NUM": "columns", "NUM_TERMS": "terms", "BLOCK_ROWS": "rows"}


def deep(spec: DecoderSpec, num_layers: int) -> DecoderSpec:
    """Return a decoder that repeats its layers until it has so many."""
    return replace(spec, layers=spec.layers * (num_layers // len(spec.layers)))


def gemma(name: str, num_layers: int) -> DecoderSpec:
    """Return a whole Gemma: of six layers five have a window."""
    local, whole = MODELS[name].layers
    return deep(replace(MODELS[name], layers=(local,) * 5 + (whole,)), num_layers)


def qwen3_next() -> DecoderSpec:
    """Return a whole Qwen3-Next: of four layers three have states."""
    spec = STATES["Qwen3 Next 80B-A3B, fp8"]
    state, attention = spec.layers
    assert spec.vocab_size == QWEN3_NEXT.vocab_size
    return deep(replace(spec, layers=(state,) * 3 + (attention,)), 48)


SPECS = {
    "Qwen2.5 1.5B": deep(decoder(151936, 1536, 8960, 12, 2, qkv_bias=True, tied_head=True), 28),
    "Llama 3 8B": deep(LLAMA_8B, 32),
    "Llama 3 70B": deep(LLAMA_70B, 80),
    "Qwen3 8B": deep(MODELS["Qwen3 8B"], 36),
    "Gemma 3 12B": gemma("Gemma 3 12B", 48),
    "Gemma 4 31B": gemma("Gemma 4 31B", 60),
    "Gemma 4 26B-A4B": gemma("Gemma 4 26B-A4B, dense", 30),
    "Qwen3 30B-A3B": deep(MODELS["Qwen3 30B-A3B, fp8"], 48),
    "Qwen3 Next": qwen3_next(),
}


@dataclass(frozen=True)
class Case:
    """A step: `counts` new tokens of each sequence, which then have `lengths`."""

    model: str
    lengths: Sequence[int]
    counts: Sequence[int]
    what: str
    num_gpus: int = 1
    format: ExpertFormat = ExpertFormat.DENSE
    measured: tuple[str, str, str] | None = None  # benchmark, quantity and system

    @property
    def name(self) -> str:
        """Its name in the table."""
        format = "" if self.format == ExpertFormat.DENSE else f" {self.format.name.lower()}"
        gpus = "" if self.num_gpus == 1 else f" TP {self.num_gpus}"
        return f"{self.model}{format}{gpus}, {self.what}"


def decodes(model: str, num: int, context: int, **fields: Any) -> Case:
    """Return a decode step of so many sequences that have as many tokens each."""
    return Case(model, [context + 1] * num, [1] * num, f"B={num} of {context}", **fields)


SMALL = "Qwen2.5 1.5B"
CASES = [
    *(
        decodes(SMALL, num, 512, measured=("cuda_decode", f"decode B={num} context 512", "graphs"))
        for num in (1, 64, 256)
    ),
    Case(
        SMALL,
        [8192],
        [8192],
        "a prompt of 8192",
        measured=("cuda_prefill", "a prompt of 8192 tokens", "headrace"),
    ),
    decodes("Llama 3 8B", 1, 1024),
    decodes("Llama 3 8B", 64, 1024),
    Case("Llama 3 8B", [32768] + [200] * 63, [1] * 64, "one of 32768, 63 of 200"),
    Case("Llama 3 8B", [4096], [4096], "a prompt of 4096"),
    *(decodes("Llama 3 70B", num, 4096, num_gpus=tp) for tp in (4, 8) for num in (1, 64)),
    *(
        decodes("Qwen3 8B", 64, 1024, format=format)
        for format in (ExpertFormat.DENSE, ExpertFormat.FP8, ExpertFormat.INT4)
    ),
    *(decodes(model, 64, 4096) for model in ("Gemma 3 12B", "Gemma 4 31B", "Gemma 4 26B-A4B")),
    *(decodes("Qwen3 30B-A3B", num, 1024) for num in (1, 64)),
    *(decodes("Qwen3 Next", num, 1024, format=ExpertFormat.FP8) for num in (1, 64)),
]


def batch_of(case: Case) -> Batch:
    """Return the step as the engine sends it; the last token of each sequence has logits."""
    parts = list(zip(case.lengths, case.counts, strict=True))
    positions = np.concatenate([np.arange(n - count, n, dtype=np.int32) for n, count in parts])
    sequences = np.repeat(np.arange(len(parts), dtype=np.int32), case.counts)
    num_pages = -(-max(case.lengths) // PAGE_TOKENS)
    table = np.zeros((len(parts), num_pages), np.int32)
    rows = np.cumsum(case.counts).astype(np.int32) - 1
    return Batch(np.zeros(len(positions), np.int32), positions, sequences, table, rows)


def cost_of_case(case: Case, recorder: LaunchRecorder) -> StepCost:
    """Return the cost of a step on one of its GPUs, which has the first share."""
    spec = SPECS[case.model]
    batch = batch_of(case)
    own = Sizes(len(batch.positions), len(case.lengths), len(batch.logit_rows))
    bucket = buckets_of(MAX_SEQUENCES, MAX_TOKENS).choose(own)
    weights, peers = dummy_weights(spec), None
    if case.num_gpus > 1:
        group = RecordedAllReduce(recorder.launches, case.num_gpus, bucket is not None)
        peers = Peers(shards(spec, weights, case.num_gpus), group)
    cuda_executor.load_weights = lambda own_spec, *_, **__: weights_of(own_spec, case.format)
    executor = CudaExecutor(
        spec,
        weights,
        num_pages=1,
        num_states=2,
        page_tokens=PAGE_TOKENS,
        device=META,
        dtype=torch.bfloat16,
        largest=Sizes(MAX_TOKENS, MAX_SEQUENCES, MAX_SEQUENCES),
        peers=peers,
    )
    sizes = bucket or own
    launches = launches_of(executor, recorder, sizes)
    mixture = next((layer.mixture for layer in executor.spec.layers if layer.mixture), None)
    num_experts = 0.0
    if mixture is not None:
        chosen = mixture.num_experts, mixture.experts_per_token
        num_experts = experts_chosen(own.num_tokens, *chosen)
    if spec.state_numbers:
        batch = with_states(batch)
    return step_cost(executor, launches, shape_of(executor, batch, sizes, num_experts))


def measured_ms(case: Case) -> float | None:
    """Return what the saved result of an H200 has of a step; None where it was not measured."""
    if case.measured is None:
        return None
    benchmark, quantity, system = case.measured
    saved = json.loads((RESULTS / f"{benchmark}-{SAVED}.json").read_text())
    (row,) = [row for row in saved["quantities"] if row["quantity"] == quantity]
    return float(row["medians"][system])


def add(report: Report, case: Case, cost: StepCost) -> None:
    """Add a step's rows."""
    kinds = {kind: [cost.num_bytes[kind] / GB] for kind in KINDS if cost.num_bytes[kind]}
    report.add(Quantity(f"{case.name}: moved", "GB", kinds))
    loaded = {"by programs": [cost.loaded_bytes / GB]}
    report.add(Quantity(f"{case.name}: loaded of keys", "GB", loaded))
    counts = {"launches": [len(cost.launches)]}
    counts["splits in a row"] = [max((tiles.longest for tiles in cost.tiles), default=0)]
    if cost.reductions:
        counts |= {"sums and gathers": [len(cost.reductions)], "barriers": [cost.num_barriers]}
        report.add(
            Quantity(f"{case.name}: read of peers", "MB", {"peers": [cost.peer_bytes / 1e6]})
        )
    report.add(Quantity(f"{case.name}: counts", "", counts))
    times = {name: [cost.seconds(gpu) / MS] for name, gpu in GPUS.items()}
    measured = measured_ms(case)
    if measured is not None:
        times[MEASURED] = [measured]
        expected = times["H200"][0]
        beside = 1e3 * (measured - expected) / len(cost.launches)
        report.add(
            Quantity(f"{case.name}: measured to expected", "times", {"H200": [measured / expected]})
        )
        report.add(Quantity(f"{case.name}: beside each launch", "us", {"H200": [beside]}))
    report.add(Quantity(f"{case.name}: expected", "ms", times))


def add_loop(report: Report, variant: Variant) -> None:
    """Add the row of a kernel's loop over terms or keys, as it is compiled."""
    compiled = compile_variant(variant, ARCH)
    usage, cubin = usage_of(compiled), compiled.asm["cubin"]
    loop, num_bytes = shortest_loop(cubin), bytes_in_flight(compiled)
    if loop is None:
        report.miss(f"the loop of {label_of(variant)}: no instructions that jump back")
        return
    num_programs = programs_at_once(usage, variant.options.get("num_warps", 4))
    figures = {
        "KB on their way": num_bytes / 1e3,
        "of a processor": num_bytes / 1e3 * num_programs,
        "programs of it": num_programs,
        "copies": loop.copies,
        "barriers and waits": loop.barriers,
        "instructions": loop.instructions,
        "registers": usage.registers,
    }
    samples = {name: [float(value)] for name, value in figures.items()}
    report.add(Quantity(f"loop of {label_of(variant)}", "each", samples))


def label_of(variant: Variant) -> str:
    """Return a variant's kernel and sizes."""
    marks = dict(mark.split("=") for mark in variant.name.split() if "=" in mark)
    sizes = [f"{marks[size]} {what}" for size, what in SIZES.items() if size in marks]
    return f"{variant.name.split()[0].removesuffix('_kernel')}, {', '.join(sizes)}"


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--models", default="", help="what names of steps begin with")
    args: argparse.Namespace = options.parse_args()
    report = Report("cuda_static_cost", args)
    pretend(ARCH)
    found: list[Variant] = []
    recorder = LaunchRecorder(CompiledLaunches(found.append).launch)
    for case in CASES:
        if case.name.startswith(args.models):
            cost = cost_of_case(case, recorder if case.model == LOOPS_OF else LaunchRecorder())
            add(report, case, cost)
    for variant in found:
        if variant.name.startswith(LOOPS):
            add_loop(report, variant)
    report.versions["triton"] = triton.__version__
    report.finish()


if __name__ == "__main__":
    main()
