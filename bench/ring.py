"""Measure the throughput of everything around the model, and its overhead per step.

Method: the whole ring, HTTP included, with the mock engine. Chats of 64 streamed tokens come from
        1, 64 or 256 clients at once, each followed by the next. Steps of zero time show the
        capacity of the ring, steps of 2 ms its overhead. The ideal at 256 is 128,000 tok/s, 128 ms,
        and 2 ms between a stream's tokens. Those gaps are timed on 4 streams among the 256. Clients
        begin all at once, and that wait counts: it is what p99 shows. With steps of 2 ms and 256
        streams, p99 is 155 to 161 ms in 4 s, 151 in 10 s, 146 in 20 s. Then the same chats with a
        model of one layer, which costs next to nothing, with steps sent ahead and without
        (--no-async-scheduling). The load generator shares the cores; it is wrk where that is
        installed. Processor time is all that a process used, per token of the load.
Run:    python bench/ring.py --rounds 3
"""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import httpx
import numpy as np

from headrace.bench.connection import Record
from support.chats import Chats, chat, generator, probe
from support.report import Quantity, Report, parser
from support.servers import Server, headrace
from support.tiny import tiny_folder

STREAMS = (1, 64, 256)
TINY_STREAMS = (1, 64)
NUM_PROBES = 4
WARM_UP_S = 1
LAG = re.compile(r'^headrace:event_loop_lag_seconds_bucket{le="([^"]+)".*} (\S+)$', re.MULTILINE)
SYSTEM = "headrace"


class Rows:
    """The rows of the table, each with a sample per round."""

    def __init__(self) -> None:
        self.by_name: dict[str, Quantity] = {}

    def add(self, name: str, unit: str, value: float, higher_is_better: bool = False) -> None:
        """Add a sample to a row."""
        row = self.by_name.setdefault(name, Quantity(name, unit, {SYSTEM: []}, higher_is_better))
        row.samples[SYSTEM].append(value)


def lag_counts(server: Server) -> dict[float, float]:
    """Return how many timers of all frontends fired at most so late, by seconds."""
    counts: dict[float, float] = {}
    for bound, count in LAG.findall(httpx.get(f"{server.url}/metrics").text):
        counts[float(bound)] = counts.get(float(bound), 0.0) + float(count)
    return dict(sorted(counts.items()))


