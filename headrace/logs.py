"""One line per event, process name first.

A thread of its own writes them: a slow or stopped log reader blocks no process.
"""

import atexit
import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable

STDERR = 2
MAX_LINES = 4096  # that wait to be written; more are lost, and counted
LAST_S = 1.0  # without a line written, and the process ends though some wait


class LineWriter(logging.Handler):
    """Hands lines to a thread, and never waits for it."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self.keep: Callable[[bytes], None] | None = None  # where every line is remembered
        self._num_lost = 0  # ever, counted by the logging threads,
        self._num_unwritten = 0  # by the writer thread,
        self._num_reported = 0  # and how many of both the log has reported
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have a record written."""
        try:
            line = self.format(record) + "\n"
            if self.keep is not None:
                self.keep(line.encode(errors="backslashreplace"))
            self._lines.put_nowait(line)
        except queue.Full:
            self._num_lost += 1
        except Exception:  # a record that cannot be formatted; the logging thread goes on
            self.handleError(record)

    def close(self) -> None:
        """Write the remaining lines, while the log is read."""
        if self._thread.is_alive():
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
            line += f"{lost} log lines were lost: the log was not read in time, or had no room\n"
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


def log_failure(log: logging.Logger, what: str, error: BaseException) -> None:
    """Log that a request failed, and where. The error's text is left out: it may quote the
    request."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error("%s: %s\n%s", what, type(error).__name__, frames)
    log.debug("it says: %s", error)


def setup(process: str, level: str) -> LineWriter:
    """Log to standard error as `time process level event`; return the writer."""
    writer = LineWriter(STDERR)
    logging.basicConfig(
        handlers=[writer],
        level=level.upper(),
        format=f"%(asctime)s {process} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    atexit.register(writer.close)
    return writer
