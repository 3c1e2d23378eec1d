"""`headrace bench stream`: where the time of streamed answers goes, from the client to the model.

The server's part is what it says in `Server-Timing` when a request asks by `x-request-timing`, as
Headrace's do; a server that does not has "-" there.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.bench.connection import Record
from headrace.bench.endpoint import Endpoint
from headrace.bench.figures import Floats, Times
from headrace.bench.load import Outcome
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


def hops(records: list[Record], *names: str) -> Floats:
    """Return the sums of some spans that the server tells, ms; nothing where it tells none."""
    known = [[r.timing[name] for name in names if name in r.timing] for r in records]
    return np.array([sum(spans) for spans in known if spans], np.float64)


def rows(records: list[Record]) -> list[tuple[str, str, Floats]]:
    """Return the name, the unit and the values of each row."""
    times = Times.of(records)
    lag = np.array([1e3 * (record.sent - record.due) for record in records], np.float64)
    with np.errstate(divide="ignore"):
        speed = np.array([1e3 * r.output_tokens for r in records]) / times.e2el
    return [
        ("submit lag", "ms", lag),
        ("add request", "ms", hops(records, *ADDING)),
        ("tokenize", "ms", hops(records, "tokenize")),
        ("queue wait", "ms", hops(records, "queue")),
        ("prefill -> first token", "ms", hops(records, "prefill")),
        ("TTFT", "ms", times.ttft),
        ("TPOT", "ms", times.tpot[~np.isnan(times.tpot)]),
        ("ITL", "ms", times.itl),
        ("latency", "ms", times.e2el),
        ("throughput of a stream", "tok/s", speed),
    ]


def compute(outcome: Outcome) -> dict[str, Any]:
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


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = [COLUMNS]
    for name, row in result["rows"].items():
        figures = [row[column] for column in COLUMNS[2:]]
        cells = ["-" if figure is None else f"{figure:,.2f}" for figure in figures]
        lines.append((name, row["unit"], *cells))
    text = [
        f"{name:<24}{unit:<6}" + "".join(f"{cell:>12}" for cell in cells)
        for name, unit, *cells in lines
    ]
    text.append(
        f"{result['completed']} streams, {result['failed']} failed, in {result['duration']:.2f} s: "
        f"{result['output_throughput']:,.0f} tok/s together"
    )
    if result["client_bound"]:
        text.append("The load generator was the bottleneck: these figures are its own.")
    return "\n".join(text)


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Run what the flags say; print the table; return the result."""
    check(args)
    plain = endpoint_of(args)
    if BACKENDS[args.backend] == "embeddings":
        raise ConfigError(f"--backend {args.backend} does not stream")
    headers = plain.headers | {"x-request-timing": "1"}
    endpoint = Endpoint(plain.base_url, plain.kind, plain.path, headers)
    model = args.model or endpoint.model()
    result = compute(run(args, endpoint, requests_of(args, endpoint, model)))
    told = [table(result)]
    if args.save_result:
        path = args.result_dir / (args.result_filename or "stream.json")
        path.write_text(json.dumps(result, indent=1) + "\n")
        told.append(f"saved {path}")
    print(*told, sep="\n")
    return result


def main(argv: Sequence[str]) -> None:
    """Run."""
    run_command("stream", __doc__, [add_target, add_workload], bench, argv)
