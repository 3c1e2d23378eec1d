"""Measure what share of its roof the CPU executor reaches with B sequences, in each weight format.

Method: a decoder of a known model's shape with random weights. A quarter of its layers and of its
        vocabulary, so that the head keeps its share of a step. All numbers of sequences, a prompt
        of 512 tokens, a reading of memory and a loop of products take turns in every round. The
        first round is thrown away. A step of B sequences takes at least the longer of two times.
        One is that of a step of one sequence that reads the keys and values of B, and the experts
        that B choose. The other is B times a prompt token's. The roof is the rate of such a step,
        the share is the rate measured over it. The bandwidth is what plain reading reaches, beside
        what the step of one sequence reads in a second. The peak is that of the instructions that
        the kernels multiply with, from registers. Its share is that of the time of products,
        experts and the head.
        A mixture has few layers, all of its experts and a small vocabulary. Experts that a step
        reads are counted in torch, which runs the same steps in fp32.
        A step's parts are times of the calling thread: "waiting" for the other threads, "rows" for
        norms and rounding, token by token. "sampling" is that of tokens at temperature 1, behind
        the step. A mixed step has a chunk of a prompt beside sequences that decode. Its share is
        the time that both take in steps of their own, over its time.
        An editable install hardly optimizes kernels that only other processors choose. So `--isa
        avx2` on a processor with AVX-512 needs a wheel.
Run:    python bench/core_roofline.py --shape qwen2.5-1.5b --formats Q4_K BF16
        python bench/core_roofline.py --shape llama-3.1-8b --context 64 4096 --formats Q4_K
"""

import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from cpu_step import PAGE_TOKENS, decode_batch, prefill_batch
from headrace.engine_proc.worker.checkpoints.weights import Format, Weights
from headrace.engine_proc.worker.execution.cache_sizes import page_bytes
from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor, KVDtype
from headrace.engine_proc.worker.execution.cpu_sampler import MAX_THREADS, ROW, Sampler
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.execution.held_matrices import WeightDtype, held_format
from headrace.engine_proc.worker.execution.memory_check import least_bytes
from headrace.engine_proc.worker.models.lowering import lower_config
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.engine_proc.worker.models.weight_shapes import weight_shapes
from support.arithmetic import Arithmetic, arithmetic_of, kernels_of
from support.bandwidth import Bandwidth
from support.random_weights import BLOCKS, random_weights
from support.report import Quantity, Report, parser
from support.shapes import full_config

MIXTURES = ("qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b")
SHAPES = ("qwen2.5-1.5b", "llama-3.1-8b", *MIXTURES)
FORMATS = ("BF16", "Q4_K", "Q6_K", "Q4_0", "Q8_0", "MXFP4", "INT8")
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TOKENS = 512
CUT = 4
STEPS = 3  # of a round, of which the median counts
DIVIDED = (1, 8, 32)  # sequences whose step is divided into its parts, or beside a chunk
CHUNK_TOKENS = 256  # of the prompt in a mixed step
CONTEXT = 64
MULTIPLYING = ("products", "experts", "head")  # parts of a step


def spec_of(shape: str) -> DecoderSpec:
    """Return a quarter of a model; a mixture is some layers as it is."""
    config = full_config(shape)
    if shape not in MIXTURES:
        config["num_hidden_layers"] //= CUT
        config["vocab_size"] = config["vocab_size"] // CUT // 64 * 64
    return lower_config(config)


def suits(format: str, spec: DecoderSpec) -> bool:
    """Whether all rows of matrices are whole blocks of a format."""
    numbers = BLOCKS[Format(format)][0] if format in BLOCKS else 1
    return all(shape[-1] % numbers == 0 for shape in weight_shapes(spec).values() if len(shape) > 1)


def factors_of(format: str) -> str:
    """Return what is multiplied with weights of a format."""
    return {"BF16": "bf16", "INT8": "int8"}.get(format, "int16")


