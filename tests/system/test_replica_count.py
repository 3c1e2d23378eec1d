"""A model gets and loses replicas while it serves: no request fails, no text changes."""

import asyncio
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from servers import HELD, PATIENCE_S, RunningServer, survivors, wait_until
from stream_reader import REQUESTS, TIMEOUT_S, read

from headrace.client.client import Client
from headrace.client.responses import Replicas
from headrace.config.model_card import find_demo_model

FLAGS = ("--kv-cache-dtype", "float32", "--max-num-seqs", "8", "--admin-api-key", "operator")
MIXED = [REQUESTS[place] for place in (1, 2, 4, 6, 8)]  # sampled, several, logprobs, JSON, whole
Answers = list[dict[str, Any]]


class Fleet(RunningServer):
    """A server whose replicas come and go."""

    def want(self, count: int) -> None:
        """Ask for so many replicas."""
        with Client(self.url, api_key="operator") as client:
            assert client.scale(count).replicas == count

    @property
    def num_leaving(self) -> int:
        """How many replicas end their last requests."""
        return self._replicas.leaving

    def num_sequences(self, engine: int) -> int:
        """How many sequences an engine has."""
        told = httpx.get(f"{self.url}/health").json()["processes"]
        (found,) = (one for one in told if one["process"] == f"engine {engine}")
        return int(found["running"] + found["waiting"])

    def has(self, count: int) -> bool:
        """Whether there are so many replicas, all of which serve, and no others."""
        found = self._replicas
        return found.replicas == found.ready == count and not found.leaving

    @property
    def _replicas(self) -> Replicas:
        with Client(self.url, api_key="operator") as client:
            (model,) = client.replicas()
        return model

    @property
    def engines(self) -> dict[str, psutil.Process]:
        """The processes of engines and workers, by title."""
        ring = self.ring.items()
        return {title: one for title, one in ring if "engine" in title or "worker" in title}

    async def read(self, **fields: Any) -> Answers:
        """Return what requests of several kinds are answered, sent at once."""
        async with httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S) as client:
            return await asyncio.gather(
                *(read(client, path, body | fields, lambda: None) for path, body in MIXED)
            )

    @contextmanager
    def leaving(self) -> Iterator[Future[Answers]]:
        """Have the second replica leave with open requests, which stand still within this."""
        self.want(2)
        wait_until(lambda: self.has(2), "there are two")
        worker = self.engines["headrace: worker 1"]
        worker.suspend()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(asyncio.run, self.read())
            try:
                wait_until(lambda: self.num_sequences(1) > 0, "the second one has requests")
                self.want(1)
                wait_until(lambda: self.num_leaving == 1, "it leaves")
                yield reading
            finally:
                with suppress(psutil.NoSuchProcess):
                    worker.resume()

    def serve_until(self, count: int, expected: Answers) -> None:
        """Send requests without a pause until there are so many replicas."""
        is_there = False
        while not is_there:
            is_there = self.has(count)
            assert asyncio.run(self.read()) == expected


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, under a name that can be taken from it."""
    demo = find_demo_model()
    assert demo is not None
    link = tmp_path_factory.mktemp("replicas") / demo.name
    link.symlink_to(demo)
    return link


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[Fleet]:
    """A server with one engine."""
    running = Fleet(str(model), *FLAGS, *HELD)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def expected(fleet: Fleet) -> Answers:
    """The answers of one engine."""
    return asyncio.run(fleet.read())


def test_replicas_come_and_go_under_load(fleet: Fleet, expected: Answers) -> None:
    fleet.want(3)
    wait_until(lambda: "headrace: engine 2" in fleet.engines, "the last one starts")
    fleet.engines["headrace: engine 2"].kill()
    fleet.serve_until(3, expected)
    before = fleet.engines
    assert len(before) == 6
    fleet.want(2)
    fleet.serve_until(2, expected)
    wait_until(lambda: len(fleet.engines) == 4, "two processes have ended")
    assert not survivors(set(before.values()) - set(fleet.engines.values()))
    health = httpx.get(f"{fleet.url}/health")
    assert health.status_code == 200
    assert "engine 2" not in health.text


def test_a_leaving_replica_answers_what_it_has(fleet: Fleet, expected: Answers) -> None:
    with fleet.leaving() as reading:
        assert asyncio.run(fleet.read()) == expected, "the other one has what comes now"
        assert fleet.num_leaving == 1 and not reading.done()
    assert reading.result() == expected
    wait_until(lambda: fleet.has(1), "one is left")


def test_streams_go_on_where_a_leaving_replica_dies(fleet: Fleet, expected: Answers) -> None:
    with fleet.leaving() as reading:
        fleet.engines["headrace: engine 1"].kill()
    assert reading.result() == expected
    wait_until(lambda: fleet.has(1), "one is left")


def test_an_engine_that_cannot_start_is_given_up(fleet: Fleet, model: Path) -> None:
    away = model.rename(model.with_name("away"))  # the engine that serves has what it needs
    try:
        fleet.want(2)
        deadline = time.monotonic() + PATIENCE_S
        while not re.search("engine 1 exited.*its seat is vacant", fleet.log):
            fleet.read_log(deadline)
    finally:
        away.rename(model)
    wait_until(lambda: fleet.has(1), "one is left")
    body = {"prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{fleet.url}/v1/completions", json=body).status_code == 200
    assert httpx.get(f"{fleet.url}/health").status_code == 200
