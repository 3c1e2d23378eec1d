"""What does the Ring tab of the web page cost the server while it is open?

Method: a server with the mock engine, whose steps take no time. Turns without a page alternate
        with turns beside one, which reads `/ring/events` as the tab does. A second turn without
        tells what is noise. In each turn `/health` is asked 2,000 times over one connection while
        nothing else happens. Then 64 clients ask for chats of 64 streamed tokens. The order changes
        with each round. At the end nothing happens for a while, and the processor time of the
        server is taken. The load generator shares the cores.
        Pairs of turns, closed and open in an order that changes, have the same load and count the
        server's processor time per token. The interval is Student's, of the pairs' differences.
        They also count that of the process for GETs, which does the work for the tab. What it takes
        more is the share of the cores that the ring lacks.
Run:    python bench/ring_tab.py --rounds 20; python bench/ring_tab.py --rounds 0 --pairs 24
"""

import asyncio
import http.client
import math
import socket
import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from psutil import Process

from support.chats import NUM_TOKENS, chat, generator
from support.report import Quantity, Report, parser
from support.servers import Server, headrace

STREAMS = 64
WARM_UP_S = 1
NUM_REQUESTS = 2000
CLOSED, OPEN, AGAIN = "closed", "open", "closed again"
TURNS = (CLOSED, OPEN, AGAIN)
IDLE_S, NUM_IDLE = 4, 3
PAIR_S = 2  # of a load
STUDENT_95 = 2.07  # of 24 pairs; of 20 it is 2.09
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


def ask_health(server: Server) -> list[float]:
    """Return how long `/health` took each time, ms."""
    url = urlsplit(server.url)
    assert url.hostname is not None
    client = http.client.HTTPConnection(url.hostname, url.port)
    took = []
    for _ in range(NUM_REQUESTS):
        began = time.perf_counter()
        client.request("GET", "/health")
        answer = client.getresponse()
        assert answer.status == 200
        answer.read()
        took.append(1e3 * (time.perf_counter() - began))
    client.close()
    return took


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


def loaded(server: Server, turn: str) -> tuple[float, float]:
    """Return processor time under a load: us per token of all, ms per s of the GETs' process."""
    gets = [get_process(server)]
    with page(server) if turn == OPEN else nullcontext():
        before, before_gets, began = cpu_s(server.processes), cpu_s(gets), time.perf_counter()
        result = asyncio.run(chat(server.url, STREAMS, PAIR_S))
        assert not result.num_failures, f"{result.num_failures} requests failed"
        seconds = time.perf_counter() - began
        tokens_us = 1e6 * (cpu_s(server.processes) - before) / (result.num_requests * NUM_TOKENS)
        return tokens_us, 1e3 * (cpu_s(gets) - before_gets) / seconds


def add_pairs(report: Report, server: Server, num_pairs: int) -> None:
    """Measure turns in pairs, and add what a token takes, and the interval of the difference."""
    took: dict[str, list[float]] = {CLOSED: [], OPEN: []}
    gets: dict[str, list[float]] = {CLOSED: [], OPEN: []}
    for number in range(num_pairs):
        for turn in (CLOSED, OPEN) if number % 2 else (OPEN, CLOSED):
            token_us, gets_ms = loaded(server, turn)
            took[turn].append(token_us)
            gets[turn].append(gets_ms)
    report.add(Quantity("processor time under load of the process for GETs", "ms per s", gets))
    report.add(Quantity("processor time per token", "us", took))
    more = [100 * (b / a - 1) for a, b in zip(took[CLOSED], took[OPEN], strict=True)]
    mean, error = statistics.mean(more), statistics.stdev(more) / math.sqrt(num_pairs)
    width = STUDENT_95 * error
    name = "processor time per token, more when open"
    for which, value in (("mean", mean), ("95 % from", mean - width), ("95 % to", mean + width)):
        report.add(Quantity(f"{name}, {which}", "%", {OPEN: [value]}))


def idle_ms(server: Server) -> float:
    """Return the processor time of a second in which nothing happens, ms."""
    before = cpu_s(server.processes)
    time.sleep(IDLE_S)
    return 1e3 * (cpu_s(server.processes) - before) / IDLE_S


def main() -> None:
    """Run and print the report."""
    options = parser(__doc__, rounds=20)
    options.add_argument("--seconds", type=float, default=1.5, help="of each load")
    options.add_argument("--pairs", type=int, default=0, help="of turns that count processor time")
    args = options.parse_args()
    report = Report("ring_tab", args)
    report.versions["load"] = generator()
    health: dict[str, list[float]] = {turn: [] for turn in TURNS}
    speed: dict[str, list[float]] = {turn: [] for turn in TURNS}
    idle: dict[str, list[float]] = {CLOSED: [], OPEN: []}
    with headrace("--engine", "mock", "--mock-profile", "zero") as server:
        asyncio.run(chat(server.url, STREAMS, WARM_UP_S))
        for number in range(args.rounds):
            for turn in TURNS if number % 2 else reversed(TURNS):
                with page(server) if turn == OPEN else nullcontext():
                    health[turn].append(statistics.quantiles(ask_health(server), n=100)[98])
                    result = asyncio.run(chat(server.url, STREAMS, args.seconds))
                    assert not result.num_failures, f"{result.num_failures} requests failed"
                    speed[turn].append(result.tokens_per_s)
        if args.pairs:
            add_pairs(report, server, args.pairs)
        for _ in range(NUM_IDLE if args.rounds else 0):
            idle[CLOSED].append(idle_ms(server))
            with page(server):
                idle[OPEN].append(idle_ms(server))
    for name, other in (("", OPEN), (", noise", AGAIN)) if args.rounds else ():
        report.add(Quantity(f"/health, p99{name}", "ms", pair(health, other)))
        streams = f"no step time, {STREAMS} streams{name}"
        report.add(Quantity(streams, "tok/s", pair(speed, other), higher_is_better=True))
    if args.rounds:
        report.add(Quantity("processor time when idle", "ms per s", idle))
    report.finish()


def pair(samples: dict[str, list[float]], other: str) -> dict[str, list[float]]:
    """Return the samples of turns without a page, and of another kind."""
    return {turn: samples[turn] for turn in (CLOSED, other)}


if __name__ == "__main__":
    main()
