"""What does the Ring tab of the web page cost the server while it is open?

Method: a server with the mock engine, whose steps take no time. Turns without a page alternate
        with turns beside one, which reads `/ring/events` as the tab does. A second turn without
        tells what is noise. In each turn `/health` is asked 2,000 times over one connection while
        nothing else happens. Then 64 clients ask for chats of 64 streamed tokens. The order changes
        with each round. At the end nothing happens for a while, and the processor time of the
        server is taken. The load generator shares the cores.
Run:    python bench/ring_tab.py --rounds 20
"""

import asyncio
import http.client
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from support.chats import chat, generator
from support.report import Quantity, Report, parser
from support.servers import Server, headrace

STREAMS = 64
WARM_UP_S = 1
NUM_REQUESTS = 2000
CLOSED, OPEN, AGAIN = "closed", "open", "closed again"
TURNS = (CLOSED, OPEN, AGAIN)
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


def cpu_s(server: Server) -> float:
    """Return the processor time of all threads so far, as the scheduler has counted it."""
    threads = (
        Path(f"/proc/{process.pid}/task").glob("*/schedstat") for process in server.processes
    )
    return sum(int(path.read_text().split()[0]) for path in chain.from_iterable(threads)) / 1e9


def idle_ms(server: Server) -> float:
    """Return the processor time of a second in which nothing happens, ms."""
    before = cpu_s(server)
    time.sleep(IDLE_S)
    return 1e3 * (cpu_s(server) - before) / IDLE_S


def main() -> None:
    """Run and print the report."""
    options = parser(__doc__, rounds=20)
    options.add_argument("--seconds", type=float, default=1.5, help="of each load")
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
        for _ in range(NUM_IDLE):
            idle[CLOSED].append(idle_ms(server))
            with page(server):
                idle[OPEN].append(idle_ms(server))
    for name, other in (("", OPEN), (", noise", AGAIN)):
        report.add(Quantity(f"/health, p99{name}", "ms", pair(health, other)))
        streams = f"no step time, {STREAMS} streams{name}"
        report.add(Quantity(streams, "tok/s", pair(speed, other), higher_is_better=True))
    report.add(Quantity("processor time when idle", "ms per s", idle))
    report.finish()


def pair(samples: dict[str, list[float]], other: str) -> dict[str, list[float]]:
    """Return the samples of turns without a page, and of another kind."""
    return {turn: samples[turn] for turn in (CLOSED, other)}


if __name__ == "__main__":
    main()
