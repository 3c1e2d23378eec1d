"""Replicas on other machines: texts, deaths, cut links, and peers without the key."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from psutil import NoSuchProcess, Process
from remote_nodes import Link, RunningNode
from servers import RunningServer, StartFailed, wait_until
from strangers import scan, tcp_ports
from stream_reader import answers_of, counts_of, difference, read_all

HAS_MODEL = "REMOTE_MODEL" in os.environ
MODEL = ("--kv-cache-dtype", "float32", "--max-num-seqs", "8")
MOCK = ("--engine", "mock", "--mock-profile", "2ms")
FLAGS = MODEL if HAS_MODEL else MOCK
with_model = pytest.mark.skipif(not HAS_MODEL, reason="demo models on both sides: `make soak`")
NUM_TEXTS, NUM_TOKENS = 8, 300
NUM_PIECES = 40  # of all streams, before something happens


class Fleet:
    """A server with an engine of its own and one behind a link."""

    def __init__(self, folder: Path) -> None:
        self.key_file = folder / "key"
        self.node = RunningNode(self.key_file, *FLAGS)
        self.link = Link(self.node.url)
        self.head = RunningServer(
            *FLAGS, "--remote-engines", self.link.url, "--engine-key-file", str(self.key_file)
        )
        self.await_health()

    def await_health(self) -> None:
        """Wait until all engines serve."""
        wait_until(lambda: self.health.status_code == 200, "both engines serve")

    @property
    def health(self) -> httpx.Response:
        """What the server tells of its processes."""
        return httpx.get(f"{self.head.url}/health")

    @property
    def engines(self) -> list[dict[str, Any]]:
        """What the server tells of its engines."""
        told = self.health.json()["processes"]
        return [one for one in told if one["process"].startswith("engine")]

    @property
    def seat(self) -> Process:
        """The process in the seat of the remote engine."""
        (seat,) = (one for title, one in self.head.ring.items() if title[-9:] == " engine 1")
        return seat

    def close(self) -> None:
        """End all."""
        self.head.close()
        self.link.close()
        self.node.close()


class Once:
    """Does something when all streams together have brought so many pieces."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self.num_left = NUM_PIECES

    def __call__(self) -> None:
        self.num_left -= 1
        if not self.num_left:
            self._action()


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    """The answers of one engine."""
    return answers_of(*FLAGS)


