"""Replicas of a model: their streams are those of one engine, and go on elsewhere at a death."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from killer import Killer
from servers import RunningServer, wait_until
from stream_reader import CHAT, COUNTED, STORY, TIMEOUT_S, answers_of, difference, read, read_all

from headrace.runtime.roles import title
from headrace.system.cpu_share import numa_nodes, share_of

FLAGS = ("--kv-cache-dtype", "float32", "--max-num-seqs", "8", "--admin-api-key", "operator")
NUM_CALLS = 6
FUNCTION = "[].choices[0].delta[].tool_calls[0].function[]"
TALE = 8 * 'A fox met "Åse" \\ a hen,\nand 🦊 ran. '
TOOL = {
    "name": "tell",
    "parameters": {
        "type": "object",
        "properties": {"tale": {"type": "string", "enum": [TALE]}},
        "required": ["tale"],
        "additionalProperties": False,
    },
}
CALL: dict[str, Any] = COUNTED | {
    "messages": [STORY],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": {"type": "function", "function": {"name": "tell"}},
    "stream": True,
}


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    """The answers of one engine."""
    return answers_of(*FLAGS)


@pytest.fixture(scope="module")
def replicas() -> Iterator[RunningServer]:
    """A server with two engines."""
    running = RunningServer(*FLAGS, "--data-parallel-size", "2", "--detokenizer-procs", "2")
    yield running
    assert running.stop() == 0


def steps_of(server: RunningServer) -> list[float]:
    """Return how many steps each engine has run."""
    told = httpx.get(f"{server.url}/health").json()["processes"]
    return [one["steps"] for one in told if one["process"].startswith("engine")]


def test_replicas_share_the_work_and_change_no_text(
    replicas: RunningServer, undisturbed: list[Any]
) -> None:
    assert not difference(asyncio.run(read_all(replicas.url)), undisturbed)
    assert all(steps_of(replicas))


def test_each_replica_has_its_share_of_the_cores(replicas: RunningServer) -> None:
    """Linux places memory on the node of the core that first writes it."""
    cores, ring = os.sched_getaffinity(0), replicas.processes
    for place in range(2):
        share = share_of(cores, numa_nodes(), place, 2)
        for role in ("engine", "worker"):
            assert set(ring[title(role, place)].cpu_affinity()) == share


@pytest.mark.parametrize("victim", ["engine 0", "engine 1", "worker 1", "detokenizer 1"])
def test_streams_of_replicas_go_on_at_a_death(
    replicas: RunningServer, undisturbed: list[Any], victim: str
) -> None:
    killer = Killer(replicas, victim, moments=(40,))
    assert not difference(asyncio.run(read_all(replicas.url, killer)), undisturbed)
    assert killer.killed
    wait_until(lambda: httpx.get(f"{replicas.url}/health").status_code == 200, "good health again")
    replicas.settle()
    replicas.await_free("kv_pages")


async def call_tools(url: str, seen: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Return calls of a tool, streamed at once."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        return await asyncio.gather(*(read(client, CHAT, CALL, seen) for _ in range(NUM_CALLS)))


@pytest.mark.parametrize("victim", ["engine 0", "worker 1", "detokenizer 0"])
def test_arguments_of_a_tool_go_on_at_a_death(replicas: RunningServer, victim: str) -> None:
    expected = asyncio.run(call_tools(replicas.url))
    assert json.loads(expected[0][f"{FUNCTION}.arguments"]) == {"tale": TALE}
    assert expected[0][f"{FUNCTION}.name"] == "tell"
    killer = Killer(replicas, victim, moments=(60,))
    assert asyncio.run(call_tools(replicas.url, killer)) == expected == NUM_CALLS * expected[:1]
    assert killer.killed
    wait_until(lambda: httpx.get(f"{replicas.url}/health").status_code == 200, "good health again")


def test_sighup_renews_engines_without_a_pause(
    replicas: RunningServer, undisturbed: list[Any]
) -> None:
    def starts() -> list[int]:
        told = httpx.get(f"{replicas.url}/health").json()["processes"]
        return [one["restarts"] for one in told if one["process"].startswith("engine")]

    before = starts()
    replicas.ring["headrace: supervisor"].send_signal(signal.SIGHUP)
    while any(now <= then for now, then in zip(starts(), before, strict=True)):
        assert not difference(asyncio.run(read_all(replicas.url)), undisturbed)
    wait_until(lambda: httpx.get(f"{replicas.url}/health").status_code == 200, "good health again")
