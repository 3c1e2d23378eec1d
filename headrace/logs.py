"""One line per event, process name first.

A thread of its own writes them: whoever reads the log, or has stopped reading, holds up nobody.
"""

import atexit
import logging
import os
import queue
import threading

STDERR = 2
MAX_LINES = 4096  # that wait to be written; more are lost, and counted
LAST_S = 1.0  # without a line written, and the process ends though some wait


class LineWriter(logging.Handler):
    """Hands lines to a thread, and never waits for it."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._num_lost = 0  # ever, counted by who logs,
        self._num_told = 0  # and how many of them the log has told, by the thread
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have a record written."""
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self._num_lost += 1
        except Exception:  # a record that cannot be formatted; who logs it goes on
            self.handleError(record)

    def close(self) -> None:
        """Have the last lines written, if somebody reads them."""
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
                self._write(line + self._lost())
            self._write(self._lost())
        except OSError:  # nobody will read it
            return

    def _lost(self) -> str:
        """Return the line that tells what has been lost since the last one, where something was."""
        num_lost = self._num_lost
        lost, self._num_told = num_lost - self._num_told, num_lost
        return f"{lost} lines of the log were lost: nobody has read it\n" if lost else ""

    def _write(self, text: str) -> None:
        data = text.encode(errors="backslashreplace")
        while data:
            data = data[os.write(self._fd, data) :]


def setup(process: str, level: str) -> None:
    """Log to standard error as `time process level event`."""
    writer = LineWriter(STDERR)
    logging.basicConfig(
        handlers=[writer],
        level=level.upper(),
        format=f"%(asctime)s {process} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    atexit.register(writer.close)
