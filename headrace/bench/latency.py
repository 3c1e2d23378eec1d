"""`headrace bench latency`: the duration of one batch, on an engine of its own.

Flags, figures and keys of the JSON file are those of `vllm bench latency`, in seconds. Each batch
has the same prompts, without the prefix cache unless `--enable-prefix-caching` is there.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import trange

from headrace.bench.own_engine import (
    full_length,
    own_engine,
    parser_of,
    random_ids,
    run_command,
    save,
)
from headrace.bench.plot import Panel, check_plot, distribution, write_panels
from headrace.bench.serve import check_folder

PERCENTILES = (10, 25, 50, 75, 90, 99)


def parser() -> argparse.ArgumentParser:
    """Return the parser of this benchmark's flags. Lengths are in tokens."""
    made = parser_of("latency", __doc__)
    add = made.add_argument
    add("--input-len", type=int, default=32)
    add("--output-len", type=int, default=128)
    add("--batch-size", type=int, default=8, help="prompts that run together")
    add("--num-iters-warmup", type=int, default=10, help="warm-up batches, not measured")
    add("--num-iters", type=int, default=30, help="measured batches")
    add("--plot", type=Path, metavar="FILE.svg|.png|.html", help="draw the figures")
    return made


def measure(args: argparse.Namespace, fields: dict[str, Any]) -> list[float]:
    """Return how long each batch took, seconds."""
    with own_engine({"enable_prefix_caching": False} | fields) as (engine, vocab_size):
        random = np.random.default_rng(fields.get("seed", 0))
        prompts = random_ids([args.input_len] * args.batch_size, vocab_size, random)
        params = full_length(args.output_len, args.n)

        def one() -> float:
            began = time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - began

        for _ in trange(args.num_iters_warmup, desc="Warmup", disable=args.disable_tqdm):
            one()
        return [one() for _ in trange(args.num_iters, desc="Batches", disable=args.disable_tqdm)]


def compute(latencies: Sequence[float]) -> dict[str, Any]:
    """Return the result, by vLLM's keys."""
    percentiles = np.percentile(latencies, PERCENTILES).tolist()
    return {
        "avg_latency": float(np.mean(latencies)),
        "latencies": list(latencies),
        "percentiles": dict(zip(map(str, PERCENTILES), percentiles, strict=True)),
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as text, in vLLM's form."""
    lines = [f"Avg latency: {result['avg_latency']} seconds"]
    lines += [f"{p}% percentile latency: {s} seconds" for p, s in result["percentiles"].items()]
    return "\n".join(lines)


def draw(path: Path, args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the plot."""
    times_ms = 1e3 * np.array(result["latencies"])
    order = np.arange(len(times_ms), dtype=np.float64)
    panels = [distribution("Latency", times_ms), Panel("Latency, ms", "batch", order, times_ms)]
    title = f"{args.batch_size} prompts of {args.input_len} tokens, {args.output_len} generated"
    write_panels(path, panels, title, result)


def bench(args: argparse.Namespace, fields: dict[str, Any]) -> None:
    """Measure; print the table."""
    if args.plot is not None:
        check_plot(args.plot)
        check_folder("--plot", args.plot.parent)
    result = compute(measure(args, fields))
    if args.plot is not None:
        draw(args.plot, args, result)
    save(args, result)
    print(table(result))


def main(argv: Sequence[str]) -> None:
    """Run."""
    run_command(parser(), bench, argv)
