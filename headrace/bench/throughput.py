"""`headrace bench throughput`: throughput of many prompts at once, on an engine of its own.

Flags, figures and keys of the JSON file are those of `vllm bench throughput`, with random prompts.
`tokens_per_second` counts prompts and answers, `output_tokens_per_second` answers alone.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.bench.own_engine import (
    full_length,
    own_engine,
    parser_of,
    random_ids,
    run_command,
    save,
)
from headrace.bench.workload import around
from headrace.errors import ConfigError
from headrace.offline.requests import RequestOutput


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's flags. Lengths are in tokens."""
    made = parser_of("throughput", __doc__)
    add = made.add_argument
    add("--input-len", "--random-input-len", type=int, default=1024)
    add("--output-len", "--random-output-len", type=int, default=128)
    add("--num-prompts", type=int, default=1000)
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share of them")
    return made


def measure(args: argparse.Namespace, fields: dict[str, Any]) -> tuple[float, list[RequestOutput]]:
    """Run all prompts; return the seconds that this took, and what came of them."""
    random = np.random.default_rng(fields.get("seed", 0))
    ratio = args.random_range_ratio
    with own_engine(fields) as (engine, vocab_size):
        lengths = [around(args.input_len, ratio, random) for _ in range(args.num_prompts)]
        prompts = random_ids(lengths, vocab_size, random)
        params = [full_length(around(args.output_len, ratio, random), args.n) for _ in prompts]
        engine.generate([0], full_length(2, 1), use_tqdm=False)  # loads what is loaded at first
        began = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=not args.disable_tqdm)
        return time.perf_counter() - began, outputs


def compute(elapsed_s: float, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the result, by vLLM's keys; the last three are ours."""
    num_input = sum(output.usage.prompt_tokens for output in outputs)
    num_output = sum(output.usage.completion_tokens for output in outputs)
    return {
        "elapsed_time": elapsed_s,
        "num_requests": len(outputs),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(outputs) / elapsed_s,
        "tokens_per_second": (num_input + num_output) / elapsed_s,
        "output_tokens_per_second": num_output / elapsed_s,
        "num_prompt_tokens": num_input,
        "num_output_tokens": num_output,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as text, in vLLM's form."""
    return (
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {result['num_prompt_tokens']}\n"
        f"Total num output tokens:  {result['num_output_tokens']}"
    )


def bench(args: argparse.Namespace, fields: dict[str, Any]) -> None:
    """Measure; print the table."""
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {args.random_range_ratio} must be from 0 to 1")
    result = compute(*measure(args, fields))
    save(args, result)
    print(table(result))


def main(argv: Sequence[str]) -> None:
    """Run."""
    run_command(parser(), bench, argv)
