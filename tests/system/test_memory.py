"""What large requests take is given back, whatever their clients do."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest
from servers import RunningServer, wait_until

NUM_REQUESTS, NUM_IDS = 10, 2_000_000
ROOM_BYTES = 100 << 20  # more than an idle process has, for what allocators keep
UNSENT_BYTES = 256 << 20  # as `MAX_TOTAL_UNSENT_BYTES` of a frontend
JSON = {"content-type": "application/json"}
LONG = "headrace: tokenizer 1"  # has the long bodies


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer("--engine", "mock", "--max-model-len", "4096")
    yield running
    assert running.stop() == 0


def post_unread(server: RunningServer, path: str, body: bytes) -> socket.socket:
    """Send a request on a connection of which nothing is read."""
    url = urlsplit(server.url)
    assert url.hostname is not None
    client = socket.create_connection((url.hostname, url.port or 0))
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


def ids(num: int) -> bytes:
    """Return a body of /detokenize."""
    return json.dumps({"tokens": [300 + i % 699 for i in range(num)]}).encode()


def test_client_that_leaves_after_a_long_body_is_seen(server: RunningServer) -> None:
    prompts = [[300 + i] * 1000 for i in range(120)]
    body = json.dumps({"prompt": prompts, "max_tokens": 3000, "ignore_eos": True}).encode()
    assert len(body) > 512 << 10, "more than sockets hold"
    aborted = server.metric("aborted_sequences_total")
    with post_unread(server, "/v1/completions", body):
        wait_until(lambda: server.metric("num_requests_running") > 0, "it runs")
    server.settle()
    assert server.metric("aborted_sequences_total") > aborted


def test_unread_answers_are_bounded_and_given_back(server: RunningServer) -> None:
    httpx.post(f"{server.url}/detokenize", content=ids(20_000), headers=JSON).raise_for_status()
    ring = server.ring
    frontend, tokenizer = ring["headrace: frontend 0"], ring[LONG]
    idle = [process.memory_info().rss for process in (frontend, tokenizer)]
    handled, body = server.metric("tokenizer_requests_total"), ids(NUM_IDS)

    def has_given_back() -> bool:
        return tokenizer.memory_info().rss < idle[1] + ROOM_BYTES

    with ExitStack() as clients:
        for _ in range(NUM_REQUESTS):
            clients.enter_context(post_unread(server, "/detokenize", body))
        num = handled + NUM_REQUESTS
        wait_until(lambda: server.metric("tokenizer_requests_total") >= num, "all are answered")
        wait_until(has_given_back, "the tokenizer gives its memory back")
        assert frontend.memory_info().rss < idle[0] + UNSENT_BYTES + ROOM_BYTES
    wait_until(lambda: frontend.memory_info().rss < idle[0] + ROOM_BYTES, "so does the frontend")
