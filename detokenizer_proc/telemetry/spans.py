"""Spans of a request: one for all of it, and a child per hop of the ring. Pure.

Attributes are those of vLLM's span `llm_request`, in seconds, with those of OpenTelemetry's
semantic conventions for HTTP: https://opentelemetry.io/docs/specs/semconv/http/http-spans/
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from headrace.ipc.messages import RequestEnded, ResponseStats, Times
from headrace.routes import POST

Value = str | int | float | bool | list[str]
NAME = "llm_request"  # of a POST; other requests are named by their method, as for any server
FAILED = 400  # the first status of an error
STATS: msgspec.msgpack.Decoder[ResponseStats] = msgspec.msgpack.Decoder(ResponseStats)


@dataclass(frozen=True)
class Span:
    """A span, in CLOCK_MONOTONIC ns. `error` is a description; None is no error."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str | None = None


def request_span(request: RequestEnded, model: str) -> Span:
    """Return the span of all of a request.

    Args:
        model: the server's only one; empty where there are several, and responses tell which.
    """
    attributes: dict[str, Value] = {
        "gen_ai.request.id": request.request_id,
        "http.request.method": request.method,
        "url.path": request.path,
        "http.response.status_code": request.status,
        "gen_ai.latency.e2e": (request.ended_at - request.received_at) / 1e9,
    }
    stats = STATS.decode(request.stats) if request.stats else None
    model = model or (stats.model if stats is not None else "")
    if model:
        attributes["gen_ai.response.model"] = model
    if stats is not None:
        attributes |= response_attributes(stats)
    if request.times is not None:
        attributes |= latencies(request.received_at, request.times, stats)
    kind, error = error_of(request, stats)
    if error is not None:
        attributes["error.type"] = kind
    name = NAME if request.method == POST else request.method
    return Span(name, request.received_at, request.ended_at, attributes, error)


def error_of(request: RequestEnded, stats: ResponseStats | None) -> tuple[str, str | None]:
    """Return the kind of what went wrong with a request, and its description; None if nothing."""
    if not request.is_complete:
        return "aborted", "the response was cut off: the client left or did not read"
    if request.status >= FAILED:
        return str(request.status), f"HTTP status {request.status}"
    if stats is not None and stats.failed:
        return "failed", "the stream ended with an error; the server's log has the reason"
    return "", None


def response_attributes(stats: ResponseStats) -> dict[str, Value]:
    """Return the attributes of a generated text, or of embeddings."""
    found: dict[str, Value] = {
        "gen_ai.usage.prompt_tokens": stats.num_prompt,
        "gen_ai.usage.completion_tokens": stats.num_generated,
        "gen_ai.usage.cached_tokens": stats.num_cached,
        "gen_ai.usage.num_sequences": stats.num_sequences,
    }
    if stats.response_id:
        found["gen_ai.response.id"] = stats.response_id
    if stats.finish_reasons:
        found["gen_ai.response.finish_reasons"] = stats.finish_reasons
    if stats.sampling is not None:
        found["gen_ai.request.n"] = stats.sampling.n
        found["gen_ai.request.max_tokens"] = stats.sampling.max_tokens
        found["gen_ai.request.temperature"] = stats.sampling.temperature
        found["gen_ai.request.top_p"] = stats.sampling.top_p
    return found


def latencies(received_at: int, times: Times, stats: ResponseStats | None) -> dict[str, Value]:
    """Return how long parts of a request took; the last token may not have come."""
    found: dict[str, Value] = {
        "gen_ai.latency.time_in_queue": (times.scheduled - times.queued) / 1e9,
        "gen_ai.latency.time_to_first_token": (times.rendered - received_at) / 1e9,
        "gen_ai.latency.time_in_model_prefill": (times.first_token - times.scheduled) / 1e9,
    }
    if stats is not None and stats.last_token:
        last = max(stats.last_token, times.first_token)
        found["gen_ai.latency.time_in_model_decode"] = (last - times.first_token) / 1e9
        found["gen_ai.latency.time_in_model_inference"] = (last - times.scheduled) / 1e9
    return found


def hop_spans(request: RequestEnded) -> Iterator[Span]:
    """Yield a span per hop that a request has passed, in their order. They may overlap."""
    if not request.sent_at:  # the frontend answered
        return
    yield Span("frontend receive", request.received_at, request.sent_at)
    times, stats = request.times, STATS.decode(request.stats) if request.stats else None
    if times is None:
        if request.begun_at:
            yield Span("tokenizer", request.sent_at, request.begun_at)
    else:
        last = max(stats.last_token if stats is not None else 0, times.first_token)
        rendered = max(stats.rendered if stats is not None else 0, times.rendered)
        yield Span("tokenizer", request.sent_at, times.tokenized)
        yield Span("engine queue", times.queued, times.scheduled)
        yield Span("prefill", times.scheduled, times.first_token)
        if last > times.first_token:
            yield Span("decode", times.first_token, last)
        yield Span("detokenizer", times.first_token, rendered)
    if request.begun_at:
        yield Span("frontend write", request.begun_at, request.ended_at)
