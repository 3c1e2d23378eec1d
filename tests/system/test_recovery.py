"""Processes are killed while they serve: no client may notice more than a pause."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from servers import RunningServer, wait_until

from headrace.model_card import find_demo_model

STORY = {"role": "user", "content": "Tell me a story about a fox."}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 1},
    {"temperature": 1, "seed": 2, "n": 2},
    {"temperature": 0.8, "seed": 3, "frequency_penalty": 1.5, "top_p": 0.9},
    {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    {
        "temperature": 1,
        "seed": 4,
        "ignore_eos": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
        },
    },
]
NUM_TOKENS = 48
NUM_COPIES = 3  # of each request, so that there is a queue, too
KILL_AFTER = (2, 60, 400)  # events that all streams have brought together

Choices = list[list[Any]]  # of each event of a stream


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    """A server to be maimed; fewer places than there are streams."""
    running = RunningServer("--kv-cache-dtype", "float32", "--max-num-seqs", "16")
    yield running
    assert running.stop() == 0


async def read(client: httpx.AsyncClient, body: dict[str, Any], seen: Callable[[], None]) -> Any:
    """Return the texts of a streamed chat, by choice, with what is told of each token."""
    found: dict[int, list[Any]] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            seen()
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                parts = found.setdefault(choice["index"], ["", [], None])
                parts[0] += choice["delta"].get("content") or ""
                parts[1] += (choice.get("logprobs") or {}).get("content") or []
                parts[2] = choice["finish_reason"] or parts[2]
    return found


async def read_all(url: str, seen: Callable[[], None] = lambda: None) -> list[Any]:
    """Return what all requests are answered, sent at once."""
    common = {"messages": [STORY], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        bodies = [{**common, **more} for more in REQUESTS] * NUM_COPIES
        return await asyncio.gather(*(read(client, body, seen) for body in bodies))


class Killer:
    """Kills a process after so many events, each time there are, and knows whom it has killed."""

    def __init__(self, server: RunningServer, victim: str) -> None:
        self._server = server
        self._title = f"headrace: {victim}"
        self._num_seen = 0
        self.killed: list[psutil.Process] = []

    def __call__(self) -> None:
        self._num_seen += 1
        if self._num_seen in KILL_AFTER and self._title in self._server.ring:
            victim = self._server.ring[self._title]
            self.killed.append(victim)
            victim.kill()


@pytest.fixture(scope="module")
def undisturbed(own_server: RunningServer) -> list[Any]:
    """What is answered when nobody dies."""
    answers = asyncio.run(read_all(own_server.url))
    assert all(finish in ("length", "stop") for a in answers for _, _, finish in a.values())
    return answers


def test_streams_go_on_when_workers_die(own_server: RunningServer, undisturbed: list[Any]) -> None:
    killer = Killer(own_server, "worker 0")
    assert asyncio.run(read_all(own_server.url, killer)) == undisturbed
    assert len(killer.killed) > 1
    assert own_server.metric("process_restarts_total") == len(killer.killed)
    assert own_server.metric("num_requests_running") == 0
    assert own_server.metric("kv_pages_free") == own_server.metric("kv_pages_total")
    wait_until(
        lambda: httpx.get(f"{own_server.url}/health").status_code == 200, "good health again"
    )


def test_the_server_ends_when_no_worker_can_start_again(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copyfile(find_demo_model(), model)
    server = RunningServer(str(model))
    model.unlink()
    server.ring["headrace: worker 0"].kill()
    assert server.wait() == 1
    assert server.log.count("starting again") == 3
    last = server.log.splitlines()[-1]
    assert "error: engine 0 exited with 3 (worker 0 could not start: " in last
    assert str(model) in last
    server.close()
