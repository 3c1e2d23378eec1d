"""Measure the throughput that remains at ten times the sustainable load.

Method: the demo model. The sustainable load is measured first. 64 clients each send a completion of
        16 to 48 tokens followed by the next, so that no place is ever free. Lengths differ since
        requests of one length, begun together, go on in step: all end at once, and the next are
        begun as one. A server makes a tenth more of that, which no traffic is. Then ten times as
        many requests per second arrive for a minute, at random moments (a Poisson process),
        independent of responses. The server rejects the excess with a 429. Another process asks for
        /health meanwhile, and every process's memory is looked at after 15 s and at the end.
        Goodput is the tokens of answers that were complete in that time, without its first 5 s. A
        refusal's time is from when the request was due. The load generator shares the cores.
Run:    python bench/overload.py --seconds 60
"""

import asyncio
import json
import random
import sys
from collections.abc import Iterable

import numpy as np

from headrace.bench.arrivals import arrival_times
from headrace.bench.connection import Record
from headrace.bench.load import LoadProgress, LoadRequest, LoadResult, Target, run_load
from support.health import HealthProbe
from support.report import Quantity, Report, parser
from support.servers import Server, headrace

NUM_SEQS = 32
NUM_CLIENTS = 2 * NUM_SEQS
MIN_TOKENS, MAX_TOKENS = 16, 48
NUM_TOKENS = (MIN_TOKENS + MAX_TOKENS) / 2  # on average
PEAK_S = 15.0  # about
MIN_ROUNDS = 4  # of all clients, however slow a machine is
RAMP_S = 5.0  # are not counted
SETTLED_S = 15.0  # until memory is first looked at
OVERLOAD = 10
GREEDY = {"temperature": 0, "ignore_eos": True}
PAUSE_S = 0.02  # between questions for /health: to ask takes of the cores, too


def requests(due: Iterable[float]) -> list[LoadRequest]:
    """Return requests that are sent when they are due, each of a length of its own."""
    lengths = random.Random(0)
    made = []
    for index, at in enumerate(due):
        length = lengths.randint(MIN_TOKENS, MAX_TOKENS)
        body = {"prompt": "Tell me a story.", "max_tokens": length, **GREEDY}
        made.append(LoadRequest(index, float(at), json.dumps(body).encode()))
    return made


def goodput(outcome: LoadResult, until_s: float) -> float:
    """Return the tokens a second of answers that were complete between the ramp and `until_s`."""
    begin, end = outcome.start + RAMP_S, outcome.start + until_s
    good = [r for r in outcome.records if not r.error and begin < r.last <= end]
    return sum(record.output_tokens for record in good) / (end - begin)


async def peak(target: Target) -> float:
    """Return how many tokens a second the server can make."""
    for _ in range(2):  # the second is warm
        once = await run_load(target, requests([0.0] * NUM_CLIENTS))
        seconds = max(record.last for record in once.records) - once.start
    number = max(int(PEAK_S / seconds), MIN_ROUNDS) * NUM_CLIENTS
    outcome = await run_load(target, requests([0.0] * number), NUM_CLIENTS)
    assert not any(record.error for record in outcome.records)
    return goodput(outcome, max(record.sent for record in outcome.records) - outcome.start)


async def overload(target: Target, rate: float, seconds: float) -> LoadResult:
    """Send so many requests a second, whatever comes back."""
    due = arrival_times(int(rate * seconds), rate, 1.0, np.random.default_rng(0))

    def show(progress: list[LoadProgress]) -> None:
        done = sum(process.num_done for process in progress)
        if sys.stdout.isatty():
            print(f"\r{done} of {len(due)} requests are answered ", end="", flush=True)

    return await run_load(target, requests(due), show=show)


def memory(server: Server) -> dict[str, float]:
    """Return what each process has in memory, MB."""
    return {
        process.cmdline()[0].removeprefix("headrace: "): process.memory_info().rss / 1e6
        for process in server.processes
    }


def refusals_ms(records: list[Record]) -> list[float]:
    """Return how long refusals took; raise where a request failed in another way."""
    failed = [record for record in records if record.error]
    strange = [record.error for record in failed if not record.error.startswith("status 429")]
    if strange:
        raise SystemExit(f"{len(strange)} requests failed: {strange[0]}")
    return [1e3 * (record.last - record.due) for record in failed]


async def measure(server: Server, seconds: float) -> list[Quantity]:
    """Return the measurements."""
    target = Target(f"{server.url}/v1/completions")
    best = await peak(target)
    rows = [Quantity("goodput at capacity", "tok/s", {"headrace": [best]}, True)]

    def add(name: str, unit: str, value: float, higher_is_better: bool = False) -> None:
        rows.append(Quantity(name, unit, {"headrace": [value]}, higher_is_better))

    with HealthProbe(server.url, PAUSE_S) as probe:
        running = asyncio.create_task(overload(target, OVERLOAD * best / NUM_TOKENS, seconds))
        await asyncio.sleep(SETTLED_S)
        before = memory(server)
        await asyncio.sleep(seconds - SETTLED_S)
        after = memory(server)
        outcome = await running
    refused = refusals_ms(outcome.records)
    left = goodput(outcome, seconds)
    add(f"goodput at {OVERLOAD} times that", "tok/s", left, True)
    add("share of goodput that is left", "", left / best, True)
    add("requests", "", len(outcome.records), True)
    add("requests refused", "", len(refused))
    for name, values in (("429", refused), ("/health", probe.latencies_ms)):
        add(f"{name}, median", "ms", float(np.median(values)))
        add(f"{name}, p99", "ms", float(np.percentile(values, 99)))
        add(f"{name}, longest", "ms", max(values))
    for name, size in after.items():
        add(f"growth, {name}", "%", 100 * (size / before[name] - 1))
    add("load generator", "cores", sum(outcome.busy))
    return rows


def main() -> None:
    """Run and print the report."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--seconds", type=float, default=60.0)
    args = options.parse_args()
    report = Report("overload", args)
    with headrace("--max-num-seqs", str(NUM_SEQS)) as server:
        for row in asyncio.run(measure(server, args.seconds)):
            report.add(row)
    report.finish()


if __name__ == "__main__":
    main()
