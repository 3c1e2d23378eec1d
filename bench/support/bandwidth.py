"""How fast memory can be read, and how much of it one token needs.

A read goes over more than a cache holds, in huge pages, in several patterns; which one is fastest
depends on the machine.
"""

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.engine_proc.worker.execution.cache_sizes import page_bytes
from headrace.engine_proc.worker.execution.cpu_executor import KVDtype
from headrace.engine_proc.worker.models.model import open_model
from headrace.engine_proc.worker.models.specs.decoder_spec import DecoderSpec
from headrace.model.gguf import read_metadata
from support.compiled import compiled

BYTES = 1 << 30
PATTERNS = ((1, 4096), (2, 1536), (6, 768), (6, 1536), (6, 3072), (12, 768))  # streams, bytes ahead
TRIALS = 5  # of each pattern
READS = 10  # for one figure


class Bandwidth:
    """Memory that is read again and again."""

    def __init__(self, threads: int) -> None:
        self._read = compiled("bandwidth").read_blocks
        self._read.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_ssize_t)
        self._memory = mmap.mmap(-1, BYTES)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        for page in range(0, BYTES, mmap.PAGESIZE):
            self._memory[page] = 1
        self._share = BYTES // threads // mmap.PAGESIZE * mmap.PAGESIZE
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._places = [start + thread * self._share for thread in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        self._pattern = max(PATTERNS, key=lambda pattern: max(self._rates(pattern, TRIALS)))

    def bytes_per_s(self) -> float:
        """Measure for about as long as an engine decodes, in the fastest pattern."""
        rates = self._rates(self._pattern, READS)
        return len(rates) / sum(1 / rate for rate in rates)

    def _rates(self, pattern: tuple[int, int], times: int) -> list[float]:
        return [self._rate(*pattern) for _ in range(times)]

    def _rate(self, streams: int, ahead: int) -> float:
        start = time.perf_counter()
        reads = [
            self._pool.submit(self._read, place, self._share, streams, ahead)
            for place in self._places
        ]
        for read in reads:
            read.result()
        return self._share * len(self._places) / (time.perf_counter() - start)


def active_bytes(path: Path, context: int) -> float:
    """Return what one token at a place in a text has to read of a .gguf file, and of its KV cache.

    Of the embedding a token reads a row, unless it is the head as well. Windows are not looked at.
    """
    spec = open_model(path).spec
    tensors = {tensor.name: tensor.nbytes for tensor in read_metadata(path).tensors}
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    weights = sum(nbytes * share_read(spec, name) for name, nbytes in tensors.items())
    return weights + context * page_bytes(spec, 1, KVDtype.BFLOAT16)


def share_read(spec: DecoderSpec, tensor: str) -> float:
    """Return the share of a tensor that one token reads."""
    if "_exps." not in tensor:
        return 1.0
    mixture = spec.layers[int(tensor.split(".")[1])].mixture
    assert mixture is not None
    return mixture.experts_per_token / mixture.num_experts
