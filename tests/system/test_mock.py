"""The ring around the mock engine: no worker, no weights, the same answers in form."""

import json
import math
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from embedding_models import minilm
from servers import PATIENCE_S, RunningServer, StartFailed, wait_until

PROMPT = {"prompt": "Tell me", "ignore_eos": True}


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One sequence runs and one waits, 20 ms a step."""
    profile = tmp_path_factory.mktemp("profiles") / "20ms.json"
    profile.write_text('{"step_ms": [[0, 20]]}')
    running = RunningServer(
        *("--engine", "mock", "--mock-profile", str(profile), "--detokenizer-procs", "2"),
        *("--max-num-seqs", "1", "--max-num-queued", "1"),
    )
    yield running
    assert running.stop() == 0


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=fields, timeout=PATIENCE_S)


def test_there_is_no_worker_and_all_are_well(mock: RunningServer) -> None:
    assert "headrace: engine" in mock.ring
    assert not [name for name in mock.ring if "worker" in name]
    assert httpx.get(f"{mock.url}/health").status_code == 200


def test_a_chat_streams_words_until_max_tokens(mock: RunningServer) -> None:
    message = {"role": "user", "content": "Hello"}
    fields: dict[str, Any] = {"messages": [message], "max_tokens": 12, "stream": True}
    answer = post(mock, "/v1/chat/completions", stream_options={"include_usage": True}, **fields)
    lines = [line[6:] for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert events[-1]["usage"]["completion_tokens"] == 12
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert len(text.split()) == 12
    assert choices[-1]["finish_reason"] == "length"


def test_a_stop_string_ends_a_text(mock: RunningServer) -> None:
    whole = post(mock, "/v1/completions", **PROMPT, max_tokens=9).json()["choices"][0]["text"]
    third = " " + whole.split()[2]
    cut = post(mock, "/v1/completions", **PROMPT, max_tokens=9, stop=third).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(third)], "stop")


def test_disconnect_makes_room_and_excess_is_refused(mock: RunningServer) -> None:
    address = urlsplit(mock.url)
    body = json.dumps({**PROMPT, "max_tokens": 8000, "stream": True}).encode()  # minutes
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    mock.settle()  # the request of a test before may run yet
    with ExitStack() as clients:
        for gauge in ("num_requests_running", "num_requests_waiting"):
            where = (address.hostname or "", address.port)
            client = clients.enter_context(socket.create_connection(where))
            client.sendall(head + body)
            wait_until(lambda gauge=gauge: mock.metric(gauge) == 1, gauge)  # type: ignore[misc]
        refused = post(mock, "/v1/completions", **PROMPT, max_tokens=1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            429,
            "rate_limit_exceeded",
        )
    mock.settle()
    mock.await_free("kv_pages")
    assert post(mock, "/v1/completions", **PROMPT, max_tokens=1).status_code == 200


def test_embeddings_are_unit_vectors_of_the_model_s_size() -> None:
    server = RunningServer(str(minilm()), "--engine", "mock", "--mock-profile", "encoder")
    try:
        answer = post(server, "/v1/embeddings", input=["a text", "another"]).json()
        vectors = [item["embedding"] for item in answer["data"]]
        assert [len(vector) for vector in vectors] == [384, 384]
        assert all(math.isclose(math.hypot(*vector), 1, rel_tol=1e-5) for vector in vectors)
    finally:
        assert server.stop() == 0


def test_an_unknown_profile_ends_the_start() -> None:
    with pytest.raises(StartFailed, match="--mock-profile nothing: No such file"):
        RunningServer("--engine", "mock", "--mock-profile", "nothing")
