"""Reports of ended requests to the telemetry process."""

import time
from pathlib import Path

import pytest

from headrace.board.board import Board, Seat, Slot
from headrace.board.fields import FrontendField
from headrace.frontend.http.request import Headers, HttpExchange
from headrace.frontend.http.request_head import RequestHead
from headrace.frontend.open_requests import OpenRequest
from headrace.frontend.request_reports import RequestReports
from headrace.ipc.messages import Head, RequestEnded, Times, ToTelemetry
from headrace.ipc.sockets import REPORTS_HIGH_WATER, Inbox, address

DEADLINE_MS = 120_000
TIMES = Times(1, 2, 3)


class Exchange(HttpExchange):
    """A request that has been answered."""

    is_complete = True

    def __init__(self, headers: Headers = ()) -> None:
        self.method, self.path, self.headers = "POST", "/v1/completions", headers
        self.head = RequestHead.of(headers)
        self.received_at = time.monotonic_ns()
        self.status, self.num_sent, self.begun_at = 200, 406, 5


@pytest.fixture
def slot() -> Slot:
    return Board.create([Seat("frontend", 0)]).slot("frontend")


def reported(run_dir: Path, slot: Slot, traces: bool, *ended: OpenRequest) -> RequestEnded:
    inbox: Inbox[ToTelemetry] = Inbox(address(str(run_dir), "telemetry"), ToTelemetry)
    reports = RequestReports(str(run_dir), slot, traces)
    headers = [(b"x-request-id", b"abc"), (b"traceparent", b"00-1"), (b"tracestate", b"\xff=1")]
    reports.put(Exchange([*headers, (b"content-length", b"78")]), *ended)
    reports.flush()
    received = inbox.receive(DEADLINE_MS)
    reports.close()
    inbox.close()
    assert received is not None
    return received[0]


def test_report_has_what_the_access_log_takes(tmp_path: Path, slot: Slot) -> None:
    report = reported(tmp_path, slot, False)
    assert (report.request_id, report.status, report.is_complete) == ("abc", 200, True)
    assert (report.num_received, report.num_sent, report.traceparent) == (78, 406, "")
    assert report.ended_at >= report.received_at


def test_report_with_traces_has_what_the_ring_returned(tmp_path: Path, slot: Slot) -> None:
    ended = OpenRequest(1, head=Head(500, "", TIMES), status=500, sent_at=4, stats=b"stats")
    report = reported(tmp_path, slot, True, ended)
    assert (report.status, report.sent_at, report.begun_at) == (500, 4, 5)
    assert (report.times, report.stats) == (TIMES, b"stats")
    assert (report.traceparent, report.tracestate) == ("00-1", "\xff=1")


def test_full_link_loses_reports_and_counts_them(tmp_path: Path, slot: Slot) -> None:
    reports = RequestReports(str(tmp_path), slot, traces=False)
    for _ in range(REPORTS_HIGH_WATER):
        reports.put(Exchange())
        reports.flush()
    assert slot[FrontendField.LOST_REPORTS] == 0
    reports.put(Exchange())
    reports.flush()
    assert slot[FrontendField.LOST_REPORTS] == 1
    reports.close()
