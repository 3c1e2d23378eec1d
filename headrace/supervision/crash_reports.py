"""Crash reports: the state of a server when one of its processes dies, in a file.

A crash report has no text of requests and no keys. At most `MAX_CRASH_REPORTS` are kept; the oldest
are removed.
"""

import contextlib
import logging
import os
import platform
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace import __version__
from headrace.board.board import Board, Seat, Slot, State
from headrace.board.fields import CommonField
from headrace.board.process_status import process_status
from headrace.config.process_configs import CrashConfig
from headrace.runtime.stack_dumps import stacks_of

MAX_CRASH_REPORTS = 32
POLL_INTERVAL_S = 0.01  # of the writer, at the end of the process
MAX_POLLS = 100
SUFFIX = ".json"

log = logging.getLogger(__name__)


def crash_directory(flag: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the folder of --crash-dir, or one with the user's state; None writes no reports."""
    if flag is not None:
        return flag or None
    home = environment.get("HOME", "")
    state = environment.get("XDG_STATE_HOME") or (f"{home}/.local/state" if home else "")
    return f"{state}/headrace/crashes" if state else None


class CrashReports:
    """Makes crash reports of the processes on a board."""

    def __init__(self, config: CrashConfig, board: Board) -> None:
        self._directory = None if config.directory is None else Path(config.directory)
        self._flags = config.flags
        self._board = board
        self._unwritten: queue.Queue[tuple[str, bytes] | None] = queue.Queue(MAX_CRASH_REPORTS)
        self._writer: threading.Thread | None = None

    def make(self, slot: Slot, how: str, stacks: str, requests: list[int] | None = None) -> None:
        """Write the report of a dead process.

        The caller waits for the stacks of the other processes (`stack_dumps.py`), not for the disk.

        Args:
            how: it ended.
            stacks: its own, where they were written.
            requests: ids of those it was at, where that is known.
        """
        if self._directory is None:
            return
        found = stacks_of(self._board.occupied())
        if stacks:
            found[slot.seat] = stacks
        now, now_ns = time.time(), time.monotonic_ns()
        crash_report = {
            "process": str(slot.seat),
            "ended": how,
            "last_words": slot.exit_reason,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
            "requests_at_hand": [f"{id:x}" for id in requests or () if id],
            "log": slot.log_tail.splitlines(),
            "processes": [self._reading(s, found, now_ns) for s in self._board.occupied()],
            "flags": self._flags,
            "headrace": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        }
        data = msgspec.json.format(msgspec.json.encode(crash_report), indent=2)
        stem = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{int(now % 1 * 1000):03}"
        name = f"{stem}-{slot.seat.role}-{slot.seat.index}-{slot[CommonField.PID]}{SUFFIX}"
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write_all, args=(self._directory,), name="crash-reports", daemon=True
            )
            self._writer.start()
        try:
            self._unwritten.put_nowait((name, data))
        except queue.Full:
            log.warning("no crash report of %s: earlier reports are still being written", slot.seat)

    def _write_all(self, directory: Path) -> None:
        while (crash_report := self._unwritten.get()) is not None:
            write(directory, *crash_report)

    def _reading(self, slot: Slot, stacks: dict[Seat, str], now_ns: int) -> dict[str, Any]:
        """Return a process's board values and stacks."""
        details: dict[str, Any] = {**process_status(self._board, slot, now_ns)}
        if slot.seat.role == "frontend":
            details["requests"] = [f"{id:x}" for id in slot.open_ids]
        return {
            "process": str(slot.seat),
            "pid": slot[CommonField.PID],
            "state": State(slot[CommonField.STATE]).name.lower(),
            "starts": slot[CommonField.STARTS],
            "silent_s": round(slot.silent_s(now_ns), 3),
            **details,
            "stacks": stacks.get(slot.seat, "").splitlines(),
        }

    def close(self) -> None:
        """Wait briefly for open writes; time that the machine is suspended does not count."""
        if self._writer is None:
            return
        with contextlib.suppress(queue.Full):
            self._unwritten.put_nowait(None)
        for _ in range(MAX_POLLS):
            self._writer.join(POLL_INTERVAL_S)


def write(directory: Path, name: str, data: bytes) -> None:
    """Write a crash report and remove the oldest; log an error that prevents it."""
    path, part = directory / name, directory / f".{name}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in sorted(directory.glob(f"[!.]*{SUFFIX}"))[: -MAX_CRASH_REPORTS + 1]:
            old.unlink(missing_ok=True)
        with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        part.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        log.warning("no crash report in %s: %s", directory, error.strerror or error)
    else:
        log.warning("a crash report is in %s", path)
