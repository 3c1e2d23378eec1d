"""Measure the sampling of one row, by sampling parameters.

Method: rows of normally distributed logits, a hard case for top_p. 0.9 of the mass are thousands of
        tokens, where a trained model mostly has tens. The C++ sampler takes B rows at a time, then
        the plain numpy of the tests, which sorts, takes one.
Run:    python bench/sampler.py --threads 2 --rounds 20
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.engine_proc.worker.execution.cpu_executor import Isa
from headrace.engine_proc.worker.execution.cpu_sampler import NO_BIAS, NO_TOKENS, Sampler
from support.report import Quantity, Report, parser

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
import reference_sampler

VOCAB_SIZES = (49152, 151936)
ROWS = (32, 8, 1)  # the last with warm caches
HISTORY = 2000  # tokens that penalties look at, half of them the prompt's
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1}
CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "default": {},
    "temperature 0.7": {"temperature": 0.7},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 40": {"top_k": 40},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 40, top_p 0.9": {"top_k": 40, "top_p": 0.9},
    "penalties": {**PENALTIES, "num_history": HISTORY, "num_prompt": HISTORY // 2},
    "greedy, logprobs 20": {"temperature": 0, "num_logprobs": 20},
}


def contenders(
    sampler: Sampler, fields: dict[str, float]
) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return, by system, how many rows it takes and what takes them."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (max(ROWS), sampler.vocab_size)).astype(np.float32)
    rows = reference_sampler.make_rows(max(ROWS), **fields)
    histories = rng.integers(0, sampler.vocab_size, (len(rows), HISTORY)).astype(np.int32)
    rows["history_slot"] = np.arange(len(rows))
    reference_sampler.tell(sampler, histories)

    def plain() -> object:
        return reference_sampler.sample(logits[:1], rows[:1], histories, NO_TOKENS, NO_BIAS)

    def ours(num_rows: int) -> Callable[[], object]:
        return lambda: sampler.sample(logits[:num_rows], rows[:num_rows])

    return {f"B={count}": (count, ours(count)) for count in ROWS} | {"numpy": (1, plain)}


def measure(name: str, sampler: Sampler, fields: dict[str, float], rounds: int) -> Quantity:
    """Return microseconds per row; the first round is thrown away."""
    systems = contenders(sampler, fields)
    samples: dict[str, list[float]] = {system: [] for system in systems}
    for _ in range(rounds + 1):
        for system, (num_rows, run) in systems.items():
            start = time.perf_counter()
            run()
            samples[system].append((time.perf_counter() - start) * 1e6 / num_rows)
    samples = {system: taken[1:] for system, taken in samples.items()}
    return Quantity(f"{name}, {sampler.vocab_size} tokens", "us per row", samples)


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=20)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_argument("--isa", default=str(Isa.BEST), choices=[*map(str, Isa)])
    args = options.parse_args()
    report = Report("sampler", args)
    for vocab_size in VOCAB_SIZES:
        sampler = Sampler(vocab_size, threads=args.threads, isa=args.isa)
        for name, fields in CASES.items():
            report.add(measure(name, sampler, fields, args.rounds))
    report.finish()


if __name__ == "__main__":
    main()
