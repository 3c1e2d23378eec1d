"""`headrace bench stream`: latency of streamed answers by part, from the client to the model.

The server's part is from `Server-Timing`, which Headrace sends for requests with
`x-request-timing`. A server without it has "-" there. With `--repeat-runs` each figure is the
median of the runs, each with prompts of its own. A column has the least and the greatest p50.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.bench.connection import Record
from headrace.bench.endpoint import Endpoint
from headrace.bench.figures import Floats, RequestTimes
from headrace.bench.load import LoadResult
from headrace.bench.serve import (
    BACKENDS,
    add_target,
    add_workload,
    check,
    endpoint_of,
    requests_of,
    run,
    run_command,
)
from headrace.errors import ConfigError

PERCENTILES = (50, 95, 99)
# What the engine's caller waits for until the engine has the request.
ADDING = ("accept", "parse", "tokenize", "submit")
COLUMNS = ("", "unit", *(f"p{p}" for p in PERCENTILES))
SPREAD = "p50 from least to most"


def timings(records: list[Record], *names: str) -> Floats:
    """Return the sums of some spans from `Server-Timing`, ms; {} without them."""
    known = [[r.timing[name] for name in names if name in r.timing] for r in records]
    return np.array([sum(spans) for spans in known if spans], np.float64)


def rows(records: list[Record]) -> list[tuple[str, str, Floats]]:
    """Return the name, the unit and the values of each row."""
    times = RequestTimes.of(records)
    lag = np.array([1e3 * (record.sent - record.due) for record in records], np.float64)
    with np.errstate(divide="ignore"):
        speed = np.array([1e3 * r.output_tokens for r in records]) / times.e2el
    return [
        ("submit lag", "ms", lag),
        ("add request", "ms", timings(records, *ADDING)),
        ("tokenize", "ms", timings(records, "tokenize")),
        ("queue wait", "ms", timings(records, "queue")),
        ("prefill -> first token", "ms", timings(records, "prefill")),
        ("TTFT", "ms", times.ttft),
        ("TPOT", "ms", times.tpot[~np.isnan(times.tpot)]),
        ("ITL", "ms", times.itl),
        ("latency", "ms", times.e2el),
        ("throughput of a stream", "tok/s", speed),
    ]


def compute(outcome: LoadResult) -> dict[str, Any]:
    """Return the percentiles of each row; None where nothing is known."""
    good = [record for record in outcome.records if not record.error]
    result: dict[str, Any] = {}
    for name, unit, values in rows(good):
        figures = np.percentile(values, PERCENTILES).tolist() if len(values) else [None] * 3
        percentiles = dict(zip(COLUMNS[2:], figures, strict=True))
        result[name] = {"unit": unit, **percentiles}
    duration = max((record.last for record in good), default=outcome.start) - outcome.start
    num_tokens = sum(record.output_tokens for record in good)
    return {
        "completed": len(good),
        "failed": len(outcome.records) - len(good),
        "duration": duration,
        "output_throughput": num_tokens / max(duration, 1e-9),
        "client_busy": [round(busy, 3) for busy in outcome.busy],
        "client_bound": outcome.is_client_bound,
        "rows": result,
    }


def combine(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of several runs, with the least and the greatest p50 of each row."""
    first = results[0]
    if len(results) == 1:
        return first
    rows = {}
    for name, row in first["rows"].items():
        of_runs = [result["rows"][name] for result in results]
        rows[name] = {"unit": row["unit"]} | {c: median(of_runs, c) for c in COLUMNS[2:]}
        p50s = [of_run["p50"] for of_run in of_runs if of_run["p50"] is not None]
        rows[name][SPREAD] = [min(p50s), max(p50s)] if p50s else None
    return {
        "completed": sum(result["completed"] for result in results),
        "failed": sum(result["failed"] for result in results),
        "duration": sum(result["duration"] for result in results),
        "output_throughput": median(results, "output_throughput"),
        "client_busy": [busy for result in results for busy in result["client_busy"]],
        "client_bound": any(result["client_bound"] for result in results),
        "rows": rows,
        "runs": results,
    }


def median(results: list[dict[str, Any]], key: str) -> float | None:
    """Return the median of the known values."""
    known = [result[key] for result in results if result[key] is not None]
    return float(np.median(known)) if known else None


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    is_repeated = "runs" in result
    lines = [(*COLUMNS, SPREAD) if is_repeated else COLUMNS]
    for name, row in result["rows"].items():
        figures = [row[column] for column in COLUMNS[2:]]
        cells = ["-" if figure is None else f"{figure:,.2f}" for figure in figures]
        if is_repeated:
            spread = row[SPREAD]
            cells.append("-" if spread is None else f"{spread[0]:,.2f} to {spread[1]:,.2f}")
        lines.append((name, row["unit"], *cells))
    text = [
        f"{name:<24}{unit:<6}"
        + "".join(f"{cell:>12}" for cell in cells[:3])
        + "".join(f"{cell:>24}" for cell in cells[3:])
        for name, unit, *cells in lines
    ]
    runs = f" of {len(result['runs'])} runs" if is_repeated else ""
    text.append(
        f"{result['completed']} streams{runs}, {result['failed']} failed, in "
        f"{result['duration']:.2f} s: {result['output_throughput']:,.0f} tok/s together"
    )
    if result["client_bound"]:
        text.append("The load generator was the bottleneck: these figures are its own.")
    return "\n".join(text)


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the submission of streams."""
    add = parser.add_argument
    add("--pretok", action="store_true", help="send token ids, to /v1/completions")
    add("--repeat-runs", type=int, default=1, help="number of runs")
    add("--submit-interval-ms", type=float, help="time between requests; instead of --request-rate")


def check_runs(args: argparse.Namespace) -> None:
    """Refuse what cannot work, and have ids sent where ids are taken.

    Raises:
        ConfigError: a flag has a value that cannot work.
    """
    check(args)
    if BACKENDS[args.backend] == "embeddings":
        raise ConfigError(f"--backend {args.backend} does not stream")
    if args.repeat_runs < 1:
        raise ConfigError(f"--repeat-runs {args.repeat_runs} must be at least 1")
    if args.submit_interval_ms is not None:
        if not 0 <= args.submit_interval_ms < np.inf:
            raise ConfigError(
                f"--submit-interval-ms {args.submit_interval_ms} must be at least 0, and finite"
            )
        if np.isfinite(args.request_rate):
            raise ConfigError("--submit-interval-ms takes the place of --request-rate; use one")
    if args.pretok:
        if args.images or args.dataset_name == "random-mm":
            raise ConfigError("--pretok sends token ids, which leave no room for images")
        args.backend = "openai"


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark of the flags; print the table; return the result."""
    check_runs(args)
    plain = endpoint_of(args)
    headers = plain.headers | {"x-request-timing": "1"}
    endpoint = Endpoint(plain.base_url, plain.kind, plain.path, headers)
    model = args.model or endpoint.model()
    results = []
    for number in range(args.repeat_runs):
        seeded = argparse.Namespace(**vars(args) | {"seed": args.seed + number})  # other prompts
        outcome = run(seeded, endpoint, requests_of(seeded, endpoint, model))
        results.append(compute(outcome))
    result = combine(results)
    lines = [table(result)]
    if args.save_result:
        path = args.result_dir / (args.result_filename or "stream.json")
        path.write_text(json.dumps(result, indent=1) + "\n")
        lines.append(f"saved {path}")
    print(*lines, sep="\n")
    return result


def main(argv: Sequence[str]) -> None:
    """Run."""
    run_command("stream", __doc__, [add_target, add_workload, add_runs], bench, argv)
