"""Measure what share of its roof the CPU executor reaches with B sequences, in each weight format.

Method: a decoder of a known model's shape with random weights. A quarter of its layers and of its
        vocabulary, so that the head keeps its share of a step. All numbers of sequences, a prompt
        of 512 tokens and one reading of memory take turns in every round; the first is thrown away.
        A step of B sequences takes at least the longer of two times. One is that of a step of one
        sequence that reads the keys and values of B. The other is B times a prompt token's. The
        roof is the rate of such a step, the share is the rate measured over it. The bandwidth is
        what plain reading reaches, beside what the step of one sequence reads in a second.
        A step's parts are times of the calling thread: "waiting" for the other threads, "rows" for
        norms and rounding, token by token. A mixed step has a chunk of a prompt beside sequences
        that decode. Its share is the time that both take in steps of their own, over its time.
        An editable install hardly optimizes kernels that only other processors choose. So `--isa
        avx2` on a processor with AVX-512 needs a wheel.
Run:    python bench/core_roofline.py --shape qwen2.5-1.5b --formats Q4_K BF16
"""

import os
import statistics
import time
from typing import Any

import numpy as np

from cpu_step import PAGE_TOKENS, decode_batch, prefill_batch
from headrace.engine_proc.worker.checkpoints.weights import Format, Weights
from headrace.engine_proc.worker.execution.cache_sizes import page_bytes
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, KVDtype
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype, held_format
from headrace.engine_proc.worker.execution.memory_check import core_bytes, least_bytes
from headrace.engine_proc.worker.models.lowering import lower_config
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from support.bandwidth import Bandwidth
from support.random_weights import random_weights
from support.report import Quantity, Report, parser
from support.shapes import full_config

SHAPES = ("qwen2.5-1.5b", "llama-3.1-8b")
FORMATS = ("BF16", "Q4_K", "Q6_K", "Q4_0", "Q8_0", "MXFP4", "INT8")
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = 512
CUT = 4
STEPS = 3  # of a round, of which the median counts
DIVIDED = (1, 8, 32)  # sequences whose step is divided into its parts, or beside a chunk
CHUNK_TOKENS = 256  # of the prompt in a mixed step
CONTEXT = 64


def spec_of(shape: str) -> DecoderSpec:
    """Return a quarter of a model."""
    config = full_config(shape)
    config["num_hidden_layers"] //= CUT
    config["vocab_size"] = config["vocab_size"] // CUT // 64 * 64
    return lower_config(config)


def weight_bytes(spec: DecoderSpec, weights: Weights, dtype: WeightDtype) -> int:
    """Return the bytes of weights that each step reads: all but an embedding that is no head."""
    held = core_bytes(spec, weights, dtype, rounds_activations=True)
    if spec.tied_head:
        return held
    embed = held_format("embed", weights["embed"], dtype, True)
    return held - least_bytes(embed, weights["embed"].shape)


def mixed_batch(sequences: int, context: int) -> Batch:
    """Make a new token of each sequence, and the first chunk of one more's prompt."""
    decoding, chunk = decode_batch(sequences, context), prefill_batch(CHUNK_TOKENS)
    pages = max(decoding.page_table.shape[1], chunk.page_table.shape[1])
    tables = [decoding.page_table, chunk.page_table + decoding.page_table.size]
    padded = [np.pad(table, ((0, 0), (0, pages - table.shape[1]))) for table in tables]
    return Batch(
        np.concatenate([decoding.token_ids, chunk.token_ids]),
        np.concatenate([decoding.positions, chunk.positions]),
        np.concatenate([decoding.sequences, chunk.sequences + sequences]),
        np.concatenate(padded),
        np.concatenate([decoding.logit_rows, chunk.logit_rows + sequences]),
    )


