"""Spans to an OpenTelemetry collector, by the SDK: a thread of it sends them in batches.

The SDK reads the environment: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
OTEL_EXPORTER_OTLP_TRACES_HEADERS, OTEL_BSP_SCHEDULE_DELAY and others.
"""

import importlib
import os
import time
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace import __version__
from headrace.config.otlp import EXPORTERS, HTTP, protocol_of
from headrace.detokenizer_proc.telemetry.spans import Span, hop_spans, request_span
from headrace.ipc.messages import RequestEnded
from headrace.routes import POST

TRACES_PATH = "/v1/traces"  # of a collector, where the URL has none
FLUSH_MS = 2000  # for the last spans
MAX_SPANS = 16384  # that wait, of 2,000 requests; OTEL_BSP_MAX_QUEUE_SIZE overrides it


def exporter_of(endpoint: str) -> SpanExporter:
    """Return what sends spans to a URL, in the protocol that the environment asks for."""
    protocol = protocol_of(os.environ)
    if protocol == HTTP and urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + TRACES_PATH
    exporters: Any = importlib.import_module(f"{EXPORTERS[protocol]}.trace_exporter")
    exporter: SpanExporter = exporters.OTLPSpanExporter(endpoint=endpoint)
    return exporter


class Tracer:
    """Makes the spans of requests that have ended."""

    def __init__(self, endpoint: str, model: str, exporter: SpanExporter | None = None) -> None:
        """Send spans to `endpoint`, or elsewhere by `exporter`; `model` is served."""
        named = Resource.create({SERVICE_NAME: "headrace"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        os.environ.setdefault("OTEL_BSP_MAX_QUEUE_SIZE", str(MAX_SPANS))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or exporter_of(endpoint)))
        self._tracer = self._provider.get_tracer("headrace", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def take(self, request: RequestEnded) -> None:
        """Make the spans of a request: a child of the caller's span, where there is one.

        POSTs have some, other requests where their caller traces: spans of probes and scrapes
        would hide these.
        """
        if request.method != POST and not request.traceparent:
            return
        offset_ns = time.time_ns() - time.monotonic_ns()
        carrier = {"traceparent": request.traceparent, "tracestate": request.tracestate}
        above = self._propagator.extract({key: value for key, value in carrier.items() if value})
        found = request_span(request, self._model)
        root = self._begin(found, offset_ns, above, SpanKind.SERVER)
        if root.is_recording():
            context = set_span_in_context(root)
            for hop in hop_spans(request):
                span = self._begin(hop, offset_ns, context, SpanKind.INTERNAL)
                span.end(hop.end_ns + offset_ns)
        if found.error is not None:
            root.set_status(Status(StatusCode.ERROR, found.error))
        root.end(found.end_ns + offset_ns)

    def _begin(self, span: Span, offset_ns: int, context: Any, kind: SpanKind) -> Any:
        start = span.start_ns + offset_ns
        return self._tracer.start_span(
            span.name, context=context, kind=kind, attributes=span.attributes, start_time=start
        )

    def flush(self) -> None:
        """Send what there is, if the collector takes it in time."""
        self._provider.force_flush(FLUSH_MS)
