"""A server with a KV store answers as one without, over restarts, kills and damage."""

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import RunningServer, survivors, wait_until
from tiny_models import make_folder

from headrace.cli.kv import main as kv
from headrace.client.client import Client
from headrace.client.responses import ChatMessage, Usage
from headrace.errors import ApiError
from headrace.storage.store_directory import slot_files
from headrace.supervision.restart_backoff import DELAYS_S

Start = Callable[..., RunningServer]
NUM_PROMPTS = 6
NUM_TOKENS = 8
PAGE_TOKENS = 32
FLAGS = ("--max-num-seqs", "2", "--kv-cache-memory-bytes", "200000", "--max-num-batched-tokens")
STORE = "--kv-store-disk-bytes", "2000000"
KILLS = int(os.environ.get("STORE_KILLS", "3"))
SEED = int(os.environ.get("STORE_SEED", "0"))
TITLES = "kv_store 0", "worker 0", "engine", "supervisor"


def ask(server: RunningServer, prompt: int, salt: str | None = None) -> tuple[str, int]:
    """Return an answer to a prompt of some pages, and how many of its tokens were cached."""
    words = random.Random(prompt).choices(["alpha", "beta", "gamma", "delta"], k=180)
    body: dict[str, Any] = {
        "prompt": f"{prompt} {' '.join(words)}",
        "max_tokens": NUM_TOKENS,
        "temperature": prompt % 2,
        "seed": prompt,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    usage = reply["usage"]
    return reply["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def ask_all(server: RunningServer) -> list[str]:
    """Return the answers to all prompts."""
    return [ask(server, prompt)[0] for prompt in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with pages and states."""
    folder = tmp_path_factory.mktemp("model")
    layers = ["conv", "full_attention", "conv"]
    make_folder(folder, "lfm2", num_hidden_layers=3, layer_types=layers)
    return str(folder)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start servers, and leave none."""
    servers: list[RunningServer] = []

    def start_one(*args: str) -> RunningServer:
        servers.append(RunningServer(*args))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


def store_flags(model: str, folder: Path) -> tuple[str, ...]:
    """Return the arguments of a server with a store."""
    return (model, *FLAGS, "64", "--kv-store", str(folder), *STORE)


def answers_without_store(model: str, start: Start) -> list[str]:
    """Return what a server without a store answers."""
    plain = start(model, *FLAGS, "64")
    answers = ask_all(plain)
    plain.stop()
    return answers


def test_answers_stay_over_restarts_kills_and_damage(
    model: str, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, expected = store_flags(model, tmp_path), answers_without_store(model, start)
    server = start(*store)
    assert ask_all(server) == expected
    wait_until(lambda: server.metric("kv_store_stored_total") >= 5 * NUM_PROMPTS, "all is stored")
    server.process.send_signal(signal.SIGKILL)
    server.wait()
    paths = list(slot_files(tmp_path))
    assert {path.name for path in paths} == {"pages-0.kv", "states-0.kv"}
    kv(["verify", str(tmp_path)])
    assert "0 damaged" in capsys.readouterr().out
    with open(paths[0], "r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"damage")
    server = start(*store)
    text, num_cached = ask(server, 0)
    assert text == expected[0] and num_cached > 0
    assert ask(server, 1, "a tenant")[1] == 0
    assert ask_all(server) == expected
    for title in ("kv_store 0", "worker 0", "engine"):
        server.ring[f"headrace: {title}"].kill()
        assert ask_all(server) == expected
    assert server.stop() == 0
    kv(["list", "--json", str(tmp_path)])
    kinds = {row["kind"]: row for row in json.loads(capsys.readouterr().out)}
    assert kinds["pages"]["records"] > 0 and not kinds["pages"]["in_use"]
    kv(["prune", str(tmp_path), "--all"])
    assert not list(slot_files(tmp_path))


def test_servers_that_share_a_directory_find_pages_of_each_other(
    model: str, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, expected = store_flags(model, tmp_path), answers_without_store(model, start)
    first = start(*store)
    assert ask_all(first) == expected
    wait_until(lambda: first.metric("kv_store_stored_total") >= 5 * NUM_PROMPTS, "all is stored")
    second = start(*store)
    text, num_cached = ask(second, 0)
    assert text == expected[0] and num_cached > 0, "the first one's"
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask_all, (first, second))) == [expected, expected]
    before = second.metric("kv_store_stored_total")
    other, _ = ask(second, NUM_PROMPTS)
    wait_until(lambda: second.metric("kv_store_stored_total") >= before + 5, "it is stored")
    kv(["list", "--json", str(tmp_path)])
    rows = json.loads(capsys.readouterr().out)
    assert [row["in_use"] for row in rows] == [True] * 4, "pages and states of both"
    first.process.kill()
    first.wait()
    assert ask_all(second) == expected
    text, num_cached = ask(start(*store), NUM_PROMPTS)
    assert text == other and num_cached > 0, "the second one's"


def test_server_serves_on_after_its_store_died_in_a_row(
    model: str, start: Start, tmp_path: Path
) -> None:
    server = start(*store_flags(model, tmp_path))
    expected = ask_all(server)
    for _ in range(len(DELAYS_S) + 1):
        wait_until(lambda: "headrace: kv_store 0" in server.ring, "a store runs")
        store = server.ring["headrace: kv_store 0"]
        store.kill()
        assert not survivors([store])
    assert ask_all(server) == expected


def kill_amid(server: RunningServer, title: str, num_answers: int) -> list[Future[str]]:
    """Ask all, and kill a process, or all of them, once some are answered; return the answers."""
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(lambda p: ask(server, p)[0], p) for p in range(NUM_PROMPTS)]
        waiting = set(asked)
        while waiting and NUM_PROMPTS - len(waiting) < num_answers:
            waiting = wait(waiting, return_when=FIRST_COMPLETED).not_done
        if title == "supervisor":
            ring = list(server.ring.values())
            server.process.kill()
            assert not survivors(ring)
        else:
            server.ring[f"headrace: {title}"].kill()
    return asked


def is_healthy(url: str) -> bool:
    """Whether all processes serve."""
    return httpx.get(f"{url}/health").status_code == 200


def disk_bytes(folder: Path) -> int:
    """Return the bytes of the store's files."""
    return sum(path.stat().st_blocks * 512 for path in slot_files(folder))


def test_answers_stay_over_kills_at_random_moments(
    model: str, start: Start, tmp_path: Path
) -> None:
    """With `STORE_KILLS=50`, as many, others with another `STORE_SEED`."""
    numbers = random.Random(SEED)
    store, expected = store_flags(model, tmp_path), answers_without_store(model, start)
    server = start(*store)
    assert ask_all(server) == expected
    num_bytes = disk_bytes(tmp_path)
    for kill in range(1, KILLS + 1):
        title = numbers.choice(TITLES)
        print(title)
        asked = kill_amid(server, title, numbers.randrange(NUM_PROMPTS))
        if title == "supervisor":
            server.close()
            server = start(*store)
        else:
            assert [answer.result() for answer in asked] == expected
            wait_until(partial(is_healthy, server.url), "all processes serve")
            for number in range(2):  # new ones: a store that has answered has not died in a row
                ask(server, (2 * kill + number) * NUM_PROMPTS)
        assert ask_all(server) == expected
        assert disk_bytes(tmp_path) == num_bytes
    assert server.metric("kv_store_refused_total") == 0


def cached_tokens(usage: Usage | None) -> int:
    """Return how many tokens of a prompt were known."""
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


def test_prompts_are_computed_ahead(model: str, start: Start) -> None:
    server = start(model, *FLAGS, "64", "--admin-api-key", "secret")
    words = " ".join(["alpha"] * 150)
    first, second = f"first {words}", f"second {words}"
    with Client(server.url, "secret") as client:
        warmed = client.warm(first, cache_salt="tenant")
        assert warmed.completion_tokens == 0 and warmed.prompt_tokens > 2 * PAGE_TOKENS
        assert cached_tokens(client.warm(second)) == 0
        known = cached_tokens(client.warm(first, cache_salt="tenant"))
        assert known >= warmed.prompt_tokens - PAGE_TOKENS
        used = client.complete(first, max_tokens=1, cache_salt="tenant").usage
        assert cached_tokens(used) == known
        assert cached_tokens(client.complete(first, max_tokens=1).usage) == 0
        talk = [ChatMessage("user", f"a talk {words}")]
        warmed = client.warm(talk, max_tokens=5)
        assert warmed.completion_tokens == 0 and cached_tokens(warmed) == 0
        answered = client.chat(talk, max_tokens=1).usage
        assert cached_tokens(answered) >= warmed.prompt_tokens - PAGE_TOKENS
    with Client(server.url) as client, pytest.raises(ApiError, match="admin"):
        client.warm(first)


@pytest.mark.skipif("MODEL_LOADS" not in os.environ, reason="long: `make soak`")
def test_a_store_has_what_a_model_that_sleeps_had_cached(
    model: str, start: Start, tmp_path: Path
) -> None:
    server = start(*store_flags(model, tmp_path), "--admin-api-key", "operator")
    text, _ = ask(server, 0)
    with Client(server.url, api_key="operator") as client:
        name = client.models()[0].id
        client.sleep(name)

        def sleeps() -> bool:
            (status,) = (one.status for one in client.models())
            return status is not None and status.value == "sleeping"

        wait_until(sleeps, "it sleeps")
    again, num_cached = ask(server, 0)
    assert (again, num_cached > 0) == (text, True)
