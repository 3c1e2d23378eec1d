"""Measure decode and prefill in each weight format, beside llama.cpp.

Method: the demo model's weights in each format, the same file for both; a real text as prompt.
        Other models are a file of random weights in any type of GGUF (`random-Q5_K`), a file of
        `support/real_models.py` (`qwen2.5-coder-0.5b`), or a path. `--shape` measures models of
        random weights, in each type that their rows can have: all layers, of mixtures some.
        Headrace's CPU executor runs in this process, llama.cpp (`llama-cpp-python`) in another
        that sleeps while it is not asked; both have the same number of threads. They take turns
        in every round, neither runs while the other does, and the first round is thrown away.
        Decoding is greedy, with the choice of the token on the clock. B sequences begin at
        different tokens of a text, so that experts are chosen as in a batch of real ones. Prefill
        is one prompt of 512 tokens. In every round memory is also read as fast as can be, before
        and after the engines. On processors with AMX, llama.cpp goes without its extra buffers,
        so without its own AMX code, which dies there, and without repacked weights. The limit of
        one sequence is this rate over what a token reads. That is all weights as stored, of experts
        those that it chooses, and keys and values.
Run:    python bench/decode.py --rounds 5 --llama-python /path/to/its/venv/bin/python
        python bench/decode.py qwen2.5-coder-1.5b random-Q4_K --sequences 1
        python bench/decode.py --shape qwen2.5-1.5b llama-3.1-8b
        python bench/decode.py random-llama-3.1-8b-Q4_K
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.engine_proc.worker.execution.cpu_executor import CpuExecutor
from headrace.engine_proc.worker.execution.executor import Batch
from headrace.engine_proc.worker.models.model import open_model
from support import models
from support.bandwidth import Bandwidth, active_bytes
from support.llama_process import LlamaProcess
from support.random_gguf import DENSE, MIXTURES, TYPES, random_file, types_of
from support.real_models import REAL_MODELS, fetch
from support.report import Quantity, Report, parser, peer_version

FORMATS = ("BF16", "Q8_0", "Q4_0", "Q4_1", "INT8")
ROUNDED = "INT8"  # Headrace's `--quantization int8` of the BF16 file, beside llama.cpp's Q8_0
DECODES = ((1, 64, 64), (8, 64, 32), (32, 64, 16), (1, 2000, 32))  # sequences, context, steps
PREFILL_TOKENS = 512
LIMITS = {"decode B=1": 1.0, "prefill": 1.5}  # of the ratio to llama.cpp
PAGE_TOKENS = 32
GB = 1e9
OURS, THEIRS = "headrace", "llama.cpp"
RANDOM = "random-"

Decodes = Sequence[tuple[int, int, int]]


def file_of(name: str) -> Path:
    """Return the file of a model as it is named on the command line."""
    if name in REAL_MODELS:
        return fetch(name)
    if name.startswith(RANDOM):
        return random_file(name.removeprefix(RANDOM))
    return models.model_file(name) if name in FORMATS else Path(name)


def prompt_of(name: str, num_tokens: int) -> list[int]:
    """Return a real text's tokens, by the model's own tokenizer if it has one."""
    has_none = name in FORMATS or name.startswith(RANDOM)
    return models.text_tokens(num_tokens, None if has_none else file_of(name))


class Engine(Protocol):
    """One of the two; both return seconds and the tokens of the first sequence."""

    def prefill(self, tokens: list[int]) -> tuple[float, list[int]]:
        """Compute a prompt from nothing."""

    def decode(self, steps: int, prompt: list[int], sequences: int) -> tuple[float, list[int]]:
        """Continue rotated prompts, computed untimed when they are first named, greedily."""


class Headrace:
    """The CPU executor, in this process."""

    def __init__(self, format: str, decodes: Decodes, args: argparse.Namespace) -> None:
        model = open_model(file_of("BF16" if format == ROUNDED else format))
        self._num_pages = sum(b * self._pages(c + s) for b, c, s in decodes)
        self._num_pages += self._pages(PREFILL_TOKENS)
        self._executor = CpuExecutor(
            model.spec,
            model.weights,
            num_pages=self._num_pages,
            page_tokens=PAGE_TOKENS,
            weight_dtype="int8" if format == ROUNDED else "packed",
            kv_dtype=args.kv_dtype,
            rounds_activations=args.dtype != "float32",
            threads=args.threads,
        )
        self.isa = self._executor.isa
        self._kept: dict[tuple[int, int], np.ndarray[Any, Any]] = {}  # page tables

    @staticmethod
    def _pages(num_tokens: int) -> int:
        return -(-num_tokens // PAGE_TOKENS)

    def _take(self, *shape: int) -> np.ndarray[Any, Any]:
        """Return a page table of unused pages; they are never freed."""
        self._num_pages -= shape[0] * shape[1]
        start = self._num_pages
        return np.arange(start, start + shape[0] * shape[1], dtype=np.int32).reshape(shape)

    def _fill(self, tokens: list[int], table: np.ndarray[Any, Any]) -> list[int]:
        positions = np.arange(len(tokens), dtype=np.int32)
        ids = np.array(tokens, np.int32)
        batch = Batch(ids, positions, positions * 0, table, positions[-1:])
        logits = self._executor.logits(batch).rows
        first: list[int] = logits.argmax(axis=1).tolist()
        return first

    def prefill(self, tokens: list[int]) -> tuple[float, list[int]]:
        """See `Engine`."""
        key = (0, len(tokens))
        if key not in self._kept:
            self._kept[key] = self._take(1, self._pages(len(tokens)))
        start = time.perf_counter()
        first = self._fill(tokens, self._kept[key])
        return time.perf_counter() - start, first

    def decode(self, steps: int, prompt: list[int], sequences: int) -> tuple[float, list[int]]:
        """See `Engine`."""
        key = (sequences, len(prompt))
        if key not in self._kept:
            self._kept[key] = self._take(sequences, self._pages(len(prompt) + steps))
            for row in range(sequences):
                rotated = prompt[row:] + prompt[:row]
                self._fill(rotated[:-1], self._kept[key][row : row + 1])
        table = self._kept[key]
        rows = np.arange(sequences, dtype=np.int32)
        tokens = np.array([prompt[row - 1] for row in range(sequences)], np.int32)
        generated = []
        start = time.perf_counter()
        for position in range(len(prompt) - 1, len(prompt) - 1 + steps):
            positions = np.full(sequences, position, np.int32)
            logits = self._executor.logits(Batch(tokens, positions, rows, table, rows)).rows
            tokens = logits.argmax(axis=1).astype(np.int32)
            generated.append(int(tokens[0]))
        return time.perf_counter() - start, generated


class LlamaCpp:
    """llama.cpp, in another process."""

    def __init__(self, python: str, format: str, threads: int) -> None:
        path = file_of("Q8_0" if format == ROUNDED else format)
        self._process = LlamaProcess(python, path, threads)
        self.close = self._process.close

    def prefill(self, tokens: list[int]) -> tuple[float, list[int]]:
        """See `Engine`."""
        return self._process.ask({"prefill": tokens})

    def decode(self, steps: int, prompt: list[int], sequences: int) -> tuple[float, list[int]]:
        """See `Engine`."""
        return self._process.ask({"decode": steps, "prompt": prompt, "sequences": sequences})


def measure(
    engines: dict[str, Engine], bandwidth: Bandwidth, format: str, decodes: Decodes, rounds: int
) -> list[Quantity]:
    """Let the engines take turns; return tokens per second, and shares of what memory allows."""
    path = file_of("Q8_0" if format == ROUNDED else format)
    text = prompt_of(format, max(PREFILL_TOKENS, *(context for _, context, _ in decodes)))
    format = Path(format).stem if format.endswith(".gguf") else format
    quantities = [
        Quantity(
            f"{format} decode B={b} context {context}", "tok/s", {e: [] for e in engines}, True
        )
        for b, context, _ in decodes
    ]
    prefill = Quantity(
        f"{format} prefill {PREFILL_TOKENS}", "tok/s", {e: [] for e in engines}, True
    )
    reading = Quantity(f"{format} reading memory", "GB/s", {OURS: []}, True)
    for number in range(rounds + 1):
        limit = bandwidth.bytes_per_s()
        for name, engine in engines.items():
            rates = []
            for sequences, context, steps in decodes:
                seconds, _ = engine.decode(steps, text[:context], sequences)
                rates.append(sequences * steps / seconds)
            seconds, _ = engine.prefill(text[:PREFILL_TOKENS])
            rates.append(PREFILL_TOKENS / seconds)
            for quantity, rate in zip([*quantities, prefill], rates, strict=True):
                if number:  # the first round is thrown away
                    quantity.samples[name].append(rate)
        if number:
            reading.samples[OURS].append((limit + bandwidth.bytes_per_s()) / 2 / GB)
    shares = [
        share_of_limit(quantity, active_bytes(path, context + steps // 2), reading)
        for quantity, (sequences, context, steps) in zip(quantities, decodes, strict=True)
        if sequences == 1
    ]
    return [*quantities, prefill, *shares, reading]


def share_of_limit(decode: Quantity, needed: float, reading: Quantity) -> Quantity:
    """Return how near one sequence's rate is to that of reading the bytes that a token needs."""
    shares = {
        engine: [
            100 * rate * needed / (read * GB)
            for rate, read in zip(rates, reading.samples[OURS], strict=True)
        ]
        for engine, rates in decode.samples.items()
    }
    return Quantity(f"{decode.name}, share of the limit", "%", shares, True)


