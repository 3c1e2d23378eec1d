"""Reads weights from mapped files, for threads that use each once."""

import mmap
import os
import threading
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.worker.checkpoints.file_order import extent_of_weight
from headrace.engine_proc.worker.checkpoints.mapped_file import Extent
from headrace.engine_proc.worker.checkpoints.weights import StoredTensor, Weight
from headrace.errors import ModelError

ALIGNMENT = mmap.PAGESIZE  # of memory and offsets, past the system's cache


class FileReader:
    """Reads weights, each thread into a buffer of its own.

    The first touch of a page costs more than a copy of it, in a mapping as in the cache. A virtual
    machine pays most. A buffer is touched again and again.

    Args:
        extents: what will be read.
        keeps_cache: whether the system may keep in its cache what was read.
    """

    def __init__(self, extents: Iterable[Extent | None], keeps_cache: bool) -> None:
        self._own = threading.local()
        if not keeps_cache:
            for file in {extent.file for extent in extents if extent}:
                file.bypass_cache()

    def read(self, weight: Weight) -> Weight:
        """Return a weight in the thread's buffer, until that thread reads the next.

        One that no file has as it is stays so.

        Raises:
            ModelError: the file has become shorter, or cannot be read.
        """
        extent = extent_of_weight(weight)
        if extent is None:
            return weight
        assert isinstance(weight, StoredTensor)
        begin = extent.begin // ALIGNMENT * ALIGNMENT
        buffer = self._buffer(-(-extent.end // ALIGNMENT) * ALIGNMENT - begin)
        read_into(extent._replace(begin=begin), buffer.data)
        first = buffer[extent.begin - begin :]
        data = np.lib.stride_tricks.as_strided(first, weight.data.shape, weight.data.strides)
        return replace(weight, data=data)

    def _buffer(self, size: int) -> npt.NDArray[np.uint8]:
        """Return the thread's buffer, which begins with a page."""
        if getattr(self._own, "size", 0) < size:
            self._own.buffer, self._own.size = mmap.mmap(-1, size), size
        return np.frombuffer(self._own.buffer, np.uint8, size)


def read_into(extent: Extent, memory: memoryview) -> None:
    """Read all bytes of an extent, and behind it what memory has room for.

    Raises:
        ModelError: the file has become shorter, or cannot be read.
    """
    file, at, end = extent
    while at < end:
        try:
            num_read = os.preadv(file.descriptor, [memory], at)
        except OSError as error:
            raise ModelError(f"{file.path}: cannot be read: {error}") from error
        if at + num_read < end:  # past the cache, the next read begins with a page, too
            num_read = num_read // ALIGNMENT * ALIGNMENT
        if num_read == 0:
            raise ModelError(f"{file.path}: has become shorter than {end} bytes")
        memory, at = memory[num_read:], at + num_read