class Load:
    """What a step of a model reads and multiplies: all but an embedding that is no head."""

    def __init__(self, spec: DecoderSpec, weights: Weights, dtype: WeightDtype) -> None:
        self.products = self.head_products = 0.0  # of a token, of a row of logits
        self._bytes = 0  # of what every step reads
        self._expert_bytes = {i: 0.0 for i, layer in enumerate(spec.layers) if layer.mixture}
        self._token_bytes = page_bytes(spec, 1, KVDtype.BFLOAT16)
        self.experts: dict[tuple[int, int], list[int]] = {}  # by sequences and context
        head = "embed" if spec.tied_head else "head"
        for name, shape in weight_shapes(spec).items():
            if len(shape) == 1 or (name == "embed" and name != head):
                continue
            nbytes = least_bytes(held_format(name, weights[name], dtype, True), shape)
            if name == head:
                self.head_products += shape[0] * shape[1]
            elif ".experts." in name:
                layer = int(name.split(".")[1])
                mixture = spec.layers[layer].mixture
                assert mixture is not None
                chosen = mixture.experts_per_token / mixture.num_experts
                self.products += shape[0] * shape[1] * chosen
                self._expert_bytes[layer] += nbytes / mixture.num_experts
                continue
            else:
                self.products += shape[0] * shape[1]
            self._bytes += nbytes

    def read_bytes(self, sequences: int, context: int) -> float:
        """Return the bytes that a step of decoding reads."""
        chosen = self.experts.get((sequences, context), [])
        of_experts = zip(chosen, self._expert_bytes.values(), strict=True)
        experts = sum(count * nbytes for count, nbytes in of_experts) if chosen else 0.0
        return self._bytes + experts + sequences * context * self._token_bytes

    def count_experts(
        self,
        spec: DecoderSpec,
        weights: Weights,
        num_pages: int,
        sequences: list[int],
        context: int,
    ) -> None:
        """Find out which experts steps choose."""
        if not self._expert_bytes:
            return
        from support.experts import ExpertCounter  # torch, which dense models do without

        counter = ExpertCounter(spec, weights, num_pages=num_pages, page_tokens=PAGE_TOKENS)
        decodes = [decode_batch(b, context) for b in sequences]
        _, *chosen = counter.chosen([prefill_batch(PREFILL_TOKENS), *decodes])
        self.experts |= {(b, context): own for b, own in zip(sequences, chosen, strict=True)}


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


def sampling_rows(num_rows: int) -> np.ndarray[Any, Any]:
    """Return rows that are sampled at temperature 1 from all tokens."""
    rows = np.zeros(num_rows, ROW)
    rows["seed"], rows["position"] = 1, np.arange(num_rows)
    rows["temperature"], rows["top_p"], rows["repetition_penalty"] = 1, 1, 1
    rows["num_logprobs"], rows["target"] = -1, -1
    return rows


