"""Embeddings of images, in shared memory: from the vision worker to the workers.

An inherited memfd of rows, each as long as a token's embedding. The engine's `EncoderCache`
allocates the rows.
"""

import mmap
import os

import numpy as np
import numpy.typing as npt

ROW_NUMBER_BYTES = 4  # f32


class EmbeddingArea:
    """One end of the area; which end is a matter of use.

    Args:
        fd: made by `create`.
        row_size: numbers of each row.
    """

    def __init__(self, fd: int, row_size: int) -> None:
        self.fd = fd
        numbers: npt.NDArray[np.float32] = np.frombuffer(mmap.mmap(fd, 0), np.float32)
        self.rows = numbers.reshape(-1, row_size)

    @classmethod
    def create(cls, num_rows: int, row_size: int) -> "EmbeddingArea":
        """Make an area. It takes only the memory that is written."""
        fd = os.memfd_create("headrace-embeddings", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_rows * row_size * ROW_NUMBER_BYTES)
        return cls(fd, row_size)
