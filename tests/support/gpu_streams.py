"""Ranks as streams of one GPU: a `Memory` each, with kernels that run at the same time.

No call may wait for the whole GPU, where others' kernels wait for this rank's. Memory is taken
beforehand, and copies use the rank's own stream. A process cannot open handles of its own, so ranks
give each other plain addresses.
"""

import ctypes
import faulthandler
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from headrace.engine_proc.worker.parallel.gpu_protocols import IpcRegion
from headrace.engine_proc.worker.parallel.ipc_kernels import CudaKernels, compile_cubin
from headrace.engine_proc.worker.parallel.ipc_memory import CudaMemory

T = TypeVar("T")
ARENA_BYTES = 32 << 20
PIECE_BYTES = 1 << 20
MAX_BLOCKS = 8  # of each of 8 ranks: all are on the GPU at once
CAPTURING = threading.Lock()

LIMIT_S = 600.0  # of a test: a GPU that waits for ever takes what waits for it along

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault(
    "CUDA_DEVICE_MAX_CONNECTIONS", "32"
)  # streams that share one may wait in turn


def need_gpu() -> None:
    """Skip a test where there is no GPU, or nothing to use it with."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    pytest.importorskip("cuda.core", reason="cuda-python is not installed")


@contextmanager
def limited() -> Iterator[None]:
    """End the process, with the stacks of all threads, if what is within takes too long."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@functools.cache
def code(world: int, macros: tuple[tuple[str, str], ...]) -> bytes:
    """Compile the kernels for this GPU."""
    major, minor = torch.cuda.get_device_capability()
    return compile_cubin(f"sm_{major}{minor}", world, macros)


class StreamGpu(CudaMemory):
    """A rank's stream, made in the thread that is the rank.

    Args:
        macros: for the kernels.
    """

    device = "cuda"

    def __init__(self, world: int, macros: Sequence[tuple[str, str]] = ()) -> None:
        from cuda.bindings import driver
        from cuda.core import Device

        Device(0).set_current()
        super().__init__(driver)
        self._own = torch.cuda.Stream()
        torch.cuda.set_stream(self._own)
        self._arena = torch.zeros(ARENA_BYTES, dtype=torch.uint8, device="cuda")
        self._next = self._arena.data_ptr()
        self._sides: list[Any] = []
        pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(8)]
        del pieces  # torch keeps them for what tensors this stream has later on
        self.kernels = CudaKernels(code(world, tuple(macros)), MAX_BLOCKS)
        self.waits = False
        torch.cuda.synchronize()

    @property
    def stream(self) -> int:
        """The current stream of this thread."""
        current: int = torch.cuda.current_stream().cuda_stream
        return current

    def allocate(self, num_bytes: int) -> int:
        address = self._next
        self._next += -(-num_bytes // 256) * 256
        assert self._next <= self._arena.data_ptr() + ARENA_BYTES
        self._call("cuMemsetD8Async", address, 0, num_bytes, self._own.cuda_stream)
        self.synchronize()
        return address

    def free(self, address: int) -> None:
        return

    def write(self, address: int, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        where = (address, ctypes.addressof(source), len(data), self._own.cuda_stream)
        self._call("cuMemcpyHtoDAsync", *where)
        self.synchronize()

    def read(self, address: int, num_bytes: int) -> bytes:
        target = ctypes.create_string_buffer(num_bytes)
        where = (ctypes.addressof(target), address, num_bytes, self._own.cuda_stream)
        self._call("cuMemcpyDtoHAsync", *where)
        self.synchronize()
        return target.raw

    def export(self, address: int, num_bytes: int) -> IpcRegion | None:
        return IpcRegion(address.to_bytes(64, "little"), 0)

    def open(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def close(self, address: int) -> None:
        return

    def synchronize(self) -> None:
        self._own.synchronize()

    def tensor(self, values: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Return a copy of a tensor, at an offset within an allocation."""
        room = torch.empty(offset + values.nbytes, dtype=torch.uint8, device="cuda")
        return room[offset:].view(values.dtype).view(values.shape).copy_(values)

    def capture(self, body: Callable[[], T]) -> tuple[Any, T]:
        """Capture a graph, on a stream of its own. One rank after another."""
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        self._sides.append(side)
        self.synchronize()
        with CAPTURING, torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = body()
            finally:
                graph.capture_end()
        return graph, result

    def replay(self, graph: Any) -> None:
        """Run a graph."""
        graph.replay()