class Core:
    """An executor in one format, with room for the largest batch."""

    def __init__(self, format: str, spec: DecoderSpec, args: Any) -> None:
        stored = Format.BF16 if format == "INT8" else Format(format)
        weights = random_weights(stored, spec)
        dtype = WeightDtype.INT8 if format == "INT8" else WeightDtype.PACKED
        self.load = Load(spec, weights, dtype)
        pages = max(args.sequences) * (max(args.context) // PAGE_TOKENS + 1)
        pages += PREFILL_TOKENS // PAGE_TOKENS
        for context in args.context:
            self.load.count_experts(spec, weights, pages, sequences_of(args), context)
        self.executor = CpuExecutor(
            spec,
            weights,
            num_pages=pages,
            page_tokens=PAGE_TOKENS,
            weight_dtype=dtype,
            kv_dtype=KVDtype.BFLOAT16,
            rounds_activations=True,
            threads=args.threads,
            isa=args.isa,
        )
        self._sampler = Sampler(
            spec.vocab_size, threads=min(args.threads, MAX_THREADS), isa=args.isa
        )

    def parts(self, batch: Batch) -> dict[str, float]:
        """Return the seconds of each part of a step, with the sampling of its rows."""
        self.executor.step_seconds()
        logits = self.executor.logits(batch)
        start = time.perf_counter()
        self._sampler.sample(logits.rows, sampling_rows(len(logits.rows)), maxima=logits.maxima)
        sampling = time.perf_counter() - start
        parts = {part: own for part, own in self.executor.step_seconds().items() if own}
        return parts | {"sampling": sampling}

    def products_per_s(self, batch: Batch, parts: dict[str, float]) -> float:
        """Return how fast a step multiplies, by the seconds of its parts."""
        products = len(batch.token_ids) * self.load.products
        products += len(batch.logit_rows) * self.load.head_products
        return products / sum(parts.get(part, 0.0) for part in MULTIPLYING)

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
        read_bytes = self.load.read_bytes
        read_s = alone_s * read_bytes(sequences, context) / read_bytes(1, context)
        return max(read_s, prompt_s / PREFILL_TOKENS * sequences)


def sequences_of(args: Any) -> list[int]:
    """Return the numbers of sequences that are measured, with that of one."""
    return list(dict.fromkeys([1, *args.sequences]))


Row = Iterator[tuple[str, str, float]]  # what, its unit, the figure


def round_of(
    core: Core, args: Any, context: int, memory: Bandwidth, peak: Arithmetic | None
) -> Row:
    """Run all steps once."""
    divided = [b for b in DIVIDED if b in args.sequences]
    plain = memory.bytes_per_s()
    prompt = prefill_batch(PREFILL_TOKENS)
    prompt_s = core.seconds(prompt, steps=1)
    chunk_s = core.seconds(prefill_batch(CHUNK_TOKENS))
    seconds = {b: core.seconds(decode_batch(b, context)) for b in sequences_of(args)}
    read = core.load.read_bytes(1, context) / seconds[1]
    yield "prefill", "tok/s", PREFILL_TOKENS / prompt_s
    yield "reads", "GB/s", read / 1e9
    yield "of the bandwidth", "share", read / plain
    for b, taken in seconds.items():
        yield f"B={b}", "tok/s", b / taken
        if b > 1:
            roof_s = core.roof_s(b, context, seconds[1], prompt_s)
            yield f"B={b} of the roof", "share", roof_s / taken
        if chosen := core.load.experts.get((b, context)):
            yield f"B={b} experts of a layer", "read", statistics.mean(chosen)
    for b in divided:
        taken = core.seconds(mixed_batch(b, context))
        yield f"B={b} beside a chunk", "share", (seconds[b] + chunk_s) / taken
    highest = peak.products_per_s() if peak else 0.0
    if highest:
        yield "peak", "10^9 products/s", highest / 1e9
    batches = {f"B={b}": decode_batch(b, context) for b in divided} | {"prefill": prompt}
    for name, batch in batches.items():
        parts = core.parts(batch)
        for part, own in parts.items():
            yield f"{name} {part}", "of a step", own / sum(parts.values())
        if highest:
            yield f"{name} of the peak", "share", core.products_per_s(batch, parts) / highest


def measure(
    core: Core, name: str, args: Any, context: int, memory: Bandwidth, peak: Arithmetic | None
) -> list[Quantity]:
    """Return the rates and shares of one format at one context."""
    rows: dict[tuple[str, str], list[float]] = {}  # by what and unit
    for number in range(args.rounds + 1):
        for what, unit, value in round_of(core, args, context, memory, peak):
            if number:
                rows.setdefault((what, unit), []).append(value)
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
    report.versions["kernels"] = kernels_of(args.isa)
    memory = Bandwidth(args.threads)
    for shape in args.shape:
        for format in args.formats:
            spec = spec_of(shape)
            if not suits(format, spec):
                report.miss(f"{shape} {format}: its rows are not whole blocks")
                continue
            peak = arithmetic_of(args.isa, factors_of(format), args.threads)
            core = Core(format, spec, args)
            report.versions["isa"] = core.executor.isa
            for context in args.context:
                for quantity in measure(core, f"{shape} {format}", args, context, memory, peak):
                    report.add(quantity)
            print(f"{shape} {format} done", flush=True)
    report.finish()


if __name__ == "__main__":
    main()
