"""Measure one step of the CPU executor, for each weight format.

Method: a decoder of SmolLM2-135M's shape with random weights. Q4_K and Q6_K need rows of a multiple
        of 256, so they use another shape with as many weights. A decode step has one token of each
        of B sequences, whose caches hold `context` tokens; a prefill step has one prompt. The first
        steps are thrown away; medians are reported.
        With --isa, install the wheel: an editable install does not optimize the kernels of other
        processors (setup.py).
Run:    python bench/cpu_step.py --threads 2 --rounds 20
"""

import os
import time
from dataclasses import replace

import numpy as np

from headrace.engine_proc.worker.checkpoints.weights import Format
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec, LayerSpec, RopeTable
from support.random_weights import BLOCKS, random_weights
from support.report import Quantity, Report, parser

SPEC = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=8192,
    layers=(LayerSpec(),) * 30,
    ropes=(RopeTable(inv_freq=tuple(100_000 ** (-i / 32) for i in range(32))),),
    attention_scale=64**-0.5,
)
PAGE_TOKENS = 32
SPEC_OF_256 = replace(
    SPEC, hidden_size=768, num_heads=12, num_kv_heads=4, layers=(LayerSpec(),) * 18
)
DECODES = ((1, 64), (8, 64), (32, 64), (1, 1000), (1, 2000))  # sequences, context
PREFILLS = (512, 1024)


def spec_of(format: Format) -> DecoderSpec:
    """Return a decoder whose rows are whole blocks."""
    return SPEC_OF_256 if format in BLOCKS and BLOCKS[format][0] == 256 else SPEC


def decode_batch(num_sequences: int, context: int) -> Batch:
    """Make one new token for each sequence."""
    pages = context // PAGE_TOKENS + 1
    ids = np.arange(num_sequences, dtype=np.int32)
    table = np.arange(num_sequences * pages, dtype=np.int32).reshape(num_sequences, pages)
    return Batch(ids + 1, np.full(num_sequences, context, np.int32), ids, table, ids)


def prefill_batch(num_tokens: int) -> Batch:
    """Make one prompt, of which the last token's logits are wanted."""
    ids = np.arange(num_tokens, dtype=np.int32)
    table = np.arange(-(-num_tokens // PAGE_TOKENS), dtype=np.int32)[None]
    return Batch(ids + 1, ids, np.zeros_like(ids), table, ids[-1:])


def step_ms(executor: CpuExecutor, batch: Batch, rounds: int) -> list[float]:
    """Return what each of `rounds` steps took, after two that are thrown away."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        executor.logits(batch)
        times.append((time.perf_counter() - start) * 1e3)
    return times[2:]


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=20)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--kv-dtype", default="bfloat16")
    options.add_argument("--dtype", default="auto", help="as launch_server's: auto or float32")
    options.add_argument("--isa", default="best")
    options.add_argument("--formats", nargs="+", default=["F32", "BF16", *map(str, BLOCKS), "INT8"])
    args = options.parse_args()
    report = Report("cpu_step", args)
    batches = {f"decode B={b} context {c}": decode_batch(b, c) for b, c in DECODES}
    batches |= {f"prefill {tokens}": prefill_batch(tokens) for tokens in PREFILLS}
    samples: dict[str, dict[str, list[float]]] = {what: {} for what in batches}
    for name in args.formats:
        format = Format.BF16 if name == "INT8" else Format(name)
        executor = CpuExecutor(
            spec_of(format),
            random_weights(format, spec_of(format)),
            num_pages=128,
            page_tokens=PAGE_TOKENS,
            weight_dtype="int8" if name == "INT8" else "packed",
            kv_dtype=args.kv_dtype,
            rounds_activations=args.dtype != "float32",
            threads=args.threads,
            isa=args.isa,
        )
        for what, batch in batches.items():
            rounds = max(3, args.rounds // 4) if what.startswith("prefill") else args.rounds
            samples[what][name] = step_ms(executor, batch, rounds)
        print(f"{name} done", flush=True)
    for what, by_format in samples.items():
        report.add(Quantity(what, "ms", by_format))
    report.finish()


if __name__ == "__main__":
    main()
