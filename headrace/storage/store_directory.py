"""A directory of slot files that several servers share: each writes its own, all read all.

    DIR / fingerprint / KIND-N.kv

A server takes the first N whose file for pages no other has locked, which stands for its states,
too. Embeddings of images have a number of their own. The kernel releases the lock with the last
process that holds the descriptor, however that ends.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from headrace.storage.slot_file import SlotFile, SlotFileHeader, SlotFileReader, read_header

PAGES, STATES, EMBEDDINGS = "pages", "states", "embeddings"
NAME = re.compile(r"(?P<kind>pages|states|embeddings)-(?P<number>\d+)\.kv")
MAX_SERVERS = 1024  # that share a directory


def file_name(kind: str, number: int) -> str:
    """Return the name of a server's file."""
    return f"{kind}-{number}.kv"


def slot_files(root: Path) -> Iterator[Path]:
    """Yield the files of a directory, of any fingerprint."""
    for path in sorted(root.glob("*/*.kv")):
        if NAME.fullmatch(path.name):
            yield path


def is_locked(fd: int) -> bool:
    """Whether another process has locked a file. For a moment this one has, where none had."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


class StoreDirectory:
    """The files of one fingerprint, and this server's place among them.

    Args:
        locked: the kind whose file is locked.

    Raises:
        OSError: the directory cannot be made or written to.
    """

    def __init__(self, root: Path, fingerprint: str, locked: str = PAGES) -> None:
        self._locked = locked
        self._folder = root / fingerprint
        self._folder.mkdir(parents=True, exist_ok=True)
        self._fds: dict[str, int] = {}  # of own files, by name
        self.number = self._claim()
        self._readers: dict[Path, SlotFileReader] = {}

    def _claim(self) -> int:
        for number in range(MAX_SERVERS):
            name = file_name(self._locked, number)
            fd = self._open(name)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._fds[name] = fd
                return number
            os.close(fd)
        raise OSError(f"{MAX_SERVERS} servers share {self._folder}")

    def _open(self, name: str) -> int:
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def own(self, header: SlotFileHeader) -> SlotFile:
        """Return this server's file of a kind; other contents than of `header` are lost.

        Raises:
            OSError: there is no room for it.
        """
        name = file_name(header.kind, self.number)
        if name not in self._fds:
            self._fds[name] = self._open(name)
        return SlotFile(self._fds[name], header)

    def others(self, header: SlotFileHeader) -> list[SlotFileReader]:
        """Return the files of other servers that have records of the same kind and size."""
        found = []
        for path in sorted(self._folder.glob(f"{header.kind}-*.kv")):
            if path.name in self._fds or not NAME.fullmatch(path.name):
                continue
            reader = self._readers.get(path)
            if reader is None and (reader := open_reader(path)) is not None:
                self._readers[path] = reader
            if reader is not None and reader.header.record_bytes == header.record_bytes:
                found.append(reader)
        return found


def open_reader(path: Path) -> SlotFileReader | None:
    """Return the records of a file; None where it is none, or has gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    header = read_header(fd)
    if header is None:
        os.close(fd)
        return None
    return SlotFileReader(fd, header)
