"""A file as an array of bytes, read on access."""

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError


class MappedFile(mmap.mmap):
    """A mapping that has its file open."""

    path: Path
    descriptor = -1

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def bypass_cache(self) -> None:
        """Have the descriptor read past the system's cache, where the file system can."""
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self.descriptor, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
        except OSError:
            with suppress(OSError):
                fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)


class Extent(NamedTuple):
    """Adjacent bytes of a mapped file."""

    file: MappedFile
    begin: int
    end: int


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Map `path` read-only, [bytes]. The mapping lives as long as any view of the array."""
    try:
        with path.open("rb") as file:
            mapping = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
            mapping.path, mapping.descriptor = path, os.dup(file.fileno())
        return np.frombuffer(mapping, np.uint8)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path}: cannot be read: {error}") from error


def extent_of(view: npt.NDArray[Any]) -> Extent | None:
    """Return the bytes of a file that a view spans; None is other memory."""
    base: Any = view
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, MappedFile):
        return None
    low, high = np.lib.array_utils.byte_bounds(view)
    begin = np.frombuffer(base, np.uint8).ctypes.data
    return Extent(base, low - begin, high - begin)
