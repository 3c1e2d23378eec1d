"""Processes are killed or stopped in the middle of streams: texts are what they are without."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from attack_rounds import attack_rounds
from servers import RunningServer, wait_until
from stream_reader import difference, read_all

PAIRED = ("frontend", "tokenizer", "detokenizer")
KILLED = ("worker 0", "engine", "tokenizer 0", "tokenizer 1", "detokenizer 0", "detokenizer 1")
LAST_EVENT = 400  # of all streams together; there are more
WATCHDOG_S = 20
LONGEST_STOP_S = 4.0  # a busy machine adds to it


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    """A server with two processes of each kind that can have several."""
    running = RunningServer(
        *(str(tiny_folder), "--kv-cache-dtype", "float32", "--max-num-seqs", "8"),
        *(flag for role in PAIRED for flag in (f"--{role}-procs", "2")),
        *("--watchdog-timeout", str(WATCHDOG_S), "--crash-dir", ""),
    )
    yield running
    assert running.stop() == 0
    assert "is stuck" not in running.log


@pytest.fixture(scope="module")
def undisturbed(server: RunningServer) -> list[Any]:
    """What is answered when no process is disturbed."""
    answers = asyncio.run(read_all(server.url))
    assert not difference(asyncio.run(read_all(server.url)), answers), "they can be repeated"
    return answers


class Strikes:
    """Acts that are due when so many events have come."""

    def __init__(self, acts: dict[int, Callable[[], None]]) -> None:
        self._acts = acts
        self._num_seen = 0

    def __call__(self) -> None:
        self._num_seen += 1
        act = self._acts.pop(self._num_seen, None)
        if act is not None:
            act()


def pids(server: RunningServer) -> dict[str, int]:
    """Return the processes of the ring."""
    return {title: process.pid for title, process in server.ring.items()}


def kill(server: RunningServer, name: str) -> None:
    print(f"kill {name}")
    process = server.ring.get(f"headrace: {name}")
    if process is not None:  # else it has ended with one that was killed before
        process.kill()


def stop_for(server: RunningServer, titles: list[str], seconds: float) -> None:
    """Stop processes; they go on by themselves."""
    print(f"stop {titles} for {seconds:.2f} s")
    ring = server.ring
    stopped = [ring[title] for title in titles]
    for process in stopped:
        process.suspend()

    def resume() -> None:
        for process in stopped:
            with contextlib.suppress(
                psutil.NoSuchProcess
            ):  # on a busy machine a watchdog was first
                process.resume()

    threading.Timer(seconds, resume).start()


def moments(rng: random.Random, count: int) -> list[int]:
    return rng.sample(range(1, LAST_EVENT), count)


def is_well(server: RunningServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.TransportError:  # it was at the frontend that is gone
        return False


def test_kills_change_no_text(server: RunningServer, undisturbed: list[Any]) -> None:
    for rng in attack_rounds("kills", 0.15):
        victims = rng.sample(KILLED, rng.choice((1, 1, 2)))
        acts = {
            moment: partial(kill, server, name)
            for name, moment in zip(victims, moments(rng, len(victims)), strict=True)
        }
        answers = asyncio.run(read_all(server.url, Strikes(acts)))
        assert not difference(answers, undisturbed)
        wait_until(lambda: is_well(server), "good health again")
    server.settle()
    server.await_free("kv_pages")


def test_killed_frontend_takes_only_its_own_streams(
    server: RunningServer, undisturbed: list[Any]
) -> None:
    for rng in attack_rounds("frontend kills", 0.05):
        (moment,) = moments(rng, 1)
        name = f"frontend {rng.randrange(2)}"
        strikes = Strikes({moment: partial(kill, server, name)})
        answers = asyncio.run(read_all(server.url, strikes))
        whole = [
            (answer, expected)
            for answer, expected in zip(answers, undisturbed, strict=True)
            if not isinstance(answer, httpx.TransportError)
        ]
        assert [answer for answer, _ in whole] == [expected for _, expected in whole]
        wait_until(lambda: is_well(server), "good health again")


def test_stops_shorter_than_the_watchdog_change_nothing(
    server: RunningServer, undisturbed: list[Any]
) -> None:
    wait_until(lambda: is_well(server), "good health")
    before = pids(server)
    for rng in attack_rounds("stops", 0.15):
        titles = rng.sample(sorted(before), rng.choice((1, 1, 2, len(before))))
        seconds = rng.uniform(0.1, LONGEST_STOP_S)
        (moment,) = moments(rng, 1)
        strikes = Strikes({moment: partial(stop_for, server, titles, seconds)})
        assert not difference(asyncio.run(read_all(server.url, strikes)), undisturbed)
        assert pids(server) == before