class Core:
    """An executor in one format, with room for the largest batch."""

    def __init__(self, format: str, spec: DecoderSpec, args: Any) -> None:
        stored = Format.BF16 if format == "INT8" else Format(format)
        weights = random_weights(stored, spec)
        dtype = WeightDtype.INT8 if format == "INT8" else WeightDtype.PACKED
        self._weight_bytes = weight_bytes(spec, weights, dtype)
        self._token_bytes = page_bytes(spec, 1, KVDtype.BFLOAT16)
        pages = max(args.sequences) * (max(args.context) // PAGE_TOKENS + 1)
        self.executor = CpuExecutor(
            spec,
            weights,
            num_pages=pages + PREFILL_TOKENS // PAGE_TOKENS,
            page_tokens=PAGE_TOKENS,
            weight_dtype=dtype,
            kv_dtype=KVDtype.BFLOAT16,
            rounds_activations=True,
            threads=args.threads,
            isa=args.isa,
        )

    def read_bytes(self, sequences: int, context: int) -> int:
        """Return the bytes that a step of decoding reads."""
        return self._weight_bytes + sequences * context * self._token_bytes

    def parts(self, sequences: int, context: int) -> dict[str, float]:
        """Return the share of each part in the time of a step."""
        self.executor.step_seconds()
        self.executor.logits(decode_batch(sequences, context))
        seconds = self.executor.step_seconds()
        return {part: own / sum(seconds.values()) for part, own in seconds.items() if own}

    def seconds(self, batch: Batch, steps: int = STEPS) -> float:
        """Return what a step takes."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self.executor.logits(batch)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def roof_s(self, sequences: int, context: int, alone_s: float, prompt_s: float) -> float:
        """Return the least that a step of so many sequences can take."""
        read_s = alone_s * self.read_bytes(sequences, context) / self.read_bytes(1, context)
        return max(read_s, prompt_s / PREFILL_TOKENS * sequences)


def measure(core: Core, name: str, args: Any, context: int, memory: Bandwidth) -> list[Quantity]:
    """Return the rates and shares of one format at one context."""
    rows: dict[tuple[str, str], list[float]] = {}  # by what and unit
    divided = [b for b in DIVIDED if b in args.sequences]
    for number in range(args.rounds + 1):
        plain = memory.bytes_per_s()
        prompt_s = core.seconds(prefill_batch(PREFILL_TOKENS), steps=1)
        chunk_s = core.seconds(prefill_batch(CHUNK_TOKENS))
        seconds = {
            b: core.seconds(decode_batch(b, context)) for b in dict.fromkeys([1, *args.sequences])
        }
        mixed = {b: core.seconds(mixed_batch(b, context)) for b in divided}
        if number == 0:
            continue
        read = core.read_bytes(1, context) / seconds[1]
        row = {("prefill", "tok/s"): PREFILL_TOKENS / prompt_s}
        row |= {("reads", "GB/s"): read / 1e9, ("of the bandwidth", "share"): read / plain}
        for b, taken in seconds.items():
            row[f"B={b}", "tok/s"] = b / taken
            if b > 1:
                roof_s = core.roof_s(b, context, seconds[1], prompt_s)
                row[f"B={b} of the roof", "share"] = roof_s / taken
        for b, taken in mixed.items():
            row[f"B={b} beside a chunk", "share"] = (seconds[b] + chunk_s) / taken
        for b in divided:
            for part, share in core.parts(b, context).items():
                row[f"B={b} {part}", "of a step"] = share
        for key, value in row.items():
            rows.setdefault(key, []).append(value)
    at = "" if context == CONTEXT else f" at {context}"
    return [
        Quantity(f"{name}{at} {what}", unit, {"headrace": values}, True)
        for (what, unit), values in rows.items()
    ]


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--shape", nargs="+", default=SHAPES[:1], choices=SHAPES)
    options.add_argument("--formats", nargs="+", default=FORMATS)
    options.add_argument(
        "--context", nargs="+", type=int, default=[CONTEXT], help="tokens before each step"
    )
    options.add_argument("--sequences", nargs="+", type=int, default=SEQUENCES)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--isa", default="best")
    args = options.parse_args()
    report = Report("core_roofline", args)
    memory = Bandwidth(args.threads)
    for shape in args.shape:
        for format in args.formats:
            core = Core(format, spec_of(shape), args)
            report.versions["isa"] = core.executor.isa
            for context in args.context:
                for quantity in measure(core, f"{shape} {format}", args, context, memory):
                    report.add(quantity)
            print(f"{shape} {format} done", flush=True)
    report.finish()


if __name__ == "__main__":
    main()
