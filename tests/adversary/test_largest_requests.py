"""The largest request of each kind takes nothing from a stream of another client."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import httpx
import pytest
from attack_rounds import BUDGET_S, DEFAULT_S, attack_rounds
from servers import RunningServer

from support.largest import KINDS, Body
from support.watched_stream import WatchedStream

TIMEOUT_S = 600
# Of the largest size: some are just small enough to be taken. One round of those takes minutes.
SHARES = (0.01, 0.1, 0.3, 1.0) if BUDGET_S > DEFAULT_S else (0.01, 0.03)
ANSWERS = {200, 400, 413, 429}
MOST = 0.5  # of the time that a request takes is the longest that a stream may wait,
MANY = 200  # or so many times what it waits in between: a short request is shorter than a step


@pytest.fixture(scope="module")
def tiny_server(tiny_folder: Path) -> Iterator[RunningServer]:
    """A server of a model of one layer, with room for long prompts."""
    flags = ("--kv-cache-dtype", "float32", "--kv-cache-memory-bytes", str(512 << 20))
    running = RunningServer(str(tiny_folder), *flags)
    yield running
    assert running.stop() == 0
    assert "killing" not in running.log, "no process was taken for stuck"


def post(url: str, body: Body) -> tuple[int, float, float]:
    """Return a request's status, and when it began and ended."""
    path, data = body
    headers = {"Content-Type": "application/json"}
    begin = time.monotonic()
    answer = httpx.post(url + path, content=data, headers=headers, timeout=TIMEOUT_S)
    return answer.status_code, begin, time.monotonic()


def check_stream_beside(server: RunningServer, body: Body, seed: int) -> None:
    """Assert that a stream goes on while a request is answered, and says what it says alone."""
    pids = {title: process.pid for title, process in server.ring.items()}
    with WatchedStream(server.url, seed) as stream:
        status, begin, end = post(server.url, body)
    assert status in ANSWERS
    waits = stream.waits_s(begin, end)
    limit = max(MOST * (end - begin), MANY * median(stream.waits_s(0, end)[1:]))
    assert max(waits) <= limit, f"{max(waits):.2f} of {end - begin:.2f} s without a token"
    assert stream.text == stream.text_alone()
    assert pids.items() <= {title: process.pid for title, process in server.ring.items()}.items()


def test_streams_go_on_beside_the_largest_requests(tiny_server: RunningServer) -> None:
    kinds = itertools.cycle(KINDS.items())
    for rng, (name, kind) in zip(attack_rounds("largest requests", 0.3), kinds, strict=False):
        share = rng.choice(SHARES)
        print(f"{name}, {share:g} of the largest")
        check_stream_beside(tiny_server, kind(rng, share), rng.randrange(1 << 31))
    tiny_server.settle()
    tiny_server.await_free("kv_pages")
