"""Reports of ended requests to the telemetry process; where its link is full they are dropped."""

import time

import msgspec

from headrace.board.board import Slot
from headrace.board.fields import FrontendField
from headrace.frontend.http.request import HEAD, HttpExchange
from headrace.frontend.open_requests import OpenRequest
from headrace.ipc.messages import RequestEnded
from headrace.ipc.sockets import REPORTS_HIGH_WATER, Outbox, address

TRACE_PARENT, TRACE_STATE = b"traceparent", b"tracestate"


class RequestReports:
    """The link to the telemetry process."""

    def __init__(self, run_dir: str, slot: Slot, traces: bool) -> None:
        """Connect; with `traces` reports have what spans take."""
        self._outbox = Outbox(address(run_dir, "telemetry"), REPORTS_HIGH_WATER)
        self._slot = slot
        self._traces = traces

    def put(self, request: HttpExchange, ended: OpenRequest | None = None) -> None:
        """Report a request, at the next `flush`; `ended` is what the ring has made of it."""
        head = request.head
        report = RequestEnded(
            head.id.decode(),
            request.method,
            request.path,
            request.status if ended is None else ended.status,
            request.received_at,
            time.monotonic_ns(),
            head.length,
            0 if request.method == HEAD else request.num_sent,
            request.is_complete,
        )
        if self._traces:
            report = with_spans(report, request, ended)
        self._slot.add(FrontendField.LOST_REPORTS, not self._outbox.try_put(report, b""))

    def flush(self) -> None:
        """Send the reports."""
        self._outbox.flush()

    def close(self) -> None:
        """Drop the link."""
        self._outbox.close()


def with_spans(
    report: RequestEnded, request: HttpExchange, ended: OpenRequest | None
) -> RequestEnded:
    """Return a report with what spans take beside it."""
    headers = dict(request.headers)
    parent, state = headers.get(TRACE_PARENT, b""), headers.get(TRACE_STATE, b"")
    report = msgspec.structs.replace(
        report, traceparent=parent.decode("latin-1"), tracestate=state.decode("latin-1")
    )
    if ended is None:
        return report
    return msgspec.structs.replace(
        report,
        sent_at=ended.sent_at,
        begun_at=request.begun_at,
        times=None if ended.head is None else ended.head.times,
        stats=ended.stats,
    )
