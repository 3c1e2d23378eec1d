"""Measure the cost of the largest request of each kind to another client, and the memory it leaves.

Method: a model of one layer, so that all that takes long is around it. A process of its own reads a
        stream; beside it comes a request of each kind of `support/largest.py`, one after the other.
        The longest wait is the longest time between two pieces of that stream while the request is
        open. It is compared with the same stream alone, over the same time. Memory is what a
        process shares with no other: before, at most, and once all is answered. Each text that has
        been watched is asked for again, alone: texts that differ are counted, and so are deaths.
Run:    python bench/adversary.py --share 0.1
"""

import argparse
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import psutil

from support.largest import KINDS, Body
from support.memory_watch import MemoryWatch, own_bytes
from support.report import Quantity, Report, parser
from support.servers import Server, headrace
from support.tiny import tiny_folder
from support.watched_stream import WatchedStream

ALONE, BESIDE = "alone", "beside it"
BEFORE, MOST, AFTER = "before", "at most", "after"
ANSWER_S = 600.0
SETTLE_S = 2.0  # after the last answer, for memory to be given back
FLAGS = ("--kv-cache-dtype", "float32", "--kv-cache-memory-bytes", str(512 << 20))


@dataclass(frozen=True)
class Cost:
    """The effect of one request on the watched stream."""

    wait_ms: dict[str, float]
    took_s: float
    status: int
    is_right: bool  # the text of the stream


def ring(server: Server) -> Mapping[str, psutil.Process]:
    """Return the processes of a server by title."""
    return {process.cmdline()[0]: process for process in server.processes}


def post(url: str, body: Body) -> int:
    """Return a request's status; 0 where it has none."""
    path, data = body
    headers = {"Content-Type": "application/json"}
    try:
        return httpx.post(url + path, content=data, headers=headers, timeout=ANSWER_S).status_code
    except httpx.HTTPError:
        return 0


def measure(server: Server, body: Body, seed: int) -> Cost:
    """Watch a stream beside a request."""
    with WatchedStream(server.url, seed) as stream:
        begin = time.monotonic()
        status = post(server.url, body)
        end = time.monotonic()
    with WatchedStream(server.url, seed) as alone:
        alone_begin = time.monotonic()
        time.sleep(end - begin)
        alone_end = time.monotonic()
    waits = {
        ALONE: max(alone.waits_s(alone_begin, alone_end)) * 1e3,
        BESIDE: max(stream.waits_s(begin, end)) * 1e3,
    }
    same = min(len(alone.text), len(stream.text))
    is_right = alone.text[:same] == stream.text[:same]
    return Cost(waits, end - begin, status, is_right)


def add_memory(report: Report, watch: MemoryWatch, after: dict[str, int]) -> None:
    """Add a row for each process."""
    for title, before in watch.before.items():
        found = {BEFORE: before, MOST: watch.peak[title], AFTER: after.get(title, 0)}
        samples = {when: [size / 2**20] for when, size in found.items()}
        name = title.removeprefix("headrace: ")
        report.add(Quantity(f"memory of the {name}", "MiB", samples))


def main() -> None:
    """Run and print the report."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--share", type=float, default=1.0, help="of the largest size")
    options.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    args: argparse.Namespace = options.parse_args()
    report = Report("adversary", args)
    rows = {
        name: Quantity(f"longest wait: {name}", "ms", {BESIDE: [], ALONE: []})
        for name in args.kinds
    }
    num_wrong = 0
    with headrace(str(tiny_folder()), *FLAGS) as server:
        processes = ring(server)
        with MemoryWatch(processes) as watch:
            for seed in range(args.rounds):
                for name, row in rows.items():
                    draws = random.Random(f"{seed}/{name}")
                    cost = measure(server, KINDS[name](draws, args.share), seed)
                    num_wrong += not cost.is_right
                    for system, wait_ms in cost.wait_ms.items():
                        row.samples[system].append(wait_ms)
                    print(f"{name}: {cost.status} after {cost.took_s:.1f} s", flush=True)
            time.sleep(SETTLE_S)
        after = own_bytes(ring(server))
        restarts = server.metric("headrace:process_restarts_total") or 0.0
    for row in rows.values():
        report.add(row)
    add_memory(report, watch, after)
    report.add(Quantity("texts that are wrong", "", {BESIDE: [num_wrong]}))
    report.add(Quantity("deaths", "", {BESIDE: [restarts]}))
    report.finish()


if __name__ == "__main__":
    main()
