"""Traces, the access log and a log of JSON, of a ring around the mock engine."""

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from embedding_models import minilm
from otlp_receiver import OtlpReceiver, plain
from servers import PATIENCE_S, RunningServer, StartFailed, wait_until

from headrace.exit_status import ExitStatus

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HOPS = {
    "frontend receive",
    "tokenizer",
    "engine queue",
    "prefill",
    "decode",
    "detokenizer",
    "frontend write",
}
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}  # ms between batches of spans


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


@pytest.fixture(scope="module")
def traced(
    receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A step takes 20 ms, and one sequence runs at a time."""
    profile = tmp_path_factory.mktemp("profiles") / "20ms.json"
    profile.write_text('{"step_ms": [[0, 20]]}')
    running = RunningServer(
        *("--engine", "mock", "--mock-profile", str(profile), "--max-num-seqs", "1"),
        *("--frontend-procs", "2", "--detokenizer-procs", "2", "--max-num-queued", "1"),
        *("--otlp-traces-endpoint", receiver.url, "--access-log", "--log-format", "json"),
        env=SOON,
    )
    yield running
    assert running.stop() == 0


def post(server: RunningServer, id: str, prompt: Any = "Tell me", **fields: Any) -> httpx.Response:
    headers = {"x-request-id": id, "traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)


def access_line(server: RunningServer, id: str) -> dict[str, Any]:
    """Wait for the line of the access log about a request."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for line in server.log.splitlines():
            if line.endswith("}") and json.loads(line).get("request_id") == id:
                found: dict[str, Any] = json.loads(line)
                return found
        server.read_log(deadline)


@pytest.mark.parametrize("stream", [False, True])
def test_trace_of_a_request_has_every_hop(
    traced: RunningServer, receiver: OtlpReceiver, stream: bool
) -> None:
    id = f"traced-{stream}"
    assert post(traced, id, stream=stream, temperature=0.5).status_code == 200
    root, hops = receiver.trace(id)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert set(hops) == HOPS
    for hop in hops.values():
        assert root.start_time_unix_nano <= hop.start_time_unix_nano <= hop.end_time_unix_nano
        assert hop.end_time_unix_nano <= root.end_time_unix_nano
    attributes = plain(root.attributes)
    assert attributes["gen_ai.request.max_tokens"] == 5
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.usage.completion_tokens"] == 5
    assert attributes["gen_ai.usage.prompt_tokens"] > 0
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.response.id"].startswith("cmpl-")
    decode_s = attributes["gen_ai.latency.time_in_model_decode"]
    assert 0 < decode_s < attributes["gen_ai.latency.e2e"]


def test_trace_of_several_sequences_counts_all(
    traced: RunningServer, receiver: OtlpReceiver
) -> None:
    usage = post(traced, "several", n=2).json()["usage"]
    attributes = plain(receiver.trace("several")[0].attributes)
    assert attributes["gen_ai.usage.num_sequences"] == attributes["gen_ai.request.n"] == 2
    assert attributes["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 10
    assert attributes["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]


def test_refused_requests_have_spans_with_their_status(
    traced: RunningServer, receiver: OtlpReceiver
) -> None:
    assert post(traced, "wrong", prompt={"no": "prompt"}).status_code == 400
    root, hops = receiver.trace("wrong")
    assert root.status.code == 2
    assert plain(root.attributes)["http.response.status_code"] == 400
    assert set(hops) == {"frontend receive", "tokenizer", "frontend write"}
    plainly = {"x-request-id": "unknown", "content-type": "text/plain"}
    answer = httpx.post(f"{traced.url}/v1/completions", content=b"{}", headers=plainly)
    root, hops = receiver.trace("unknown")
    assert plain(root.attributes)["http.response.status_code"] == answer.status_code == 415
    assert hops == {}


def test_access_line_of_a_stream_counts_its_bytes(traced: RunningServer) -> None:
    answer = post(traced, "counted", stream=True, max_tokens=20)
    line = access_line(traced, "counted")
    assert line["response_bytes"] == len(answer.content)
    assert line["request_bytes"] == len(answer.request.content)
    assert (line["status"], line["complete"]) == (200, True)
    assert line["duration_ms"] > 0


def test_aborted_stream_has_a_span_that_says_so(
    traced: RunningServer, receiver: OtlpReceiver
) -> None:
    body = {"prompt": "Tell me", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "aborted"}
    url = f"{traced.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers) as answer:
        next(answer.iter_lines())
    root, hops = receiver.trace("aborted")
    assert plain(root.attributes)["error.type"] == "aborted"
    assert plain(root.attributes)["gen_ai.request.max_tokens"] == 1000
    assert {"prefill", "detokenizer"} < set(hops)


def test_death_of_the_telemetry_process_disturbs_no_request(
    traced: RunningServer, receiver: OtlpReceiver
) -> None:
    before = traced.ring["headrace: telemetry"]
    before.send_signal(signal.SIGKILL)
    assert post(traced, "meanwhile").status_code == 200

    def is_replaced() -> bool:
        another = traced.ring.get("headrace: telemetry")
        return another not in (None, before)

    wait_until(is_replaced, "another telemetry process")
    wait_until(lambda: httpx.get(f"{traced.url}/health").status_code == 200, "all are well")
    assert post(traced, "afterwards").status_code == 200
    receiver.trace("afterwards")


def test_last_requests_are_reported_at_the_end() -> None:
    slow = {"OTEL_BSP_SCHEDULE_DELAY": "60000"}
    with OtlpReceiver() as receiver:
        server = RunningServer(
            *("--engine", "mock", "--access-log", "--log-format", "json"),
            *("--otlp-traces-endpoint", receiver.url),
            *(str(minilm()), "--served-model-name", "minilm"),
            env=slow,
        )
        try:
            headers = {"x-request-id": "last"}
            url = f"{server.url}/v1/embeddings"
            body = {"model": "minilm", "input": ["one", "two"]}
            answer = httpx.post(url, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            refused = httpx.post(url, json={"input": 3}, headers={"x-request-id": "refused"})
            assert refused.status_code == 400
        finally:
            assert server.stop() == 0
        root, hops = receiver.trace("last")
    attributes = plain(root.attributes)
    assert attributes["gen_ai.usage.prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.num_sequences"] == 2
    assert "prefill" in hops
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert all({"time", "level", "process", "message"} <= set(line) for line in lines)
    access = {line["request_id"]: line for line in lines if "status" in line}
    assert {id: line["status"] for id, line in access.items()} == {"last": 200, "refused": 400}
    assert access["last"]["response_bytes"] == len(answer.content)


def test_failed_start_is_a_line_of_json() -> None:
    with pytest.raises(StartFailed) as caught:
        RunningServer("--log-format", "json", "/nowhere/model")
    assert caught.value.exit_status == ExitStatus.BAD_FLAGS
    line = json.loads(str(caught.value).splitlines()[-1])
    assert (line["level"], line["process"]) == ("error", "supervisor")
    assert "/nowhere/model" in line["message"]
