"""A receiver of OpenTelemetry's spans: OTLP over HTTP, decoded by OpenTelemetry's own classes."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from servers import wait_until

POLL_INTERVAL_S = 0.02  # of the thread that is told to end; 0.5 s is the default


class OtlpReceiver:
    """A collector at a free port.

    Attributes:
        paths: of the requests that came.
        headers: of the last one.
        services: names of the services that sent spans.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.headers: dict[str, str] = {}
        self.services: set[str] = set()
        self._spans: list[Any] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.take(self.path, dict(self.headers), body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_INTERVAL_S,))
        self._thread.start()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """Keep the spans of a request."""
        self.paths.append(path)
        self.headers = {name.lower(): value for name, value in headers.items()}
        request: Any = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.services.add(plain(resource.resource.attributes)["service.name"])
            self._spans += [span for scope in resource.scope_spans for span in scope.spans]

    def trace(self, request_id: str) -> tuple[Any, dict[str, Any]]:
        """Wait for a request's span; return it, and its children by name."""

        def found() -> Any:
            return next((s for s in self._spans if request_of(s) == request_id), None)

        wait_until(lambda: found() is not None, f"the span of {request_id} has come")
        root = found()
        return root, {s.name: s for s in self._spans if s.parent_span_id == root.span_id}

    @property
    def request_ids(self) -> set[str]:
        """Ids of the requests that have a span."""
        return {request_of(span) for span in self._spans} - {""}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def plain(attributes: Any) -> dict[str, Any]:
    """Return attributes as Python's values."""
    return {pair.key: value_of(pair.value) for pair in attributes}


def value_of(value: Any) -> Any:
    """Return the value of an attribute."""
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(item) for item in found.values] if kind == "array_value" else found


def request_of(span: Any) -> str:
    """Return the id of the request that a span is of; "" where it is a hop."""
    found: str = plain(span.attributes).get("gen_ai.request.id", "")
    return found
