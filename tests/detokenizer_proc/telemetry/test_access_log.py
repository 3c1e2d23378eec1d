"""The access log: a line per request."""

import json
import logging

import pytest

from headrace.detokenizer_proc.telemetry.access_log import AccessLog
from headrace.ipc.messages import RequestEnded
from headrace.logs import JsonFormatter, TextFormatter

ENDED = RequestEnded("abc", "POST", "/v1/completions", 200, 0, 12_345_678, 78, 406, True)


def record_of(request: RequestEnded, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    AccessLog().take(request)
    return caplog.records[-1]


def test_access_line_has_what_was_asked_and_came(caplog: pytest.LogCaptureFixture) -> None:
    line = TextFormatter("telemetry").format(record_of(ENDED, caplog))
    expected = "POST /v1/completions 200 12.3 ms, 78 bytes in, 406 out (request abc)"
    assert line.endswith(f"telemetry INFO {expected}")


def test_access_line_is_written_at_any_log_level(caplog: pytest.LogCaptureFixture) -> None:
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.ERROR)
    try:
        assert record_of(ENDED, caplog).levelname == "INFO"
    finally:
        root.setLevel(before)


def test_access_line_of_a_path_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    odd = RequestEnded("abc", "GET", "/a\nb\u2028", 499, 0, 1, 0, 0, False)
    record = record_of(odd, caplog)
    line = TextFormatter("telemetry").format(record)
    assert "GET /a\\nb\\u2028 499 0.0 ms, 0 bytes in, 0 out, cut off" in line
    found = json.loads(JsonFormatter("telemetry").format(record))
    assert (found["path"], found["status"], found["complete"]) == ("/a\nb\u2028", 499, False)
    assert (found["request_id"], found["duration_ms"]) == ("abc", 0.0)
