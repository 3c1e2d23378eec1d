"""Models that are loaded when they are asked for: no request fails, no text changes."""

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from servers import HELD, RunningServer, wait_until
from stream_reader import REQUESTS, TIMEOUT_S, read
from tiny_models import make_byte_folder

from headrace.client.client import Client
from headrace.client.responses import ModelLoad
from headrace.errors import ApiError

FLAGS = ("--kv-cache-dtype", "float32", "--max-num-seqs", "8", "--admin-api-key", "operator")
NAMES = ("first", "second", "third")
MIXED = [REQUESTS[place] for place in (1, 2, 4, 8)]  # sampled, several, logprobs, whole
NUM_ROUNDS = 3
PAGES = "headrace-pages"  # in the names of their files
NUM_PIECES = 20  # of a stream, before its model is unloaded
in_soak = pytest.mark.skipif("MODEL_LOADS" not in os.environ, reason="long: `make soak`")
Answers = list[dict[str, Any]]


class OnDemand(RunningServer):
    """A server of several models that loads one at a time."""

    def status(self, model: str) -> ModelLoad:
        """Return whether a model is loaded."""
        with Client(self.url) as client:
            (found,) = (one.status for one in client.models() if one.id == model)
        assert found is not None
        return found

    def await_status(self, model: str, value: str) -> None:
        """Wait until a model is loaded, or whatever it is to be."""
        wait_until(lambda: self.status(model).value == value, f"{model} is {value}")

    def order(self, do: Callable[[Client], object]) -> None:
        """Send a request with the operator's key."""
        with Client(self.url, api_key="operator") as client:
            do(client)

    def find(self, title: str) -> psutil.Process | None:
        """Return a process, if it is there."""
        return self.ring.get(f"headrace: {title}")

    @property
    def page_bytes(self) -> int:
        """The memory of all KV pages."""
        files = Path(f"/proc/{self.process.pid}/fd").iterdir()
        return sum(512 * file.stat().st_blocks for file in files if PAGES in os.readlink(file))

    def fall_asleep(self, model: str) -> None:
        """Have a loaded model sleep."""
        self.order(lambda client: client.sleep(model))
        self.await_status(model, "sleeping")

    @property
    def num_sequences(self) -> float:
        """How many sequences all engines have."""
        return self.metric("num_requests_running") + self.metric("num_requests_waiting")

    async def read(self, model: str) -> Answers:
        """Return what requests of several kinds are answered, sent at once."""
        async with httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S) as client:
            answers = await asyncio.gather(
                *(read(client, path, body | {"model": model}, lambda: None) for path, body in MIXED)
            )
        for answer in answers:
            assert answer.pop("[].model") == model
        return answers

    async def read_often(self, model: str) -> list[Answers]:
        """Return the answers of several rounds, one after the other."""
        return [await self.read(model) for _ in range(NUM_ROUNDS)]

    def refused(self, model: str) -> httpx.Response:
        """Return the answer to a short request."""
        body = {"prompt": "a", "max_tokens": 1, "model": model}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model under several names."""
    folder = tmp_path_factory.mktemp("models")
    make_byte_folder(folder / NAMES[0])
    for name in NAMES[1:]:
        shutil.copytree(folder / NAMES[0], folder / name)
    return {name: folder / name for name in NAMES}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[OnDemand]:
    running = OnDemand(*map(str, folders.values()), *FLAGS, *HELD, "--max-loaded-models", "1")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def expected(server: OnDemand) -> Answers:
    """The answers of the model that the server starts with."""
    assert [server.status(name).value for name in NAMES] == ["loaded", "unloaded", "unloaded"]
    return asyncio.run(server.read("first"))


def test_models_take_turns_under_load(server: OnDemand, expected: Answers) -> None:
    async def read_both() -> list[list[Answers]]:
        return await asyncio.gather(*(server.read_often(name) for name in NAMES[:2]))

    before = server.metric("models_loads_total")
    for answers in asyncio.run(read_both()):
        assert answers == [expected] * NUM_ROUNDS
    assert server.metric("models_loads_total") - before >= 2
    assert sorted(server.status(name).value == "loaded" for name in NAMES) == [False, False, True]
    assert server.metric("models_waiting") == 0
    for path in ("health", "ready", "startup"):
        assert httpx.get(f"{server.url}/{path}").status_code == 200


def test_a_model_sleeps_and_answers_alike(server: OnDemand, expected: Answers) -> None:
    (name,) = (name for name in NAMES if server.status(name).value == "loaded")
    before = server.page_bytes
    server.fall_asleep(name)
    assert server.page_bytes < before / 4
    assert server.metric("models_asleep") == 1
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert asyncio.run(server.read(name)) == expected
    assert server.status(name).value == "loaded"


@in_soak
@pytest.mark.parametrize("victim", ["engine", "worker 0", "tokenizer 0"])
def test_deaths_around_sleep_change_no_text(
    server: OnDemand, expected: Answers, victim: str
) -> None:
    server.order(lambda client: client.load("first"))
    server.await_status("first", "loaded")
    for kills_asleep in (True, False):
        server.order(lambda client: client.sleep("first"))
        if kills_asleep:
            server.await_status("first", "sleeping")
        process = server.find(victim)
        assert process is not None
        process.kill()
        assert asyncio.run(server.read("first")) == expected


@in_soak
def test_sleep_under_load_changes_no_text(server: OnDemand, expected: Answers) -> None:
    server.order(lambda client: client.load("first"))
    server.await_status("first", "loaded")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(asyncio.run, server.read_often("first"))
        while not reading.done():
            server.order(lambda client: client.sleep("first"))
        assert reading.result() == [expected] * NUM_ROUNDS
    server.await_status("first", "sleeping")


@in_soak
def test_an_engine_that_is_killed_while_it_loads(server: OnDemand, expected: Answers) -> None:
    server.order(lambda client: client.load("first"))
    server.await_status("first", "loaded")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(asyncio.run, server.read("second"))
        wait_until(lambda: server.find("engine 1") is not None, "the second one starts")
        assert server.status("second").waiting > 0
        engine = server.find("engine 1")
        assert engine is not None
        engine.kill()
        assert reading.result() == expected


@in_soak
def test_an_engine_that_is_killed_while_it_drains(server: OnDemand, expected: Answers) -> None:
    server.order(lambda client: client.load("first"))
    server.await_status("first", "loaded")
    worker, engine = server.find("worker 0"), server.find("engine")
    assert worker is not None
    assert engine is not None
    with ThreadPoolExecutor(2) as pool:
        worker.suspend()
        try:
            reading = [pool.submit(asyncio.run, server.read("first"))]
            wait_until(lambda: server.num_sequences > 0, "it has requests")
            reading += [pool.submit(asyncio.run, server.read("second"))]
            server.await_status("first", "unloading")
        finally:
            engine.kill()
        assert [one.result() for one in reading] == [expected, expected]


@in_soak
def test_a_stream_that_is_cut_goes_on_where_it_was(folders: dict[str, Path]) -> None:
    body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "model": "first", "seed": 1}
    paths = [str(folders[name]) for name in NAMES[:2]]
    server = OnDemand(*paths, *FLAGS, *HELD, "--max-loaded-models", "1", "--drain-timeout", "0")
    url = f"{server.url}/v1/completions"
    whole = httpx.post(url, json=body, timeout=TIMEOUT_S).json()["choices"][0]["text"]
    before = server.metric("generation_tokens_total")
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=TIMEOUT_S) as response:
        pieces = (
            json.loads(line[6:])["choices"][0]["text"]
            for line in response.iter_lines()
            if line.startswith("data: {")
        )
        text = "".join(next(pieces) for _ in range(NUM_PIECES))
        worker = server.find("worker 0")
        assert worker is not None
        worker.suspend()
        server.order(lambda client: client.load("second"))
        server.await_status("second", "loaded")
        assert text + "".join(pieces) == whole
    num_generated = server.metric("generation_tokens_total") - before
    assert 200 <= num_generated < 200 + NUM_PIECES, "each once, but for those of the last steps"
    assert server.stop() == 0


@in_soak
def test_a_model_that_cannot_be_loaded_holds_up_no_other(
    server: OnDemand, folders: dict[str, Path], expected: Answers
) -> None:
    away = folders["third"].rename(folders["third"].with_name("away"))
    try:
        answer = server.refused("third")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_not_loaded"
        assert "third" in answer.json()["error"]["message"]
        assert 1 <= int(answer.headers["retry-after"]) <= 5
        assert server.status("third").failed
        assert server.refused("third").status_code == 503, "at once"
        assert asyncio.run(server.read("second")) == expected
    finally:
        away.rename(folders["third"])
    server.order(lambda client: client.load("third"))
    server.await_status("third", "loaded")
    assert asyncio.run(server.read("third")) == expected
    assert server.metric("models_failed_loads_total") == 1


@in_soak
def test_operators_unload_and_load_models(server: OnDemand, expected: Answers) -> None:
    server.order(lambda client: client.load("second"))
    server.await_status("second", "loaded")
    server.order(lambda client: client.unload("second"))
    server.await_status("second", "unloaded")
    wait_until(lambda: server.find("worker 1") is None, "its memory is free")
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert asyncio.run(server.read("second")) == expected, "it is loaded again"
    with Client(server.url) as client, pytest.raises(ApiError, match="key"):
        client.unload("second")
