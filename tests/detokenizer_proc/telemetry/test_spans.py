"""Spans of requests that have ended."""

import msgspec
import pytest

from headrace.detokenizer_proc.telemetry.spans import NAME, hop_spans, request_span
from headrace.ipc.messages import ReportedSampling, RequestEnded, ResponseStats, Times

S = 10**9
TIMES = Times(2 * S, 3 * S, 4 * S, 5 * S, 6 * S, 8 * S, 9 * S)
STATS = ResponseStats(
    num_prompt=31,
    num_cached=16,
    num_generated=5,
    num_sequences=1,
    finish_reasons=["stop"],
    last_token=11 * S,
    rendered=12 * S,
    sampling=ReportedSampling(64, 0.5, 0.9, 1),
    response_id="chatcmpl-1",
)
ENDED = RequestEnded(
    "abc",
    "POST",
    "/v1/chat/completions",
    200,
    S // 2,
    14 * S,
    78,
    0,
    True,
    sent_at=S,
    begun_at=13 * S,
    times=TIMES,
    stats=msgspec.msgpack.encode(STATS),
)


def changed(**fields: object) -> RequestEnded:
    return msgspec.structs.replace(ENDED, **fields)


def test_request_span_has_the_attributes_of_vllm() -> None:
    span = request_span(ENDED, "tiny")
    assert (span.name, span.start_ns, span.end_ns, span.error) == (NAME, S // 2, 14 * S, None)
    assert span.attributes == {
        "gen_ai.request.id": "abc",
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 1,
        "gen_ai.usage.prompt_tokens": 31,
        "gen_ai.usage.cached_tokens": 16,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.latency.e2e": 13.5,
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_to_first_token": 8.5,
        "gen_ai.latency.time_in_model_prefill": 2.0,
        "gen_ai.latency.time_in_model_decode": 3.0,
        "gen_ai.latency.time_in_model_inference": 5.0,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
    }


def test_each_hop_of_the_ring_has_a_span() -> None:
    assert [(s.name, s.start_ns / S, s.end_ns / S) for s in hop_spans(ENDED)] == [
        ("frontend receive", 0.5, 1),
        ("tokenizer", 1, 4),
        ("engine queue", 5, 6),
        ("prefill", 6, 8),
        ("decode", 8, 11),
        ("detokenizer", 8, 12),
        ("frontend write", 13, 14),
    ]


def test_request_refused_by_the_tokenizer_has_its_hop() -> None:
    refused = changed(status=400, times=None, stats=b"")
    names = [span.name for span in hop_spans(refused)]
    assert names == ["frontend receive", "tokenizer", "frontend write"]
    span = request_span(refused, "tiny")
    assert (span.attributes["error.type"], span.error) == ("400", "HTTP status 400")


def test_request_refused_by_the_frontend_has_no_hops() -> None:
    refused = changed(status=401, sent_at=0, begun_at=0, times=None, stats=b"")
    assert list(hop_spans(refused)) == []
    assert request_span(refused, "tiny").attributes["error.type"] == "401"


@pytest.mark.parametrize("times", [None, TIMES])
def test_aborted_request_says_so(times: Times | None) -> None:
    begun_at = 0 if times is None else 13 * S
    aborted = changed(is_complete=False, times=times, stats=b"", begun_at=begun_at)
    span = request_span(aborted, "tiny")
    assert span.attributes["error.type"] == "aborted"
    assert span.error is not None
    names = [hop.name for hop in hop_spans(aborted)]
    assert "decode" not in names
    assert ("prefill" in names) == (times is not None)


def test_stream_that_ends_with_an_error_is_one() -> None:
    failed = msgspec.msgpack.encode(msgspec.structs.replace(STATS, failed=True))
    assert request_span(changed(stats=failed), "tiny").attributes["error.type"] == "failed"


def test_spans_never_end_before_they_begin() -> None:
    early = msgspec.msgpack.encode(ResponseStats(num_prompt=31, num_sequences=1))
    assert all(span.end_ns >= span.start_ns for span in hop_spans(changed(stats=early)))
