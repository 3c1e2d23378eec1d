"""Measure the cost of thousands of idle connections to active ones.

Method: a server with the mock engine. `/health` is asked 500 times over one connection, with no
        other open, then beside 10,000 on which nothing comes; rounds alternate. The frontend's
        memory is looked at with all of them open. The server parts from them after 20 s.
Run:    python bench/idle_connections.py --rounds 3
"""

import http.client
import resource
import socket
import statistics
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

from support.report import Quantity, Report, parser
from support.servers import Server, headrace

NUM_CONNECTIONS = 10_000
NUM_REQUESTS = 500
ALONE, CROWDED = "alone", "beside 10,000"


def ask(where: tuple[str, int]) -> list[float]:
    """Return how long `/health` took each time, ms."""
    took = []
    client = http.client.HTTPConnection(*where)
    for _ in range(NUM_REQUESTS):
        began = time.perf_counter()
        client.request("GET", "/health")
        answer = client.getresponse()
        assert answer.status == 200
        assert answer.read()
        took.append(1e3 * (time.perf_counter() - began))
    client.close()
    return took


def frontend_mb(server: Server) -> float:
    """Return the frontend's memory."""
    (frontend,) = (p for p in server.processes if p.cmdline()[0].startswith("headrace: frontend"))
    size: int = frontend.memory_info().rss
    return size / 1e6


def main() -> None:
    """Run and print the report."""
    args = parser(__doc__, rounds=3).parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report = Report("idle_connections", args)
    samples: dict[str, dict[str, list[float]]] = {
        name: {ALONE: [], CROWDED: []} for name in ("median", "p99", "max")
    }
    memory: dict[str, list[float]] = {ALONE: [], CROWDED: []}
    with headrace("--engine", "mock") as server:
        url = urlsplit(server.url)
        assert url.hostname is not None
        assert url.port is not None
        where = (url.hostname, url.port)
        for _ in range(args.rounds):
            for system, count in ((ALONE, 0), (CROWDED, NUM_CONNECTIONS)):
                with ExitStack() as idle:
                    for _ in range(count):
                        idle.enter_context(socket.create_connection(where))
                    took = ask(where)
                    memory[system].append(frontend_mb(server))
                samples["median"][system].append(statistics.median(took))
                samples["p99"][system].append(statistics.quantiles(took, n=100)[98])
                samples["max"][system].append(max(took))
    for name, by_system in samples.items():
        report.add(Quantity(f"/health, {name}", "ms", by_system))
    report.add(Quantity("memory of the frontend", "MB", memory))
    report.finish()


if __name__ == "__main__":
    main()
