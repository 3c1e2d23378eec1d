"""Several models behind one port: each answers as it does alone, and heals alone."""

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from killer import Killer
from servers import RunningServer, StartFailed, wait_until
from stream_reader import difference, read_all
from tiny_models import make_byte_folder

from headrace.config.model_card import find_demo_model

FLAGS = ("--kv-cache-dtype", "float32", "--max-num-seqs", "8", "--admin-api-key", "operator")
BYTES = "bytes"  # the name of a model whose tokens are bytes
CHAOS_S = float(os.environ.get("CHAOS_S", "0"))
KILLS_PER_S = 0.2 if CHAOS_S <= 60 else 0.01  # so that some live for long


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The path of each model by its name: two vocabularies, two chat templates."""
    folder = tmp_path_factory.mktemp("models") / BYTES
    make_byte_folder(folder)
    demo = find_demo_model()
    assert demo is not None
    return {demo.stem.partition(".Q")[0]: str(demo), BYTES: str(folder)}


@pytest.fixture(scope="module")
def alone(models: dict[str, str]) -> dict[str, list[Any]]:
    """The answers of each model on a server of its own."""
    answers = {}
    for name, path in models.items():
        running = RunningServer(path, *FLAGS)
        answers[name] = asyncio.run(read_all(running.url, model=name))
        assert running.stop() == 0
    return answers


@pytest.fixture(scope="module")
def together(models: dict[str, str]) -> Iterator[RunningServer]:
    """A server of both."""
    running = RunningServer(*models.values(), *FLAGS)
    yield running
    assert running.stop() == 0


async def read_mixed(url: str, names: list[str], **options: Any) -> dict[str, list[Any]]:
    """Return the answers of all models, asked at once; `options` are those of `read_all`."""
    found = await asyncio.gather(*(read_all(url, model=name, **options) for name in names))
    return dict(zip(names, found, strict=True))


def restarts(server: RunningServer) -> dict[str, int]:
    """Return how often each process has been replaced."""
    told = httpx.get(f"{server.url}/health").json()["processes"]
    return {one["process"]: one["restarts"] for one in told}


def test_models_answer_together_as_each_does_alone(
    together: RunningServer, alone: dict[str, list[Any]]
) -> None:
    answers = asyncio.run(read_mixed(together.url, list(alone)))
    for name, expected in alone.items():
        assert not difference(answers[name], expected), name


def test_models_are_listed_and_others_are_unknown(
    together: RunningServer, models: dict[str, str]
) -> None:
    listed = httpx.get(f"{together.url}/v1/models").json()["data"]
    assert [(one["id"], one["root"]) for one in listed] == list(models.items())
    for name in models:
        assert httpx.get(f"{together.url}/v1/models/{name}").json()["id"] == name
    body = {"prompt": "a", "max_tokens": 1}
    refused = httpx.post(f"{together.url}/v1/completions", json=body | {"model": "other"})
    assert refused.status_code == 404
    assert all(name in refused.json()["error"]["message"] for name in models)
    unnamed = httpx.post(f"{together.url}/v1/completions", json=body).json()
    assert unnamed["model"] == next(iter(models)), "the first one"


def test_metrics_of_a_model_have_its_name(
    together: RunningServer, alone: dict[str, list[Any]]
) -> None:
    body = {"prompt": "a", "max_tokens": 3, "ignore_eos": True, "model": BYTES}
    together.settle()
    before = counts_by_model(together)
    assert {name for _, name in before} == set(alone), "each series has a model"
    httpx.post(f"{together.url}/v1/completions", json=body).raise_for_status()
    together.settle()
    now = counts_by_model(together)
    grown = {series: now[series] - before[series] for series in now if now[series] > before[series]}
    assert grown == {(family, BYTES): count for family, count in GROWN.items()}


# Of a request for three tokens.
GROWN = {
    "vllm:generation_tokens_total": 3,
    "vllm:time_to_first_token_seconds_count": 1,
    "vllm:e2e_request_latency_seconds_count": 1,
    "vllm:request_params_n_count": 1,
    "headrace:time_to_first_token_seconds_count": 1,
    "headrace:e2e_request_latency_seconds_count": 1,
    "headrace:request_hop_seconds_count": 7,  # all but the one of streams
    "headrace:prompt_tokens_total": 1,
    "headrace:detokenized_tokens_total": 3,
}


def counts_by_model(server: RunningServer) -> Counter[tuple[str, str]]:
    """Return the sums of some families by model."""
    text, found = server.metrics(), Counter[tuple[str, str]]()
    for family, name, count in re.findall(r'^(.*?){.*model_name="(.*?)".*} (.*)$', text, re.M):
        if family in GROWN:
            found[family, name] += float(count)
    return found


@pytest.mark.parametrize("victim", ["engine 0", "worker 1", "detokenizer 0"])
def test_models_heal_at_a_death(
    together: RunningServer, alone: dict[str, list[Any]], victim: str
) -> None:
    before = restarts(together)
    killer = Killer(together, victim, moments=(40,))
    answers = asyncio.run(read_mixed(together.url, list(alone), seen=killer))
    assert killer.killed
    for name, expected in alone.items():
        assert not difference(answers[name], expected), name
    wait_until(lambda: httpx.get(f"{together.url}/health").status_code == 200, "good health again")
    grown = {seat for seat, count in restarts(together).items() if count > before[seat]}
    assert grown == {victim} | ({"worker 0"} if victim == "engine 0" else set())
    together.settle()


@pytest.mark.skipif(not CHAOS_S, reason="long: `make soak`")
def test_chaos_changes_no_answer_of_models_with_replicas(
    models: dict[str, str], alone: dict[str, list[Any]]
) -> None:
    roles = ("worker", "tokenizer", "detokenizer", "engine")
    rules = [f"kill={role}:{KILLS_PER_S}/s" for role in roles]
    rules += [f"stop={role}:{KILLS_PER_S / 10}/s" for role in roles]
    server = RunningServer(
        *(*models.values(), *FLAGS, "--data-parallel-size", "2", "--chaos", ",".join(rules)),
        *("--tokenizer-procs", "2", "--detokenizer-procs", "2"),
    )
    end = time.monotonic() + CHAOS_S
    try:
        while time.monotonic() < end:
            answers = asyncio.run(read_mixed(server.url, list(alone)))
            for name, expected in alone.items():
                assert not difference(answers[name], expected), name
        assert server.metric("process_restarts_total") > 0
    finally:
        server.close()
        print(server.log)


def test_models_that_do_not_go_together_are_refused(models: dict[str, str]) -> None:
    path = models[BYTES]
    with pytest.raises(StartFailed, match="two models are called bytes; give one a served_model"):
        RunningServer(path, path)
