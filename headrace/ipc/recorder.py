"""Recording (`--record DIR`): the incoming messages of each process, in a file of its own.

A file begins with the note its process was started with, so that another can be (`replay.py`). Then
come messages: the time, how many frames, and each frame behind its length. They have the texts of
requests in them, so files are their owner's alone. A file ends where it would take too much.
"""

import contextlib
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ConfigError, HeadraceError

SUFFIX = ".record"
MAX_BYTES = 256 << 20  # of a process; what comes after is not recorded
ENTRY = struct.Struct("<QI")  # CLOCK_MONOTONIC, ns; number of frames
LENGTH = struct.Struct("<I")

log = logging.getLogger(__name__)


def prepare_folder(folder: str) -> str:
    """Make the folder of a record, unless there is one; return its full name.

    Raises:
        ConfigError: it cannot be made, or has a record in it.
    """
    path = Path(folder).expanduser().resolve()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        has_record = any(path.glob(f"*{SUFFIX}"))
    except OSError as error:
        raise ConfigError(f"--record {folder}: {error.strerror}") from None
    if has_record:
        raise ConfigError(f"--record {folder} has a record already; name another folder")
    return str(path)


class Tee:
    """The file of one process."""

    def __init__(self, path: Path, note: bytes, max_bytes: int = MAX_BYTES) -> None:
        """Begin a file.

        Raises:
            OSError: there is one, by the process before in this seat, or there can be none.
        """
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._path = path
        self._left = max_bytes
        self._is_open = True
        self.take([note])

    def take(self, frames: Sequence[bytes | memoryview]) -> None:
        """Record a message; the file ends where it is full, or the disk."""
        if not self._is_open:
            return
        parts: list[bytes | memoryview] = [ENTRY.pack(time.monotonic_ns(), len(frames))]
        for frame in frames:
            parts += LENGTH.pack(len(frame)), frame
        data = b"".join(parts)
        why = "it is as long as it may be"
        if len(data) <= self._left:
            with contextlib.suppress(OSError):
                if os.write(self._fd, data) == len(data):
                    self._left -= len(data)
                    return
            why = "the disk is full"
        log.warning("the record %s ends here: %s", self._path, why)
        self.close()

    def close(self) -> None:
        """End the file."""
        if self._is_open:
            self._is_open = False
            os.close(self._fd)


def begin(folder: str, process: str, note: bytes) -> Tee | None:
    """Begin the file of a process; None where its predecessor in the seat has begun it."""
    try:
        return Tee(Path(folder) / f"{process}{SUFFIX}", note)
    except FileExistsError:
        log.info("the record has what the process before this one received, and no more")
    except OSError as error:
        log.warning("there is no record of this process: %s", error)
    return None


@dataclass(frozen=True)
class Entry:
    """Messages received at once, each with its bulk."""

    at_ns: int  # CLOCK_MONOTONIC
    frames: list[bytes]

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield each message with its bulk, empty where it has none."""
        frames = [*self.frames, b""] if len(self.frames) == 1 else self.frames
        return zip(frames[::2], frames[1::2], strict=True)


def read_record(path: Path) -> Iterator[Entry]:
    """Yield the messages of a file, its note first. A truncated file ends with its last whole
    message.

    Raises:
        HeadraceError: it cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise HeadraceError(f"{path} cannot be read: {error.strerror}") from None
    at = 0
    with contextlib.suppress(struct.error):
        while at < len(data):
            at_ns, num_frames = ENTRY.unpack_from(data, at)
            at += ENTRY.size
            frames = []
            for _ in range(num_frames):
                (length,) = LENGTH.unpack_from(data, at)
                at += LENGTH.size + length
                frames.append(data[at - length : at])
            if at > len(data):
                return
            yield Entry(at_ns, frames)
