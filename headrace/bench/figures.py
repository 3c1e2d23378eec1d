"""Figures of a load, by the definitions of `vllm bench serve`.

- TTFT: from sending a request to its first piece of text.
- ITL: between a piece of text and the one before, of all requests together. A server that sends
  several tokens in a piece has fewer and longer ones.
- TPOT: (E2EL - TTFT) / (tokens - 1) of each request with more than one token.
- E2EL: from sending a request to its last piece of text.
- Goodput: requests a second that kept every promise of `--goodput`.
- Peak output throughput is of the best whole second. Peak concurrency is exact; vLLM counts the
  requests that were open at any time in a second.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.bench.connection import Record
from headrace.bench.load import LoadResult

Floats = npt.NDArray[np.float64]
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
WIDTH = 50


@dataclass(frozen=True)
class RequestTimes:
    """Milliseconds of the requests that succeeded."""

    ttft: Floats
    tpot: Floats  # nan where there is one token only
    e2el: Floats
    itl: Floats  # of all requests

    @classmethod
    def of(cls, records: list[Record]) -> "RequestTimes":
        """Compute them."""
        sent, first, last = (
            np.array([getattr(record, name) for record in records], np.float64)
            for name in ("sent", "first", "last")
        )
        more = np.array([record.output_tokens - 1 for record in records], np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot = np.where(more > 0, (last - first) / more, np.nan)
        gaps = np.frombuffer(b"".join(record.gaps for record in records), np.float32)
        return cls(
            1e3 * (first - sent), 1e3 * tpot, 1e3 * (last - sent), 1e3 * gaps.astype(np.float64)
        )

    def good(self, promises: dict[str, float]) -> int:
        """Return how many requests kept every promise, milliseconds by metric."""
        kept = np.ones(len(self.ttft), bool)
        for metric, limit in promises.items():
            values: Floats = np.nan_to_num(getattr(self, metric))  # one token alone is in time
            kept &= values <= limit
        return int(kept.sum())


def statistics_of(values: Floats, percentiles: list[float]) -> dict[str, float]:
    """Return mean, median, std and percentiles; zeros of nothing."""
    values = values[~np.isnan(values)]
    if not len(values):
        values = np.zeros(1)
    figures = {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "std": float(values.std()),
    }
    return figures | {f"p{p:g}": float(np.percentile(values, p)) for p in percentiles}


def max_open(records: list[Record]) -> int:
    """Return how many requests were open at once, at most."""
    changes = [(record.sent, 1) for record in records] + [(record.last, -1) for record in records]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def per_second(records: list[Record], start: float) -> tuple[Floats, Floats]:
    """Return tokens that came and requests that were open at all in each second from `start`."""
    end = max((record.last for record in records), default=start)
    tokens = np.zeros(int(end - start) + 1)
    changes = np.zeros(len(tokens) + 1)
    for record in records:
        came = (
            record.first
            - start
            + np.concatenate(
                ([0.0], np.cumsum(np.frombuffer(record.gaps, np.float32), dtype=np.float64))
            )
        )
        weight = record.output_tokens / len(came)  # of a piece
        seconds = np.minimum(came.astype(np.int64), len(tokens) - 1)
        tokens += weight * np.bincount(seconds, minlength=len(tokens))
        changes[int(record.sent - start)] += 1
        changes[int(record.last - start) + 1] -= 1
    return tokens, np.cumsum(changes)[:-1]


@dataclass(frozen=True)
class Settings:
    """Values of the command line that the result repeats."""

    request_rate: float
    burstiness: float
    max_concurrency: int | None
    metrics: list[str]
    percentiles: list[float]
    promises: dict[str, float]


def compute(outcome: LoadResult, settings: Settings) -> dict[str, Any]:
    """Return the result; its keys are those of vLLM's files where they mean the same."""
    good = [record for record in outcome.records if not record.error]
    errors = [record.error for record in outcome.records if record.error]
    times = RequestTimes.of(good)
    end = max((record.last for record in good), default=outcome.start)
    duration = max(end - outcome.start, 1e-9)
    num_input = sum(record.prompt_tokens for record in good)
    num_output = sum(record.output_tokens for record in good)
    tokens, _ = per_second(good, outcome.start)
    result: dict[str, Any] = {
        "request_rate": settings.request_rate if np.isfinite(settings.request_rate) else "inf",
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(errors),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": float(tokens.max()),
        "max_concurrent_requests": max_open(good),
    }
    if settings.promises:
        result["request_goodput"] = times.good(settings.promises) / duration
    for metric in settings.metrics:
        figures = statistics_of(getattr(times, metric), settings.percentiles)
        result |= {f"{name}_{metric}_ms": value for name, value in figures.items()}
    late = [max(0.0, record.sent - record.due) for record in good]
    result |= {
        "client_busy": [round(busy, 3) for busy in outcome.busy],
        "client_bound": outcome.is_client_bound,
        "sent_late_p99_ms": 1e3 * float(np.percentile(late or [0.0], 99)),
        "errors": sorted(set(errors))[:10],
    }
    return result


