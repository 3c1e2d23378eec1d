"""Spans as a collector gets them, over OTLP."""

import msgspec
import pytest
from otlp_receiver import OtlpReceiver, plain

from headrace.detokenizer_proc.telemetry.tracer import Tracer
from headrace.ipc.messages import RequestEnded, Times

S = 10**9
ENDED = RequestEnded(
    "abc",
    "POST",
    "/v1/completions",
    200,
    S,
    9 * S,
    78,
    0,
    True,
    sent_at=2 * S,
    begun_at=8 * S,
    times=Times(*range(2 * S, 9 * S, S)),
)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def send(receiver: OtlpReceiver, *requests: RequestEnded) -> Tracer:
    """Send the spans of requests."""
    tracer = Tracer(receiver.url, "tiny")
    for request in requests:
        tracer.take(request)
    tracer.flush()
    return tracer


def test_collector_gets_a_span_per_request_and_hop() -> None:
    with OtlpReceiver() as receiver:
        send(receiver, ENDED)
        root, hops = receiver.trace("abc")
    assert set(receiver.paths) == {"/v1/traces"}
    assert receiver.services == {"headrace"}
    assert (root.name, root.kind, root.parent_span_id) == ("llm_request", 2, b"")
    assert root.end_time_unix_nano - root.start_time_unix_nano == 8 * S
    assert plain(root.attributes)["gen_ai.latency.e2e"] == 8.0
    assert {"tokenizer", "engine queue", "prefill", "detokenizer"} < set(hops)
    for hop in hops.values():
        assert root.start_time_unix_nano <= hop.start_time_unix_nano <= hop.end_time_unix_nano
        assert hop.trace_id == root.trace_id


def test_trace_of_the_caller_is_continued() -> None:
    parent = f"00-{TRACE}-{PARENT}-01"
    request = msgspec.structs.replace(ENDED, traceparent=parent, tracestate="vendor=x")
    with OtlpReceiver() as receiver:
        send(receiver, request)
        root, hops = receiver.trace("abc")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert root.trace_state == "vendor=x"
    assert {hop.trace_id.hex() for hop in hops.values()} == {TRACE}


@pytest.mark.parametrize("parent", ["", "00-0-0-01", "\xff" * 100, f"00-{'0' * 32}-{PARENT}-01"])
def test_unreadable_traceparent_begins_a_new_trace(parent: str) -> None:
    with OtlpReceiver() as receiver:
        send(receiver, msgspec.structs.replace(ENDED, traceparent=parent))
        root, _ = receiver.trace("abc")
    assert root.parent_span_id == b""
    assert root.trace_id.hex() != "0" * 32


def test_unsampled_trace_of_the_caller_is_not_sent() -> None:
    unsampled = msgspec.structs.replace(
        ENDED, request_id="unsampled", traceparent=f"00-{TRACE}-{PARENT}-00"
    )
    with OtlpReceiver() as receiver:
        send(receiver, unsampled, ENDED)
        root, _ = receiver.trace("abc")
        assert root.trace_id.hex() != TRACE
        assert receiver.request_ids == {"abc"}


def test_failed_request_has_the_status_of_an_error() -> None:
    with OtlpReceiver() as receiver:
        send(receiver, msgspec.structs.replace(ENDED, status=429))
        root, _ = receiver.trace("abc")
    assert (root.status.code, root.status.message) == (2, "HTTP status 429")
    assert plain(root.attributes)["error.type"] == "429"


def test_probes_and_scrapes_have_no_spans() -> None:
    probe = msgspec.structs.replace(ENDED, request_id="probe", method="GET", path="/health")
    with OtlpReceiver() as receiver:
        send(receiver, probe, ENDED)
        receiver.trace("abc")
        assert receiver.request_ids == {"abc"}


def test_get_of_a_caller_that_traces_has_a_span() -> None:
    parent = f"00-{TRACE}-{PARENT}-01"
    get = msgspec.structs.replace(
        ENDED, method="GET", path="/v1/models", times=None, traceparent=parent
    )
    with OtlpReceiver() as receiver:
        send(receiver, get)
        root, hops = receiver.trace("abc")
    assert (root.name, root.parent_span_id.hex()) == ("GET", PARENT)
    assert plain(root.attributes)["url.path"] == "/v1/models"
    assert set(hops) == {"frontend receive", "tokenizer", "frontend write"}


def test_environment_names_service_headers_and_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-token=secret")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    sampled = msgspec.structs.replace(ENDED, traceparent=f"00-{TRACE}-{PARENT}-01")
    with OtlpReceiver() as receiver:
        send(receiver, msgspec.structs.replace(ENDED, request_id="other"), sampled)
        receiver.trace("abc")
    assert receiver.services == {"chat"}
    assert receiver.headers["x-token"] == "secret"
    assert receiver.request_ids == {"abc"}
