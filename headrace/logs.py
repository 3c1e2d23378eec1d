"""One line per event, as text or as a JSON object.

A thread of its own writes them: a slow or stopped log reader blocks no process. A line about a
request has its id: that of the record, else the `current_request` of the logging thread or task.
"""

import atexit
import json
import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

STDERR = 2
MAX_LINES = 4096  # that wait to be written; more are lost, and counted
LAST_S = 1.0  # without a line written, and the process ends though some wait


class CurrentRequest:
    """The request that a thread or task works at: `id` is its `X-Request-Id`, or "" for none."""

    __slots__ = ("id",)

    def __init__(self, id: str = "") -> None:
        self.id = id


# Its value changes in place: to set a context variable takes longer than to log nothing should.
CURRENT: ContextVar[CurrentRequest] = ContextVar("request")


def current_request() -> CurrentRequest:
    """Return the record of the calling thread, to set its `id`."""
    current = CURRENT.get(None)
    if current is None:
        current = CurrentRequest()
        CURRENT.set(current)
    return current


def begin_request(request_id: str) -> None:
    """Have the calling task, and those that it starts, work at a request."""
    CURRENT.set(CurrentRequest(request_id))


def about(request_id: str, **fields: Any) -> dict[str, Any]:
    """Return `extra` of a record about a request, with further fields of its JSON object."""
    return {"request_id": request_id, "fields": fields}


def request_id_of(record: logging.LogRecord) -> str:
    """Return the id of the request that a record is about, or ""."""
    current = CURRENT.get(None)
    return getattr(record, "request_id", "") or ("" if current is None else current.id)


class TextFormatter(logging.Formatter):
    """Formats a record as `time process level message`, and the request's id where there is one."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without the exception."""
        line = super().formatMessage(record)
        if request_id := request_id_of(record):
            line += f" (request {request_id})"
        exception = getattr(record, "fields", {}).get("exception")
        return line if exception is None else f"{line}\n{exception}"


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object in one line; times are RFC 3339, UTC, in ms."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "message": record.getMessage(),
        }
        if request_id := request_id_of(record):
            fields["request_id"] = request_id
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class LineWriter(logging.Handler):
    """Hands lines to a thread, and never waits for it.

    The thread starts with the first line. A process that has said nothing has no thread whose locks
    a copy of it could inherit.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self.keep: Callable[[bytes], None] | None = None  # where every line is remembered
        self._num_lost = 0  # ever, counted by the logging threads,
        self._num_unwritten = 0  # by the writer thread,
        self._num_reported = 0  # and how many of both the log has reported
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Have a record written."""
        try:
            line = self.format(record) + "\n"
            if self.keep is not None:
                self.keep(line.encode(errors="backslashreplace"))
            self._lines.put_nowait(line)
            if self._thread is None:  # the caller holds this handler's lock
                self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
                self._thread.start()
        except queue.Full:
            self._num_lost += 1
        except Exception:  # a record that cannot be formatted; the logging thread goes on
            self.handleError(record)

    def close(self) -> None:
        """Write the remaining lines, while the log is read."""
        if self._thread is not None and self._thread.is_alive():
            try:
                self._lines.put(None, timeout=LAST_S)
            except queue.Full:
                return
            num_lines = MAX_LINES + 1
            while self._thread.is_alive() and (left := self._lines.qsize()) < num_lines:
                num_lines = left
                self._thread.join(LAST_S)
        super().close()

    def _write_all(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                self._write(line)
            self._write("")
        except BrokenPipeError:  # the log has no reader
            return

    def _write(self, line: str) -> None:
        """Write a line, with the number of lines lost since the last successful write."""
        num_lost = self._num_lost + self._num_unwritten
        lost = num_lost - self._num_reported
        if lost:
            line += self._loss(lost)
        data = line.encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except BrokenPipeError:
            raise
        except OSError:  # the disk is full, say; there may be room for the next
            self._num_unwritten += 1
        else:
            self._num_reported = num_lost

    def _loss(self, num_lines: int) -> str:
        """Return the line that counts lost lines."""
        loss = f"{num_lines} log lines were lost: the log was not read in time, or had no room"
        if not isinstance(self.formatter, JsonFormatter):
            return f"{loss}\n"
        record = {"msg": loss, "levelname": "WARNING"}
        return self.formatter.format(logging.makeLogRecord(record)) + "\n"


def log_failure(log: logging.Logger, what: str, error: BaseException, request_id: str = "") -> None:
    """Log that a request failed, and where. The error's text is left out: it may quote the
    request."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    extra = about(request_id, exception=frames)
    log.error("%s: %s", what, type(error).__name__, extra=extra)
    log.debug("it says: %s", error, extra=about(request_id))


def setup(process: str, level: str, format: str = "text") -> LineWriter:
    """Log to standard error, from now on, as text or json; return the writer."""
    writer = LineWriter(STDERR)
    writer.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    logging.basicConfig(handlers=[writer], level=level.upper(), force=True)
    atexit.register(writer.close)
    return writer
