"""A request whose response kills detokenizers fails alone, with a 500."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from mutants.mutants import DEADLY_TOKEN, mutants
from servers import RunningServer, wait_until
from stream_reader import CHAT, COMPLETION, TALK, TIMEOUT_S, read

RESTARTS = "process_restarts_total"
STORY = TALK | {"temperature": 0, "max_tokens": 64}
DEADLY: dict[str, Any] = {"temperature": 0, "logit_bias": {DEADLY_TOKEN: 100}, "prompt": "A fox"}
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "logprobs": 20, "prompt": "A fox"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(
        "--kv-cache-dtype", "float32", env=mutants("detokenizer=deadly_response")
    )
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def story(server: RunningServer) -> dict[str, Any]:
    """What a stream says when it is alone."""
    return asyncio.run(beside(server.url, None))[0]


async def beside(
    url: str, deadly: dict[str, Any] | None
) -> tuple[dict[str, Any], httpx.Response | None]:
    """Return what a stream says, and the answer to a deadly request that comes once it is told."""
    begun = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        reading = asyncio.create_task(read(client, CHAT, STORY, begun.set))
        await begun.wait()
        answer = deadly and await client.post(COMPLETION, json=deadly)
        return await reading, answer or None


@pytest.mark.parametrize(
    ("deadly", "num_deaths"),
    [
        pytest.param(DEADLY | {"logprobs": 1}, 2, id="outside the core"),
        pytest.param(LONG, 2, id="between slices"),
        pytest.param(DEADLY, 3, id="in the core"),
        pytest.param(DEADLY | {"stream": True}, 3, id="in the core, streamed"),
    ],
)
def test_response_at_which_detokenizers_die_is_a_500(
    server: RunningServer, story: dict[str, Any], deadly: dict[str, Any], num_deaths: int
) -> None:
    """The core's first death names no request: its requests are written outside from then on."""
    before = server.metric(RESTARTS)
    said, answer = asyncio.run(beside(server.url, deadly))
    assert said == story
    assert answer is not None
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith("the server failed at this")
    assert server.metric(RESTARTS) - before == num_deaths
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200, "health")
    server.settle()
