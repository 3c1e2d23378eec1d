"""A page that one process computes ahead of time and others read, in the run directory."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

METRICS = "metrics"  # the name of the page of `/metrics`


class PageRead(NamedTuple):
    """What a page had when it was read."""

    body: bytes
    age_s: float


class PublishedPage:
    """A file that is replaced as a whole, so that no reader sees parts of two pages."""

    def __init__(self, run_dir: str, name: str, clock: Callable[[], float] = time.time) -> None:
        """Write or read the page `name`; `clock` is that of the file system, in seconds."""
        self._path = Path(run_dir) / name
        self._clock = clock

    def write(self, page: bytes) -> None:
        """Replace the page. Where the disk is full, the old one stays and is soon too old."""
        new = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            new.write_bytes(page)
            new.replace(self._path)

    def read(self, max_age_s: float) -> PageRead | None:
        """Return the page, or None where there is none or an older one."""
        try:
            with self._path.open("rb", buffering=0) as file:
                age_s = self._clock() - os.fstat(file.fileno()).st_mtime
                return PageRead(file.read(), age_s) if age_s <= max_age_s else None
        except FileNotFoundError:
            return None
