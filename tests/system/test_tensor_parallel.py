"""Nine heads and three KV heads, run by two workers: uneven shares, and the same text."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from mutants.mutants import mutants
from reference import NUM_TOKENS, Expected
from servers import RunningServer, wait_until

EXACT = ("--dtype", "float32", "--kv-cache-dtype", "float32")
TIMEOUT_S = 300
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1, "seed": 1, "n": 2, "logprobs": True, "top_logprobs": 3},
    {"temperature": 0.8, "seed": 2, "frequency_penalty": 1.5, "top_p": 0.9, "logit_bias": {"9": 2}},
    {
        "temperature": 1,
        "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
]


@pytest.fixture(scope="module")
def pair() -> Iterator[RunningServer]:
    """Two workers with async scheduling, one of which is short of memory."""
    running = RunningServer(
        *("--tensor-parallel-size", "2", "--async-scheduling", *EXACT),
        env=mutants("worker=short_of_memory"),
    )
    yield running
    assert running.stop() == 0
    assert re.search(
        r"there is no memory for a step of \d\d+ tokens: said the mutant; at most", running.log
    )


@pytest.fixture(scope="module")
def alone() -> Iterator[RunningServer]:
    """The same with one."""
    running = RunningServer(*EXACT)
    yield running
    assert running.stop() == 0


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    """Return the choices of a response."""
    response = httpx.post(f"{server.url}{path}", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def complete(server: RunningServer, case: Expected) -> str:
    """Return a greedy answer."""
    body = {"prompt": case.prompt_ids, "temperature": 0, "max_tokens": NUM_TOKENS}
    text: str = post(server, "/v1/completions", body)[0]["text"]
    return text


def complete_all(server: RunningServer, cases: list[Expected]) -> list[str]:
    """Return the answers to all, asked at once."""
    with ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: complete(server, case), cases))


def test_greedy_answers_are_the_reference_s(pair: RunningServer, expected: list[Expected]) -> None:
    assert {"headrace: worker 0", "headrace: worker 1"} <= set(pair.ring)
    assert complete_all(pair, expected) == [case.text(NUM_TOKENS) for case in expected]
    assert pair.metric("engine_steps_ahead_total") > pair.metric("engine_steps_total") / 2


def test_samples_and_log_probabilities_are_those_of_one_worker(
    pair: RunningServer, alone: RunningServer
) -> None:
    message = {"role": "user", "content": "Tell me a number."}
    for sampling in SAMPLED:
        body = {"messages": [message], "max_tokens": 24, **sampling}
        ours, theirs = (post(server, "/v1/chat/completions", body) for server in (pair, alone))
        assert [c["message"] for c in ours] == [c["message"] for c in theirs]
        assert tops(ours) == pytest.approx(tops(theirs), abs=1e-4)
    body = {"prompt": [9, 100, 7, 30], "max_tokens": 1, "temperature": 0, "echo": True}
    body["logprobs"] = 0
    ours, theirs = (post(server, "/v1/completions", body)[0] for server in (pair, alone))
    found, expected = (choice["logprobs"]["token_logprobs"][1:] for choice in (ours, theirs))
    assert len(found) == 4
    assert found == pytest.approx(expected, abs=1e-4)


def tops(choices: list[Any]) -> list[float]:
    """Return the log probabilities of all tokens and of the likeliest in their place."""
    tokens = [token for c in choices for token in (c.get("logprobs") or {}).get("content") or []]
    return [each["logprob"] for token in tokens for each in (token, *token["top_logprobs"])]


def test_answers_go_on_when_a_worker_is_killed(
    pair: RunningServer, expected: list[Expected]
) -> None:
    before = pair.ring
    body = {"prompt": expected[0].prompt_ids, "temperature": 0, "max_tokens": NUM_TOKENS}
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream(
            "POST", f"{pair.url}/v1/completions", json={**body, "stream": True}, timeout=TIMEOUT_S
        ) as response,
    ):
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        events = [next(lines) for _ in range(3)]
        others = pool.submit(complete_all, pair, expected)
        before["headrace: worker 1"].kill()
        events += list(lines)
        texts = others.result()
    assert "".join(text_of(event) for event in events) == expected[0].text(NUM_TOKENS)
    assert texts == [case.text(NUM_TOKENS) for case in expected]
    for name in ("headrace: worker 0", "headrace: worker 1"):
        wait_until(
            lambda name=name: pair.ring.get(name, before[name]) != before[name],  # type: ignore[misc]
            "it is replaced",
        )


def text_of(event: str) -> str:
    """Return the text in an event of a stream."""
    choices = json.loads(event.removeprefix("data: "))["choices"]
    return "".join(choice["text"] for choice in choices)
