"""How long does sampling one row take, for what a request may ask?

Method: rows of normally distributed logits, a hard case for top_p: 0.9 of the mass are thousands
        of tokens, where a trained model mostly has tens. The C++ sampler takes 32, 8 and 1 rows,
        then the plain numpy of the tests, which sorts, takes one; so they take turns. The first
        round is thrown away; medians are reported, divided by the number of rows.
Run:    python bench/sampler.py --threads 2 --rounds 20
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.engine_proc.worker.cpu_executor import Isa
from headrace.engine_proc.worker.sampler import NO_BIAS, NO_TOKENS, Sampler

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
import reference_sampler

VOCAB_SIZES = (49152, 151936)
ROWS = (1, 8, 32)
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


def take_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return each contender's median in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def measure(sampler: Sampler, fields: dict[str, float], rounds: int) -> dict[str, float]:
    """Return microseconds per row."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (max(ROWS), sampler.vocab_size)).astype(np.float32)
    rows = reference_sampler.make_rows(max(ROWS), **fields)
    history = NO_TOKENS
    if "num_history" in fields:
        rows["history_start"] = np.arange(len(rows)) * HISTORY
        history = rng.integers(0, sampler.vocab_size, len(rows) * HISTORY).astype(np.int32)

    def plain() -> object:
        return reference_sampler.sample(logits[:1], rows[:1], history, NO_TOKENS, NO_BIAS)

    def ours(num_rows: int) -> Callable[[], object]:
        return lambda: sampler.sample(logits[:num_rows], rows[:num_rows], history)

    contenders: dict[str, Callable[[], object]]
    contenders = {f"rows_{count}": ours(count) for count in reversed(ROWS)}
    contenders["numpy"] = plain
    taken = take_turns(contenders, rounds)
    for count in ROWS:
        taken[f"rows_{count}"] /= count
    return {name: round(us, 1) for name, us in taken.items()}


def commit() -> str:
    """Return the short hash of the checkout."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--isa", default=Isa.BEST)
    args = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    print("us per row            vocab     numpy " + "".join(f"{f'{n} rows':>9}" for n in ROWS))
    for vocab_size in VOCAB_SIZES:
        sampler = Sampler(vocab_size, threads=args.threads, isa=args.isa)
        table = results[str(vocab_size)] = {}
        for name, fields in CASES.items():
            table[name] = measure(sampler, fields, args.rounds)
            print(
                f"{name:20} {vocab_size:6} {table[name]['numpy']:9.1f} "
                + "".join(f"{table[name][f'rows_{count}']:9.1f}" for count in ROWS)
            )
    machine = {"machine": platform.machine(), "cores": os.cpu_count()}
    options = {"threads": args.threads, "isa": args.isa}
    print(json.dumps({"bench": "sampler", **results, **options, **machine, "commit": commit()}))


if __name__ == "__main__":
    main()
