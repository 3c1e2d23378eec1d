"""Does anything stay behind when clients leave in the middle of an answer?

Method: the whole ring with the mock engine at 2 ms per step. Clients open streams of 4,000 tokens,
        500 at a time, read the first bytes and close the connection. Every process's memory is
        measured after a warm-up and after 10,000 streams. So is the time until no sequence, reply
        or connection is left.
Run:    python bench/abandoned.py --streams 10000
"""

import asyncio
import json
import time
from urllib.parse import urlsplit

from support.report import Quantity, Report, parser
from support.servers import Server, headrace

WAVE = 500
WARM_UP_WAVES = 30  # until heaps have their full size: a frontend's 66 MB, after 5,000 or 40,000
MAX_TOKENS = 4000
LEASE_S = 10.0  # after which nothing may be left, whatever was lost
MAX_GROWTH = 5.0  # of a process, per cent
GAUGES = ("num_requests_running", "num_requests_waiting", "replies_open", "http_connections")
FLAGS = (
    *("--engine", "mock", "--mock-profile", "2ms"),
    *("--max-num-seqs", str(WAVE), "--max-num-batched-tokens", "4096"),
)
BODY = json.dumps(
    {"prompt": "Tell me a story.", "max_tokens": MAX_TOKENS, "stream": True, "ignore_eos": True}
).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
) + BODY


async def abandon(host: str, port: int) -> None:
    """Ask, read the first bytes of the answer, and leave."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(REQUEST)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    await reader.readuntil(b"\n\n")
    writer.transport.abort()


async def wave(server: Server, count: int) -> None:
    """Abandon so many streams at once."""
    where = urlsplit(server.url)
    assert where.hostname is not None
    assert where.port is not None
    await asyncio.gather(*(abandon(where.hostname, where.port) for _ in range(count)))


def left(server: Server) -> float:
    """Return how much of what clients have left is still there."""
    found = [server.metric(f"headrace:{name}") for name in GAUGES]
    assert None not in found
    return sum(value for value in found if value) - 1  # the connection that asks


def wait_empty(server: Server) -> float:
    """Wait until nothing is left; return how many seconds that took, or raise."""
    began = time.perf_counter()
    while left(server) > 0:
        if time.perf_counter() - began > LEASE_S:
            raise SystemExit(f"{left(server):.0f} requests are left after {LEASE_S} s")
    return time.perf_counter() - began


def memory(server: Server) -> dict[str, float]:
    """Return what each process has in memory, MB."""
    return {
        process.cmdline()[0].removeprefix("headrace: "): process.memory_info().rss / 1e6
        for process in server.processes
    }


def main() -> None:
    """Run and print the report."""
    options = parser(__doc__, rounds=1)
    options.add_argument("--streams", type=int, default=10_000)
    args = options.parse_args()
    report = Report("abandoned", args)
    with headrace(*FLAGS) as server:
        for _ in range(WARM_UP_WAVES):
            asyncio.run(wave(server, WAVE))
        wait_empty(server)
        before = memory(server)
        for _ in range(args.streams // WAVE):
            asyncio.run(wave(server, WAVE))
        seconds = wait_empty(server)
        after = memory(server)
    report.add(Quantity("until nothing is left", "s", {"headrace": [seconds]}))
    grown: list[str] = []
    for name, size in after.items():
        report.add(Quantity(f"memory, {name}", "MB", {"headrace": [size]}))
        growth = 100 * (size / before[name] - 1)
        report.add(Quantity(f"growth, {name}", "%", {"headrace": [growth]}))
        grown += [name] if growth > MAX_GROWTH else []
    report.finish()
    if grown:
        raise SystemExit(f"grown by more than {MAX_GROWTH} %: {', '.join(grown)}")


if __name__ == "__main__":
    main()
