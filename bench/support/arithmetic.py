"""How many products all cores together add up in a second, from registers: their roof."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.native_core import best_kernels
from support.compiled import compiled

TRIAL_S, TRIALS = 0.1, 5  # of each thread, for one figure
FP32 = "fp32"
# What the executor's kernels multiply with, by their name (`best_kernels`) and the factors: those
# of bf16 weights, 16 bits beside quantized weights, and 8 bits. Products per one of the loop.
LOOPS: dict[str, dict[str, tuple[str, float]]] = {
    "avx512 with amx": {
        "bf16": ("bf16_tiles", 1),
        "int16": ("int8_tiles", 0.5),  # two products of bytes are one
        "int8": ("int8_tiles", 1),
    },
    "avx512 with bf16": {
        "bf16": ("bf16_avx512", 1),
        "int16": ("int16_avx512", 1),
        "int8": ("int8_avx512", 1),
    },
    "avx512": {
        "bf16": ("fp32_avx512", 1),
        "int16": ("int16_avx512", 1),
        "int8": ("int8_avx512", 1),
    },
    "avx512 without vnni": {
        "bf16": ("fp32_avx512", 1),
        "int16": ("int16_avx2", 1),
        "int8": ("int16_avx2", 1),
    },
    "avx2 with vnni": {
        "bf16": ("fp32_avx2", 1),
        "int16": ("int16_avx_vnni", 1),
        "int8": ("int8_avx_vnni", 1),
    },
    "avx2": {"bf16": ("fp32_avx2", 1), "int16": ("int16_avx2", 1), "int8": ("int16_avx2", 1)},
}


class Arithmetic:
    """Threads that multiply and add at the same time.

    Cores that are two threads of one share its units: each alone is as fast as both together.

    Args:
        loop: of arithmetic.c.
        share: products that one of the loop's is worth.
    """

    def __init__(self, threads: int, loop: str = FP32, share: float = 1) -> None:
        self._add = compiled("arithmetic")[f"add_{loop}"]
        self._add.argtypes = (ctypes.c_int64,)
        self._add.restype = ctypes.c_int64
        self._share = share
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._products = 0.0  # of a thread, of one measurement
        rounds = 1 << 20
        self._rounds = int(rounds * TRIAL_S / self._seconds(rounds))

    def products_per_s(self) -> float:
        """Measure; the best of some trials."""
        least = min(self._seconds(self._rounds) for _ in range(TRIALS))
        return self._threads * self._products / least

    def flops_per_s(self) -> float:
        """Measure likewise; a product that is added is two of them."""
        return 2 * self.products_per_s()

    def _seconds(self, rounds: int) -> float:
        start = time.perf_counter()
        all = [self._pool.submit(self._add, rounds) for _ in range(self._threads)]
        products = [one.result() for one in all]
        seconds = time.perf_counter() - start
        self._products = self._share * products[0]
        return seconds


def kernels_of(isa: str) -> str:
    """Return the name of the kernels that an executor of this instruction set has."""
    best = best_kernels()
    if isa != "avx2" or best.startswith("avx2"):
        return best
    return "avx2 with vnni" if "avx_vnni" in Path("/proc/cpuinfo").read_text().split() else "avx2"


def arithmetic_of(isa: str, factors: str, threads: int) -> Arithmetic | None:
    """Return the loop of an executor's products, or None where there is none."""
    loops = LOOPS.get(kernels_of(isa))
    return None if loops is None else Arithmetic(threads, *loops[factors])