def complete(url: str) -> tuple[str, str, dict[str, int]]:
    """Return a text of `NUM_TOKENS`, why it has ended, and how many tokens there were."""
    body = {"prompt": "Once", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    (choice,) = answer["choices"]
    return choice["text"], choice["finish_reason"], counts_of(answer["usage"])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server with an engine on another machine."""
    running = Fleet(tmp_path_factory.mktemp("fleet"))
    yield running
    running.close()
    assert running.head.process.returncode == running.node.process.returncode == 0
    assert running.node.log.count("without the key was refused") <= 1


def test_work_is_shared_and_goes_on_when_the_link_is_cut(fleet: Fleet) -> None:
    expected = complete(fleet.head.url)
    with ThreadPoolExecutor(NUM_TEXTS) as pool:
        texts = [pool.submit(complete, fleet.head.url) for _ in range(NUM_TEXTS)]
        wait_until(lambda: all(one["running"] for one in fleet.engines), "both engines run")
        fleet.link.is_cut = True
        assert [text.result() for text in texts] == [expected] * NUM_TEXTS
    wait_until(lambda: fleet.health.status_code == 503, "the engine is missed")
    fleet.link.is_cut = False
    fleet.await_health()


def test_an_engine_comes_back_after_its_process(fleet: Fleet) -> None:
    expected, process = complete(fleet.head.url), fleet.node.ring["headrace: engine"]
    with ThreadPoolExecutor(NUM_TEXTS) as pool:
        texts = [pool.submit(complete, fleet.head.url) for _ in range(NUM_TEXTS)]
        wait_until(lambda: all(one["running"] for one in fleet.engines), "both engines run")
        process.send_signal(signal.SIGKILL)
        assert [text.result() for text in texts] == [expected] * NUM_TEXTS
    wait_until(lambda: not process.is_running(), "it has ended")
    fleet.await_health()


def test_streams_go_on_where_a_remote_engine_stands_still(fleet: Fleet) -> None:
    """It goes on later, and then nothing of what it has makes any stream longer."""
    expected, process = complete(fleet.head.url), fleet.node.ring["headrace: engine"]
    with ThreadPoolExecutor(NUM_TEXTS) as pool:
        texts = [pool.submit(complete, fleet.head.url) for _ in range(NUM_TEXTS)]
        wait_until(lambda: all(one["running"] for one in fleet.engines), "both engines run")
        process.suspend()
        try:
            wait_until(lambda: fleet.health.status_code == 503, "the engine is missed")
        finally:
            with contextlib.suppress(NoSuchProcess):  # its watchdog may have ended it
                process.resume()
        assert [text.result() for text in texts] == [expected] * NUM_TEXTS
    fleet.await_health()


@with_model
def test_sighup_renews_the_seat_of_a_remote_engine_under_load(fleet: Fleet) -> None:
    expected, before = complete(fleet.head.url), [one["restarts"] for one in fleet.engines]
    fleet.head.ring["headrace: supervisor"].send_signal(signal.SIGHUP)
    with ThreadPoolExecutor(NUM_TEXTS) as pool:
        while any(one["restarts"] <= then for one, then in zip(fleet.engines, before, strict=True)):
            texts = [pool.submit(complete, fleet.head.url) for _ in range(NUM_TEXTS)]
            assert [text.result() for text in texts] == [expected] * NUM_TEXTS
    fleet.await_health()


def test_a_server_outlives_the_key_of_its_remote_engine(fleet: Fleet) -> None:
    expected, seat = complete(fleet.head.url), fleet.seat
    aside = fleet.key_file.rename(fleet.key_file.with_name("aside"))
    before = fleet.engines[1]["restarts"]
    seat.send_signal(signal.SIGKILL)
    wait_until(lambda: fleet.engines[1]["restarts"] > before + 1, "its successor has ended")
    assert complete(fleet.head.url) == expected
    aside.rename(fleet.key_file)
    fleet.await_health()


@with_model
def test_a_remote_engine_shares_the_work_and_changes_no_text(
    fleet: Fleet, undisturbed: list[Any]
) -> None:
    assert not difference(asyncio.run(read_all(fleet.head.url)), undisturbed)
    assert all(engine["steps"] for engine in fleet.engines)


@with_model
def test_streams_go_on_when_a_remote_process_dies(fleet: Fleet, undisturbed: list[Any]) -> None:
    process = fleet.node.ring["headrace: engine"]
    kill = Once(lambda: process.send_signal(signal.SIGKILL))
    assert not difference(asyncio.run(read_all(fleet.head.url, kill)), undisturbed)
    assert not process.is_running()
    fleet.await_health()


@with_model
def test_streams_go_on_when_the_seat_of_a_remote_engine_dies(
    fleet: Fleet, undisturbed: list[Any]
) -> None:
    seat = fleet.seat
    kill = Once(lambda: seat.send_signal(signal.SIGKILL))
    assert not difference(asyncio.run(read_all(fleet.head.url, kill)), undisturbed)
    fleet.await_health()


@with_model
def test_a_cut_link_moves_streams_and_is_taken_in_again(
    fleet: Fleet, undisturbed: list[Any]
) -> None:
    def cut() -> None:
        fleet.link.is_cut = True

    assert not difference(asyncio.run(read_all(fleet.head.url, Once(cut))), undisturbed)
    wait_until(lambda: fleet.health.status_code == 503, "the engine is missed")
    fleet.link.is_cut = False
    fleet.await_health()
    assert not difference(asyncio.run(read_all(fleet.head.url)), undisturbed)


def test_scans_and_garbage_end_nothing(fleet: Fleet) -> None:
    where, before = urlsplit(fleet.node.url), fleet.node.ring
    assert tcp_ports(fleet.node.processes.values()) == {where.port}, "a node listens at one address"
    http = urlsplit(fleet.head.url).port
    assert tcp_ports(fleet.head.processes.values()) == {http}, "a server at that of HTTP alone"
    scan(str(where.hostname), where.port or 0)
    answer = httpx.post(f"{fleet.head.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert answer.status_code == fleet.health.status_code == 200
    assert fleet.node.ring == before


def test_a_server_with_another_key_gets_no_engine(fleet: Fleet, tmp_path: Path) -> None:
    other = RunningNode(tmp_path / "key", "--engine", "mock")
    assert other.stop() == 0
    flags = ("--remote-engines", fleet.node.url, "--engine-key-file", str(tmp_path / "key"))
    stranger = RunningServer(*FLAGS, *flags)
    assert httpx.get(f"{stranger.url}/ready").status_code == 200
    assert httpx.get(f"{stranger.url}/health").status_code == 503
    assert stranger.stop() == 0
    assert "closes the connection" in stranger.log
    assert fleet.health.status_code == 200


def test_key_files_open_to_others_are_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("x")
    with pytest.raises(StartFailed, match=f"run chmod 600 {key}"):
        RunningNode(key, "--engine", "mock")
