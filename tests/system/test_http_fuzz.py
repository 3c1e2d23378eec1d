"""Millions of bytes that are no HTTP, or nearly: nothing dies of them, and nothing is left."""

import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import psutil
from mutations import mutated
from servers import RunningServer, wait_until

NUM_BYTES = int(os.environ.get("FUZZ_BYTES", 10_000_000))
NUM_CLIENTS = 8
PIECE = 100_000
JSON = "Content-Type: application/json\r\n"
PATIENCE_S = 120
SPARE_FILES = 16  # that a process may open once, when there is something to do
CLOSING_S = 15  # less than the patience of a frontend, which closes what is forgotten
GROWTH = 1.1  # of memory, of what it has been after a tenth
SPARE_BYTES = 8 << 20  # that any process may have more, however small it is
BODIES = [
    {"prompt": "x", "max_tokens": 3},
    {"prompt": ["a", [1, 2, 3]], "max_tokens": 2, "n": 2, "stream": True, "stop": ["b"]},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True},
]


def request(path: str, body: object, head: str = "") -> bytes:
    data = msgspec.json.encode(body)
    lines = f"POST {path} HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: {len(data)}\r\n{head}\r\n"
    return lines.encode() + data


SEEDS = [
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /metrics HTTP/1.0\r\nAccept: */*\r\n\r\n",
    request("/v1/completions", BODIES[0]),
    request("/v1/completions", BODIES[1], "Expect: 100-continue\r\nX-Request-Timing: 1\r\n"),
    request("/v1/chat/completions", BODIES[2], "Connection: close\r\n"),
    request("/tokenize", {"prompt": "x"}) + b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'10\r\n{"prompt": "abc"\r\n11\r\n,"max_tokens": 2}\r\n0\r\n\r\n',
]


def inputs(num_bytes: int, rng: random.Random) -> Iterator[bytes]:
    """Yield what connections bring: noise, or requests that are nearly right."""
    while num_bytes > 0:
        noise = rng.randbytes(rng.randrange(1, PIECE))
        requests = [mutated(rng.choice(SEEDS), SEEDS, rng) for _ in range(rng.randrange(1, 200))]
        for data in (noise, *(b"".join(requests[i : i + 4]) for i in range(0, len(requests), 4))):
            num_bytes -= len(data)
            yield data


def send(url: httpx.URL, data: bytes) -> None:
    """Bring something, and read until the server has had enough."""
    with socket.create_connection((url.host, url.port), PATIENCE_S) as client:
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass
        except (ConnectionResetError, BrokenPipeError):
            return


def load_everything(url: httpx.URL) -> None:
    """Have processes load what they load when it is first asked for."""
    for path, body in [
        ("/v1/completions", BODIES[0]),
        ("/v1/chat/completions", BODIES[2]),
        ("/tokenize", {"prompt": "x"}),
    ]:
        assert httpx.post(f"{url}{path}", json=body, timeout=PATIENCE_S).status_code == 200
    assert httpx.get(f"{url}/metrics", timeout=PATIENCE_S).status_code == 200


def memory(ring: dict[str, psutil.Process]) -> dict[str, int]:
    return {title: process.memory_info().rss for title, process in ring.items()}


def test_nothing_dies_and_nothing_is_left() -> None:
    server = RunningServer("--engine", "mock")
    url, rng = httpx.URL(server.url), random.Random(8)
    try:
        ring = server.ring
        load_everything(url)
        before = {}
        num_files = {title: process.num_fds() + SPARE_FILES for title, process in ring.items()}
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            for num_bytes in (NUM_BYTES // 10, NUM_BYTES - NUM_BYTES // 10):
                before = memory(ring)
                for done in pool.map(lambda data: send(url, data), inputs(num_bytes, rng)):
                    assert done is None
        assert {title: process.pid for title, process in server.ring.items()} == {
            title: process.pid for title, process in ring.items()
        }
        answer = httpx.post(f"{url}/v1/completions", json=BODIES[0], timeout=PATIENCE_S)
        assert answer.status_code == 200
        wait_until(
            lambda: all(ring[title].num_fds() <= count for title, count in num_files.items()),
            "connections are closed",
            CLOSING_S,
        )
        wait_until(lambda: server.metric("http_requests_open") == 1, "only this one is open")
        wait_until(lambda: server.metric("num_requests_running") == 0, "no orphan runs")
        assert server.metric("http_partings_total") > 0
        for title, size in memory(ring).items():
            assert size < GROWTH * before[title] + SPARE_BYTES, title
    finally:
        server.close()
    assert "Traceback" not in server.log
    assert server.log.count("\n") < 20, "bad HTTP is counted, not logged"