def agreement(engines: dict[str, Engine], format: str, decodes: Decodes) -> int:
    """Return how many greedy tokens the engines have in common before they first differ."""
    sequences, context, steps = decodes[0]
    prompt = prompt_of(format, context)
    texts = [engine.decode(steps, prompt, sequences)[1] for engine in engines.values()]
    pairs = zip(*texts, strict=True)
    return next((i for i, tokens in enumerate(pairs) if len(set(tokens)) > 1), steps)


def below_limits(quantities: list[Quantity]) -> list[str]:
    """Return the rows whose ratio is below its limit."""
    return [
        quantity.name
        for quantity in quantities
        for what, limit in LIMITS.items()
        if f" {what} " in quantity.name
        and quantity.unit == "tok/s"
        and quantity.ratios
        and quantity.ratios[0] < limit
    ]


def best_prefill(quantities: list[Quantity]) -> Quantity:
    """Return prefill in the format of one model that suits each engine best."""
    candidates = [q for q in quantities if " prefill " in q.name]
    samples = {}
    for engine in candidates[0].samples:
        best = max(candidates, key=lambda q: q.medians[engine])
        samples[engine] = best.samples[engine]
    return Quantity(f"best prefill {PREFILL_TOKENS}", "tok/s", samples, True)


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--kv-dtype", default="bfloat16", help="Headrace's; llama.cpp has f16")
    options.add_argument("--dtype", default="auto", help="as launch_server's: auto or float32")
    options.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"{', '.join(FORMATS)} (of the demo model, the default); {', '.join(REAL_MODELS)}; "
        f"{RANDOM}TYPE or {RANDOM}SHAPE-TYPE with TYPE of {', '.join(TYPES)}; or a .gguf file",
    )
    options.add_argument("--shape", nargs="+", default=[], choices=[*DENSE, *MIXTURES])
    options.add_argument(
        "--sequences", nargs="+", type=int, default=[1, 8, 32], help="of B, those to measure"
    )
    options.add_argument(
        "--contexts", nargs="+", type=int, default=[64, 2000], help="of those to measure"
    )
    options.add_argument("--llama-python", default=os.environ.get("LLAMA_PYTHON"))
    args: argparse.Namespace = options.parse_args()
    of_shapes = [f"{RANDOM}{shape}-{type}" for shape in args.shape for type in types_of(shape)]
    args.models = args.models or of_shapes or FORMATS
    report = Report("decode", args)
    version = peer_version(args.llama_python, "llama-cpp-python")
    if version is None:
        report.miss("llama.cpp: --llama-python or LLAMA_PYTHON names no Python that has it")
    else:
        report.versions["llama-cpp-python"] = version
    decodes = [d for d in DECODES if d[0] in args.sequences and d[1] in args.contexts]
    bandwidth = Bandwidth(args.threads)
    for format in args.models:
        ours = Headrace(format, decodes, args)
        report.versions["isa"] = ours.isa
        engines: dict[str, Engine] = {OURS: ours}
        if version is not None:
            theirs = LlamaCpp(args.llama_python, format, args.threads)
            engines[THEIRS] = theirs
        for quantity in measure(engines, bandwidth, format, decodes, args.rounds):
            report.add(quantity)
        if len(engines) == 2:
            same = agreement(engines, format, decodes)
            print(f"{format}: {same} of {decodes[0][2]} greedy tokens agree")
            theirs.close()
    for name in below_limits(report.quantities):
        print(f"below its limit: {name}")
    if set(args.models) <= set(FORMATS):
        report.add(best_prefill(report.quantities))
    report.finish()


if __name__ == "__main__":
    main()
