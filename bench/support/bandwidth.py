"""How fast this machine's memory is read, by all cores at once."""

import threading
import time

import numpy as np

BYTES = 1 << 29  # of each thread, far more than any cache


class Bandwidth:
    """Memory that is read from end to end, by a thread per core."""

    def __init__(self, threads: int) -> None:
        self._parts = [np.ones(BYTES // 4, np.float32) for _ in range(threads)]

    def measure(self) -> float:
        """Return bytes a second of one reading."""
        readers = [threading.Thread(target=part.max) for part in self._parts]
        start = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return BYTES * len(readers) / (time.perf_counter() - start)
