"""A file as an array of bytes, read on access and given back."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Map `path` read-only, [bytes]. The mapping lives as long as any view of the array."""
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelError(f"{path}: cannot be read: {error}") from error


def release(view: npt.NDArray[Any]) -> None:
    """Take the pages of a mapped file, of which `view` is a part, out of this process's memory.

    What they hold stays valid: it is read again on access. A view of other memory is left alone.
    """
    base: Any = view
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if not isinstance(base, mmap.mmap):
        return
    low, high = np.lib.array_utils.byte_bounds(view)
    begin = np.frombuffer(base, np.uint8).ctypes.data
    first = (low - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    base.madvise(mmap.MADV_DONTNEED, first, high - begin - first)
