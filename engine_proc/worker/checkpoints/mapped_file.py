"""A file as an array of bytes, read on access."""

import mmap
from pathlib import Path

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
