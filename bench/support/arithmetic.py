"""How fast all cores together multiply and add in fp32, from registers: the roof of products."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor

from support.compiled import compiled

TRIAL_S, TRIALS = 0.1, 5  # of each thread, for one figure


class Arithmetic:
    """Threads that multiply and add at the same time.

    Cores that are two threads of one share its units: each alone is as fast as both together.
    """

    def __init__(self, threads: int) -> None:
        library = compiled("arithmetic")
        self._add = library.add_products
        self._add.argtypes = (ctypes.c_int64, ctypes.c_float, ctypes.c_float)
        self._flops = ctypes.c_int64.in_dll(library, "flops_of_round").value
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        rounds = 1 << 20
        self._rounds = int(rounds * TRIAL_S / self._seconds(rounds))

    def flops_per_s(self) -> float:
        """Measure; the best of some trials."""
        least = min(self._seconds(self._rounds) for _ in range(TRIALS))
        return self._threads * self._rounds * self._flops / least

    def _seconds(self, rounds: int) -> float:
        start = time.perf_counter()
        all = [self._pool.submit(self._add, rounds, 0.5, 1.0) for _ in range(self._threads)]
        for one in all:
            one.result()
        return time.perf_counter() - start
