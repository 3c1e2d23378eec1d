"""GPUs made of CPU threads: `Memory`, `Kernels` and streams on which the real kernels run.

Each rank has memory of its own, whether it is a thread or a process. What it opens of another's is
mapped a second time, at another address. `tests/support/gpu_threads.h` runs the kernels.
"""

import ctypes
import functools
import hashlib
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from headrace.engine_proc.worker.parallel.gpu_protocols import Argument, IpcRegion
from headrace.engine_proc.worker.parallel.ipc_workspace import GROUP

T = TypeVar("T")
SOAK = Path(__file__).with_name("all_reduce_soak.cpp")
SHIM = SOAK.with_name("gpu_threads.h")
KERNELS = SOAK.parents[2] / "csrc" / "collectives" / "all_reduce.cuh"
FLAGS = "-std=c++17 -O1 -Wall -Wextra -Werror -Wno-unknown-pragmas -ffp-contract=off -pthread"
DEADLINE_S = 300.0
PAGE_BYTES = 4096
BUILDING = threading.Lock()
MAPPED_PAGES = set[int]()  # of the host, by the one driver of a process

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@functools.cache
def build(world: int, *flags: str) -> Path:
    """Compile the kernels for a number of ranks, once for all processes."""
    command = ["g++", *FLAGS.split(), f"-DHEADRACE_WORLD={world}", *flags, str(SOAK)]
    sources = b"".join(path.read_bytes() for path in (SOAK, SHIM, KERNELS))
    name = hashlib.sha256(f"{command}".encode() + sources).hexdigest()[:16]
    path = SOAK.parents[2] / "build" / f"soak-{name}"
    with BUILDING:
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            subprocess.run([*command, "-o", str(draft)], check=True)
            draft.replace(path)
    return path


@functools.cache
def library(world: int) -> ctypes.CDLL:
    """Return the kernels as a library."""
    return ctypes.CDLL(str(build(world, "-shared", "-fPIC")))


class Mappings:
    """Pieces of memory, by address, and the files behind them."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def map(self, fd: int, num_bytes: int) -> int:
        address: int = libc.mmap(None, num_bytes, 3, 1, fd, 0)  # read and write, shared
        self.sizes[address] = num_bytes
        return address

    def unmap(self, address: int) -> None:
        assert libc.munmap(address, self.sizes.pop(address)) == 0


class Stream:
    """Launches run in order, or are recorded."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.running: list[Future[None]] = []
        self.graph: list[Callable[[], None]] | None = None

    def launch(self, work: Callable[[], None]) -> None:
        if self.graph is None:
            self.running.append(self.executor.submit(work))
        else:
            self.graph.append(work)

    def synchronize(self) -> None:
        running, self.running = self.running, []
        for work in running:
            work.result(DEADLINE_S)


