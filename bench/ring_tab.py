"""What does the Ring tab of the web page cost the server while it is open?

Method: a server with the mock engine, whose steps take no time. Short turns without a page and
        beside one, which reads `/ring/events` as the tab does, come in pairs whose order changes.
        In a turn `/health` is asked over one connection while nothing else happens, or 64 clients
        ask for chats of 64 streamed tokens. A turn lasts as long as it is from one event to the
        next. The figure is the median of the pairs' ratios with its 95 % interval. A machine whose
        speed changes from pair to pair leaves both as they are. The load generator shares the
        cores. The process for GETs does the work for the tab: its processor time is taken under the
        load. That of the whole server is taken where nothing happens.
Run:    python bench/ring_tab.py; python bench/ring_tab.py --pairs 200 --of ring
"""

import asyncio
import http.client
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from psutil import Process

from support.chats import chat, generator
from support.paired import measure_pairs, median_ratio
from support.report import Quantity, Report, parser
from support.servers import Server, headrace

STREAMS = 64
WARM_UP_S = 1
TURN_S = 1.0  # events come as often
CLOSED, OPEN = "closed", "open"
KINDS = (HEALTH, RING, IDLE) = ("health", "ring", "idle")
IDLE_S, NUM_IDLE = 4, 3
PIECE_BYTES = 1 << 16
REQUEST = b"GET /ring/events HTTP/1.1\r\nHost: bench\r\n\r\n"


@contextmanager
def page(server: Server) -> Iterator[None]:
    """Read the events of the ring, as a page does, until the end of the block."""
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(REQUEST)
        head = connection.recv(PIECE_BYTES)
        assert b" 200 OK\r\n" in head, head
        reader = threading.Thread(target=read_all, args=(connection,))
        reader.start()
        yield
        connection.shutdown(socket.SHUT_RDWR)
        reader.join()


def read_all(connection: socket.socket) -> None:
    """Read until the connection ends, or is reset."""
    with suppress(ConnectionResetError):
        while connection.recv(PIECE_BYTES):
            pass


def health_p99(server: Server) -> float:
    """Return how long `/health` takes, ms: the 99th percentile of a turn."""
    url = urlsplit(server.url)
    assert url.hostname is not None
    client = http.client.HTTPConnection(url.hostname, url.port)
    took = []
    end = time.perf_counter() + TURN_S
    while (began := time.perf_counter()) < end:
        client.request("GET", "/health")
        answer = client.getresponse()
        assert answer.status == 200
        answer.read()
        took.append(1e3 * (time.perf_counter() - began))
    client.close()
    return statistics.quantiles(took, n=100)[98]


def cpu_s(processes: Iterable[Process]) -> float:
    """Return the processor time of all threads so far, as the scheduler has counted it."""
    threads = (Path(f"/proc/{process.pid}/task").glob("*/schedstat") for process in processes)
    return sum(int(path.read_text().split()[0]) for path in chain.from_iterable(threads)) / 1e9


def get_process(server: Server) -> Process:
    """Return the process that answers GETs, and looks at the ring for the tab."""
    return max(
        (each for each in server.processes if "tokenizer" in each.cmdline()[0]),
        key=lambda each: each.cmdline()[0],
    )


def tokens_per_s(server: Server, gets_ms: list[float]) -> float:
    """Return how fast a turn's chats are; add what the process for GETs takes, ms a second."""
    gets = [get_process(server)]
    before, began = cpu_s(gets), time.perf_counter()
    result = asyncio.run(chat(server.url, STREAMS, TURN_S))
    assert not result.num_failures, f"{result.num_failures} requests failed"
    gets_ms.append(1e3 * (cpu_s(gets) - before) / (time.perf_counter() - began))
    return result.tokens_per_s


def idle_ms(server: Server) -> float:
    """Return the processor time of a second in which nothing happens, ms."""
    before = cpu_s(server.processes)
    time.sleep(IDLE_S)
    return 1e3 * (cpu_s(server.processes) - before) / IDLE_S


def pairs(server: Server, num_pairs: int, take: Callable[[str], float]) -> dict[str, list[float]]:
    """Return samples without a page and beside one; `take` measures a turn of either kind."""

    def beside_page() -> float:
        with page(server):
            return take(OPEN)

    samples = measure_pairs(num_pairs, lambda: take(CLOSED), beside_page)
    return dict(zip((CLOSED, OPEN), samples, strict=True))


def add_ratio(report: Report, quantity: Quantity) -> None:
    """Add a quantity, and the ratio of open to closed with its interval."""
    report.add(quantity)
    ends = median_ratio(quantity.samples[CLOSED], quantity.samples[OPEN])
    for which, value in zip(("median", "95 % from", "95 % to"), ends, strict=True):
        report.add(Quantity(f"{quantity.name}, open to closed, {which}", "", {OPEN: [value]}))


def measure(report: Report, server: Server, num_pairs: int, what: str) -> None:
    """Measure one thing and add its rows."""
    if what == HEALTH:
        found = pairs(server, num_pairs, lambda _: health_p99(server))
        add_ratio(report, Quantity("/health, p99", "ms", found))
    elif what == RING:
        gets: dict[str, list[float]] = {CLOSED: [], OPEN: []}
        found = pairs(server, num_pairs, lambda turn: tokens_per_s(server, gets[turn]))
        name = f"no step time, {STREAMS} streams"
        add_ratio(report, Quantity(name, "tok/s", found, higher_is_better=True))
        report.add(Quantity("processor time of the process for GETs under load", "ms per s", gets))
    else:
        found = pairs(server, NUM_IDLE, lambda _: idle_ms(server))
        report.add(Quantity("processor time when idle", "ms per s", found))


def main() -> None:
    """Run and print the report."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--pairs", type=int, default=80, help="of turns")
    options.add_argument("--of", nargs="*", choices=KINDS, default=KINDS, help="what to measure")
    args = options.parse_args()
    report = Report("ring_tab", args)
    report.versions["load"] = generator()
    with headrace("--engine", "mock", "--mock-profile", "zero") as server:
        asyncio.run(chat(server.url, STREAMS, WARM_UP_S))
        for what in args.of:
            measure(report, server, args.pairs, what)
    report.finish()


if __name__ == "__main__":
    main()