def quantile_ms(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """Return a quantile of the observations between two snapshots, interpolated within its
    bucket."""
    counts = [(0.0, 0.0), *((bound, after[bound] - before.get(bound, 0.0)) for bound in after)]
    wanted = share * counts[-1][1]
    for (low, below), (high, count) in pairwise(counts):
        if count >= wanted > 0:
            inside = (wanted - below) / (count - below)
            return 1e3 * (low if high == float("inf") else low + inside * (high - low))
    return 0.0


def cpu_s(server: Server) -> dict[str, float]:
    """Return the processor time of each kind of process so far."""
    used: dict[str, float] = {}
    for process in server.processes:
        kind = kind_of(process.cmdline())
        used[kind] = used.get(kind, 0.0) + sum(process.cpu_times()[:2])
    return used


def kind_of(command: list[str]) -> str:
    """Return "frontend" of "headrace: frontend 0"."""
    return command[0].removeprefix("headrace: ").split()[0]


def checked(result: Chats) -> Chats:
    """Return a load's result if nothing went wrong in it."""
    if result.num_failures or not result.num_requests:
        raise SystemExit(f"{result.num_failures} of {result.num_requests} requests failed")
    return result


def gaps_ms(records: list[Record]) -> Iterator[float]:
    """Yield the milliseconds between the tokens of each stream."""
    for record in records:
        if record.error:
            raise SystemExit(record.error)
        yield from 1e3 * np.frombuffer(record.gaps, np.float32)


async def load_nothing(rows: Rows, server: Server, seconds: float) -> None:
    """Measure with steps that take no time."""
    for streams in STREAMS:
        await chat(server.url, streams, WARM_UP_S)
        lag, used = lag_counts(server), cpu_s(server)
        result = checked(await chat(server.url, streams, seconds))
        tokens = result.num_requests * 64
        rows.add(f"no step time, {streams} streams", "tok/s", result.tokens_per_s, True)
        rows.add(f"no step time, {streams} streams, p50", "ms per request", result.p50_ms)
        rows.add(f"no step time, {streams} streams, p99", "ms per request", result.p99_ms)
        if (after := lag_counts(server)) != lag:
            late = quantile_ms(lag, after, 0.99)
            rows.add(f"event loop lag, {streams} streams, p99", "ms", late)
        if streams == max(STREAMS):
            for kind, before in used.items():
                us = 1e6 * (cpu_s(server)[kind] - before) / tokens
                rows.add(f"processor time of the {kind}", "us per token", us)
    for process in server.processes:
        kind, rss = kind_of(process.cmdline()), process.memory_info().rss
        rows.add(f"memory of the {kind}", "MB", rss / 1e6)


async def load_steps(rows: Rows, server: Server, seconds: float) -> None:
    """Measure with steps of 2 ms."""
    streams = max(STREAMS)
    await chat(server.url, streams, WARM_UP_S)
    result, records = await asyncio.gather(
        chat(server.url, streams - NUM_PROBES, seconds), probe(server.url, NUM_PROBES, seconds)
    )
    both = checked(result).tokens_per_s * streams / (streams - NUM_PROBES)
    rows.add(f"2 ms per step, {streams} streams", "tok/s", both, True)
    rows.add(f"2 ms per step, {streams} streams, p50", "ms per request", result.p50_ms)
    rows.add(f"2 ms per step, {streams} streams, p99", "ms per request", result.p99_ms)
    gaps = list(gaps_ms(records))
    rows.add("2 ms per step, between tokens, p50", "ms", float(np.percentile(gaps, 50)))
    rows.add("2 ms per step, between tokens, p99", "ms", float(np.percentile(gaps, 99)))


async def load_tiny(rows: Rows, server: Server, seconds: float) -> None:
    """Measure with the model of one layer."""
    await load_model(rows, server, seconds, "one layer")


async def load_in_turn(rows: Rows, server: Server, seconds: float) -> None:
    """Measure the same, no step sent before the last has ended."""
    await load_model(rows, server, seconds, "one layer, no step ahead")


async def load_model(rows: Rows, server: Server, seconds: float, name: str) -> None:
    """Measure with a model."""
    for streams in TINY_STREAMS:
        await chat(server.url, streams, WARM_UP_S)
        result = checked(await chat(server.url, streams, seconds))
        rows.add(f"{name}, {streams} streams", "tok/s", result.tokens_per_s, True)
        rows.add(f"{name}, {streams} streams, p99", "ms per request", result.p99_ms)


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--seconds", type=float, default=6, help="of each load")
    args = options.parse_args()
    report = Report("ring", args)
    report.versions["load"] = generator()
    seats = ("--max-num-seqs", str(max(STREAMS)), "--max-num-batched-tokens", "8192")
    tiny = str(tiny_folder()), "--max-model-len", "4096"
    loads = {
        load_nothing: ("--engine", "mock", "--mock-profile", "zero"),
        load_steps: ("--engine", "mock", "--mock-profile", "2ms"),
        load_tiny: tiny,
        load_in_turn: (*tiny, "--no-async-scheduling"),
    }
    rows = Rows()
    with ExitStack() as stack:  # servers that have nothing to do use no core
        servers = [stack.enter_context(headrace(*flags, *seats)) for flags in loads.values()]
        began = time.perf_counter()
        for number in range(args.rounds):
            for load, server in zip(loads, servers, strict=True):
                asyncio.run(load(rows, server, args.seconds))
            print(f"round {number + 1}: {time.perf_counter() - began:.0f} s", flush=True)
    for row in rows.by_name.values():
        report.add(row)
    report.finish()


if __name__ == "__main__":
    main()