def table(result: dict[str, Any], settings: Settings) -> str:
    """Return the result as text, in the form of vLLM's table."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]

    def row(name: str, value: float | int) -> None:
        lines.append(line(name, value))

    row("Successful requests", result["completed"])
    row("Failed requests", result["failed"])
    if settings.max_concurrency is not None:
        row("Maximum request concurrency", settings.max_concurrency)
    if np.isfinite(settings.request_rate):
        row("Request rate configured (RPS)", settings.request_rate)
    row("Benchmark duration (s)", result["duration"])
    row("Total input tokens", result["total_input_tokens"])
    row("Total generated tokens", result["total_output_tokens"])
    row("Request throughput (req/s)", result["request_throughput"])
    if "request_goodput" in result:
        row("Request goodput (req/s)", result["request_goodput"])
    row("Output token throughput (tok/s)", result["output_throughput"])
    row("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"])
    row("Peak concurrent requests", result["max_concurrent_requests"])
    row("Total token throughput (tok/s)", result["total_token_throughput"])
    for metric in settings.metrics:
        lines.append(TITLES[metric].center(WIDTH, "-"))
        names = ["mean", "median", *(f"p{p:g}" for p in settings.percentiles)]
        for name in names:
            row(f"{name.capitalize()} {metric.upper()} (ms)", result[f"{name}_{metric}_ms"])
    lines += draft_lines(result)
    lines.append("=" * WIDTH)
    if result["client_bound"]:
        busiest = max(result["client_busy"])
        lines.append(
            f"The load generator was the bottleneck ({busiest:.0%} of a core in one process): "
            "these figures are its own. Use more --client-procs, or cores apart from the server's."
        )
    if result["errors"]:
        lines += ["Failed with:", *(f"  {error}" for error in result["errors"])]
    return "\n".join(lines)


def line(name: str, value: float | int) -> str:
    """Return a line of the table."""
    number = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name + ':':<40} {number:<10}".rstrip()


def draft_lines(result: dict[str, Any]) -> list[str]:
    """Return how drafts fared, if there were some."""
    if "spec_decode_acceptance_rate" not in result:
        return []
    rates = result["spec_decode_per_position_acceptance_rates"]
    return [
        "Speculative Decoding".center(WIDTH, "-"),
        line("Acceptance rate (%)", result["spec_decode_acceptance_rate"]),
        line("Acceptance length", result["spec_decode_acceptance_length"]),
        line("Drafts", result["spec_decode_num_drafts"]),
        line("Draft tokens", result["spec_decode_draft_tokens"]),
        line("Accepted tokens", result["spec_decode_accepted_tokens"]),
        *(line(f"Acceptance at position {i} (%)", rate) for i, rate in enumerate(rates)),
    ]
