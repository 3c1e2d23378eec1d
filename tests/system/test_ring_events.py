"""The state of a running ring, live: deaths and successors show, and streams go on."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from servers import RunningServer, wait_until

KEY = "ring-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
PROMPT = {"prompt": "Tell me", "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def mock() -> Iterator[RunningServer]:
    running = RunningServer("--engine", "mock", "--api-key", KEY)
    yield running
    running.close()


Events = Iterator[tuple[str, Any]]


@contextmanager
def events_of(server: RunningServer) -> Iterator[Events]:
    """Yield the names and data of the events of a stream."""
    url = f"{server.url}/ring/events"
    with httpx.stream("GET", url, headers=HEADERS, timeout=120) as answer:
        assert answer.status_code == 200
        yield parsed(answer.iter_lines())


def parsed(lines: Iterator[str]) -> Events:
    name = ""
    for line in lines:
        kind, _, data = line.partition(": ")
        if kind == "event":
            name = data
        elif kind == "data":
            yield name, json.loads(data)


def deaths_of(events: Events, role: str) -> Iterator[dict[str, Any]]:
    """Yield the latest death of a role, as each state has it."""
    for _, state in events:
        deaths = [death for death in state.get("deaths", ()) if death["role"] == role]
        if deaths:
            yield deaths[-1]


def test_ring_needs_a_key(mock: RunningServer) -> None:
    for path in ("/ring", "/ring/events"):
        assert httpx.get(mock.url + path).status_code == 401
    assert httpx.get(f"{mock.url}/ring", headers=HEADERS).status_code == 200
    head = httpx.head(f"{mock.url}/ring/events", headers=HEADERS)
    assert (head.status_code, head.headers["content-type"]) == (200, "text/event-stream")
    assert "content-length" not in head.headers


def test_events_are_as_described_and_show_work(mock: RunningServer) -> None:
    description = httpx.get(f"{mock.url}/openapi.json", headers=HEADERS).json()
    content = description["paths"]["/ring/events"]["get"]["responses"]["200"]["content"]
    (schema,) = content.values()
    schema = schema["schema"]["properties"]["data"]["contentSchema"]
    validator = Draft202012Validator(schema | {"components": description["components"]})
    with events_of(mock) as events:
        name, history = next(events)
        validator.validate(history)
        assert (name, history["type"]) == ("history", "history")
        httpx.post(f"{mock.url}/v1/completions", json=PROMPT, headers=HEADERS).raise_for_status()
        for name, state in events:
            validator.validate(state)
            if name == "ring" and state["engines"][0]["generated_tokens"] >= PROMPT["max_tokens"]:
                break
        assert state["frontends"][0]["requests"] >= 2
        point = next(data for name, data in events if name == "point")
        validator.validate(point)
        assert sum(point["distributions"]["time_to_first_token"]["counts"]) >= 1


@pytest.mark.parametrize("role", ["detokenizer", "engine", "tokenizer"])
def test_a_death_and_the_return_show_in_the_stream(mock: RunningServer, role: str) -> None:
    with events_of(mock) as events:
        state = next(state for name, state in events if name == "ring")
        # Of tokenizers the last: it makes the events, and its successor goes on with them.
        victim = state[f"{role}s"][-1]
        os.kill(victim["pid"], signal.SIGKILL)
        death = next(d for d in deaths_of(events, role) if d["pid"] == victim["pid"])
        assert (death["index"], death["how"]) == (victim["index"], "was killed by SIGKILL")
        death = next(d for d in deaths_of(events, role) if d["back_at"] is not None)
        assert death["back_at"] >= death["died_at"]
        state = next(state for name, state in events if name == "ring")
        successor = state[f"{role}s"][-1]
        assert (successor["state"], successor["restarts"]) == ("ready", 1)
        assert successor["pid"] != victim["pid"]


def test_a_client_that_leaves_ends_its_stream(mock: RunningServer) -> None:
    with events_of(mock) as events:
        assert next(events)

    def num_open() -> int:
        state = httpx.get(f"{mock.url}/ring", headers=HEADERS).json()
        return sum(frontend["open_requests"] for frontend in state["frontends"])

    wait_until(lambda: num_open() == 1, "only this request is open")


def test_an_open_stream_does_not_keep_the_server_from_its_end(mock: RunningServer) -> None:
    with events_of(mock) as events:
        next(events)
        mock.process.send_signal(signal.SIGTERM)  # it waits 30 s for open requests
        assert list(events)[-1][0] == "ring"
    assert mock.wait() == 0