class ThreadGpu:
    """A GPU of a rank: a `Memory`, and a `Kernels` with few and small blocks.

    Args:
        fails: names of methods that raise.
        exports_tensors: whether tensors can be exported; the workspace can in any case.
    """

    num_threads = 8
    max_blocks = 2
    device = "cpu"

    def __init__(self, world: int, fails: Sequence[str] = (), exports_tensors: bool = True) -> None:
        self._library = library(world)
        self._group = ctypes.create_string_buffer(GROUP.size)
        self.group_address = ctypes.addressof(self._group)
        self.kernels = self
        self.fails = fails
        self._exports_tensors = exports_tensors
        self.memory, self.opened = Mappings(), Mappings()
        self._files: dict[int, int] = {}
        self.streams = {1: Stream(), 2: Stream()}
        self.stream = 1  # the current one
        self.waits = False  # a launch returns when it is done; for callers that let go of tensors
        self.num_opened = 0
        self.num_launched: dict[str, int] = {}

    def _may(self, name: str) -> None:
        if name in self.fails:
            raise OSError(f"no {name} today")

    def allocate(self, num_bytes: int) -> int:
        self._may("allocate")
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, num_bytes)
        address = self.memory.map(fd, num_bytes)
        self._files[address] = fd
        return address

    def free(self, address: int) -> None:
        self._may("free")
        self.memory.unmap(address)
        os.close(self._files.pop(address))

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    def export(self, address: int, num_bytes: int) -> IpcRegion | None:
        self._may("export")
        for base, size in self.memory.sizes.items():
            if base <= address and address + num_bytes <= base + size:
                if not self._exports_tensors and size < 1 << 20:
                    return None
                handle = b"%d %d %d" % (os.getpid(), self._files[base], size)
                return IpcRegion(handle.ljust(64, b"\0"), address - base)
        return None

    def open(self, handle: bytes) -> int:
        self._may("open")
        self.num_opened += 1
        process, theirs, size = map(int, handle.rstrip(b"\0").split())
        fd = os.open(f"/proc/{process}/fd/{theirs}", os.O_RDWR)
        try:
            return self.opened.map(fd, size)
        finally:
            os.close(fd)

    def close(self, address: int) -> None:
        self._may("close")
        self.opened.unmap(address)

    def map_host(self, address: int, num_bytes: int) -> int:
        self._may("map_host")
        assert address not in MAPPED_PAGES, "a driver maps a page once"
        MAPPED_PAGES.add(address)
        return address

    def unmap_host(self, address: int) -> None:
        MAPPED_PAGES.remove(address)

    def synchronize(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()

    def is_capturing(self, stream: int) -> bool:
        return self.streams[stream].graph is not None

    def launch(
        self, name: str, num_blocks: int, stream: int, arguments: Sequence[Argument]
    ) -> None:
        self._may("launch")
        self.num_launched[name] = self.num_launched.get(name, 0) + 1
        num_addresses = 6 if name.startswith("fused") else 3
        for index, argument in enumerate(arguments):
            assert (type(argument) is int) == (index < num_addresses), (name, index)
        words = (ctypes.c_uint64 * len(arguments))(*map(word, arguments))

        def run() -> None:
            group = ctypes.c_void_p(self.group_address)
            size = num_blocks, self.num_threads
            found = self._library.run_kernel(name.encode(), *size, group, words)
            assert found, name

        self.streams[stream].launch(run)
        if self.waits:
            self.streams[stream].synchronize()

    def replay(self, graph: list[Callable[[], None]]) -> None:
        """Run a graph."""
        for work in graph:
            self.streams[1].launch(work)

    def tensor(self, values: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Return a copy of a tensor in this GPU's memory, at an offset within an allocation."""
        room = -(-(values.nbytes + offset) // PAGE_BYTES) * PAGE_BYTES
        address = self.allocate(room)
        memory = (ctypes.c_char * values.nbytes).from_address(address + offset)
        result = torch.frombuffer(memory, dtype=values.dtype).view(values.shape)
        return result.copy_(values)

    def capture(self, body: Callable[[], T]) -> tuple[list[Callable[[], None]], T]:
        """Record launches, on a stream of its own."""
        stream = self.streams[2]
        stream.graph, self.stream = [], 2
        try:
            result = body()
            return stream.graph, result
        finally:
            stream.graph, self.stream = None, 1


def word(argument: Argument) -> int:
    """Return an argument as the shim takes it; only what cuda.core gets right is let through."""
    if isinstance(argument, np.float32):
        return int(argument.view(np.uint32))
    assert type(argument) in (int, np.uint32), argument
    return int(argument)


class ThreadPeers:
    """One rank of several threads."""

    def __init__(self, rank: int, world: int, meeting: "Meeting") -> None:
        self.rank, self.world, self._meeting = rank, world, meeting

    def gather(self, data: bytes) -> list[bytes]:
        return self._meeting.gather(self.rank, data)


class Meeting:
    """An exchange of values between all threads at once."""

    def __init__(self, world: int) -> None:
        self._told: list[bytes] = [b""] * world
        self._barrier = threading.Barrier(world)

    def gather(self, rank: int, data: bytes) -> list[bytes]:
        self._told[rank] = data
        self._barrier.wait(DEADLINE_S)
        told = list(self._told)
        self._barrier.wait(DEADLINE_S)
        return told


def on_ranks(world: int, body: Callable[[ThreadPeers], T]) -> list[T]:
    """Run `body` on all ranks at once and return the results; raise the first error."""
    meeting = Meeting(world)
    with ThreadPoolExecutor(world) as executor:
        peers = [ThreadPeers(rank, world, meeting) for rank in range(world)]
        running: list[Future[T]] = [executor.submit(body, own) for own in peers]
        return [rank.result(DEADLINE_S) for rank in running]


def never(*_: Any) -> None:
    """Stand in for a function that must not be called."""
    raise AssertionError("not here")
