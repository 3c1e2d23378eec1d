"""A file as an array of bytes, read on access and given back."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError

AHEAD_BYTES = 1 << 28  # that the system is asked to read before they are used
FORGOTTEN_BYTES = 1 << 26  # that it is asked to forget at a time
HUGE_PAGE = 1 << 21  # the largest piece of the cache, which is forgotten as a whole


class MappedFile(mmap.mmap):
    """A mapping that knows its file."""

    path: Path


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
        mapping.path = path
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


def release(view: npt.NDArray[Any]) -> None:
    """Take the pages of a mapped file, of which `view` is a part, out of this process's memory.

    What they hold stays valid: it is read again on access. A view of other memory is left alone.
    """
    if extent := extent_of(view):
        advise(extent, mmap.MADV_DONTNEED)


def advise(extent: Extent, advice: int) -> None:
    """Tell the system how the pages of an extent are used."""
    first = extent.begin // mmap.PAGESIZE * mmap.PAGESIZE
    extent.file.madvise(advice, first, extent.end - first)


class ReadAhead:
    """Has the system read mapped files before they are used, in the order of their use.

    A page that is read on access is waited for, and nothing is read meanwhile.

    Args:
        extents: in the order of their use; None is other memory.
        keeps_cache: whether the system may keep in its cache what was used.
    """

    def __init__(self, extents: Sequence[Extent | None], keeps_cache: bool) -> None:
        self._extents = extents
        self._keeps_cache = keeps_cache
        self._num_asked = 0
        self._bytes_ahead = 0  # asked for, and not yet used
        self._used: Extent | None = None  # since the last that was forgotten

    def use(self, index: int) -> None:
        """Ask for what comes after the extent at `index`, which is used now."""
        while self._num_asked < len(self._extents) and (
            self._num_asked <= index or self._bytes_ahead < AHEAD_BYTES
        ):
            if extent := self._extents[self._num_asked]:
                advise(extent, mmap.MADV_WILLNEED)
                self._bytes_ahead += extent.end - extent.begin
            self._num_asked += 1

    def end_use(self, index: int) -> None:
        """Note that the extents up to `index` are used no more."""
        extent = self._extents[index]
        if extent is None:
            return
        self._bytes_ahead -= extent.end - extent.begin
        if self._keeps_cache:
            return
        used = self._used
        if used is None or used.file is not extent.file or extent.begin < used.begin:
            used = extent
        self._used = Extent(used.file, used.begin, extent.end)
        if self._used.end - self._used.begin >= FORGOTTEN_BYTES:
            forget(self._used)
            self._used = Extent(used.file, extent.end // HUGE_PAGE * HUGE_PAGE, extent.end)


def forget(extent: Extent) -> None:
    """Take what no process has mapped out of the system's cache."""
    try:
        file = os.open(extent.file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it was renamed; its pages go when others need the memory
        return
    try:
        size = extent.end - extent.begin
        os.posix_fadvise(file, extent.begin, size, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
