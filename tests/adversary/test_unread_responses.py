"""Clients that ask and never read: what waits for them is bounded, and given back."""

import contextlib
import json
import socket
from collections.abc import Iterator

import httpx
import pytest
from attack_rounds import BUDGET_S, DEFAULT_S, attack_rounds
from servers import PATIENCE_S, RunningServer, wait_until

from support.largest import LONGEST
from support.memory_watch import MemoryWatch, own_bytes

NUM_CLIENTS = 8
ROOM = 4096  # bytes that a client's kernel takes; the server's takes megabytes
BIGGEST = 1 << 30  # bytes that a process may grow by while responses wait; 256 MiB may wait
LEFT = 192 << 20  # bytes that it may have more afterwards
STREAM = {"prompt": ["x"] * 16, "max_tokens": 4000, "stream": True}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ASKED = {
    "detokenize": ("/detokenize", b'{"tokens":[' + LONGEST * 2_400_000 + b"1]}", 1),
    "tokenize": ("/tokenize", json.dumps({"prompt": "word " * 1_000_000}).encode(), 1),
    "stream": ("/v1/completions", json.dumps(STREAM | USAGE).encode(), 1),
    "documents": ("/openapi.json", b"", 300),
}


@pytest.fixture(scope="module")
def mock() -> Iterator[RunningServer]:
    running = RunningServer("--engine", "mock", "--max-num-seqs", "256")
    yield running
    assert running.stop() == 0
    assert "memory, more than" not in running.log


def request(name: str) -> bytes:
    """Return what a client sends."""
    path, body, count = ASKED[name]
    method = "POST" if body else "GET"
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return (f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body) * count


def send(url: httpx.URL, data: bytes) -> socket.socket:
    """Ask, and read nothing. A server may cut the connection at any time."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
    client.settimeout(PATIENCE_S)
    client.connect((url.host, url.port))
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        client.sendall(data)
    return client


def all_have_answers(server: RunningServer) -> bool:
    """Whether nothing is computed any more: what is left waits for clients."""
    names = ("num_requests_running", "num_requests_waiting", "replies_open")
    return not any(server.metric(name) for name in names)


def attack(server: RunningServer, names: list[str]) -> None:
    """Ask beside each other, look at the memory meanwhile, and leave."""
    ring = server.ring
    with MemoryWatch(ring) as memory, contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(send(httpx.URL(server.url), request(name)))
        wait_until(lambda: all_have_answers(server), "all are answered")
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
    print({title: (size - memory.before[title]) >> 20 for title, size in memory.peak.items()})
    for title, size in memory.peak.items():
        assert size - memory.before[title] < BIGGEST, f"{title} had {size} bytes"
    server.settle()
    # A frontend counts these on a tick of its own.
    wait_until(lambda: server.metric("http_unsent_bytes") == 0, "nothing waits for clients")
    assert {title: process.pid for title, process in server.ring.items()} == {
        title: process.pid for title, process in ring.items()
    }

    def is_given_back() -> bool:
        return all(size - memory.before[title] < LEFT for title, size in own_bytes(ring).items())

    wait_until(is_given_back, "memory is given back")


def test_memory_of_unread_responses_is_bounded(mock: RunningServer) -> None:
    attack(mock, list(ASKED))  # loads what processes load when it is first asked for
    attack(mock, ["detokenize"] * NUM_CLIENTS)
    # A mix is as much work as both of these.
    for rng in attack_rounds("unread responses", 0.12) if BUDGET_S > DEFAULT_S else ():
        name = rng.choice(list(ASKED))
        names = rng.choice(([name] * NUM_CLIENTS, rng.choices(list(ASKED), k=NUM_CLIENTS)))
        print(names)
        attack(mock, names)
