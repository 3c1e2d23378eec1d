"""All-reduce and all-gather of CPU workers in shared memory: `csrc/collectives/shm_all_reduce.h`.

The engine creates a group and passes its descriptor to the workers, which join by rank. The engine
itself has no rank: it watches. A process that sees a worker die ends all waits by `abort`.
"""

import ctypes
import errno
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from headrace.engine_proc.collectives.collectives import (
    CollectiveFailed,
    CollectiveOutcome,
    Collectives,
)
from headrace.errors import HeadraceError
from headrace.native_core import load_core

WATCHER = -1  # in the place of a rank: maps the group without being a part of it
NUMBERS = ("float32", "float16", "bfloat16")  # as `Number` of csrc/collectives/rank_sums.h
COLLECTIVES = ("nothing", "all_reduce", "all_gather", "broadcast")
ISAS = ("best", "portable", "avx2", "avx512", "neon")  # as `Isa` of csrc/cpu/kernels.h


class Array(Protocol):
    """The part of a numpy array or a torch tensor that collectives use."""

    @property
    def dtype(self) -> Any: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class ShmAllReduce(Collectives[Any]):
    """One rank of a group, or its watcher. One thread at a time, but for `abort`.

    All ranks call the same collectives in the same order. Arrays are numpy's or torch's, contiguous
    and on the CPU; after a failure their contents are undefined.

    Args:
        fd: made by `create`; it may be closed afterwards.
        isa: for tests of the paths, which give equal bits.

    Raises:
        HeadraceError: there is no memory for the rank's part.
    """

    def __init__(self, fd: int, rank: int, num_ranks: int, isa: str = "best") -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._core = core()
        error = ctypes.c_int32()
        self._group = self._core.headrace_shm_join(
            fd, rank, num_ranks, ISAS.index(isa), ctypes.byref(error)
        )
        if not self._group:
            raise no_segment(error.value, num_ranks)

    @staticmethod
    def create(num_ranks: int, half_bytes: int = 0) -> int:
        """Make a group and return its descriptor, for the workers to inherit.

        Args:
            half_bytes: of the two that each rank has to write into; 0 for the usual size.
        """
        fd: int = core().headrace_shm_create(num_ranks, half_bytes)
        if fd < 0:
            raise no_segment(-fd, num_ranks)
        return fd

    @property
    def handle(self) -> int:
        """The `headrace::ShmAllReduce`, for C++ that calls it directly."""
        handle: int = self._group
        return handle

    def all_reduce(self, x: Array) -> Any:
        """Replace `x` by its sum over the ranks: in their order, in fp32, rounded once.

        Returns `x`.
        """
        name = str(x.dtype).removeprefix("torch.")
        if name not in NUMBERS:
            raise TypeError(f"all_reduce adds {', '.join(NUMBERS)}; not {name}")
        address, num_bytes = memory_of(x)
        count = num_bytes // x.itemsize
        number = NUMBERS.index(name)
        self._end(self._core.headrace_shm_all_reduce(self._group, address, count, number))
        return x

    def all_gather(self, x: Array, out: Array) -> None:
        """Write the `x` of every rank to `out`, one after another.

        Args:
            out: shape [num_ranks, *x.shape]. `x` may be this rank's part of it.
        """
        address, num_bytes = memory_of(x)
        out_address, out_bytes = memory_of(out)
        if out_bytes != self.num_ranks * num_bytes:
            raise ValueError(f"out has {out_bytes} bytes, not {self.num_ranks} times {num_bytes}")
        self._end(self._core.headrace_shm_all_gather(self._group, address, out_address, num_bytes))

    def broadcast(self, x: Array, root: int = 0) -> None:
        """Replace `x` by that of rank `root`."""
        if not 0 <= root < self.num_ranks:
            raise ValueError(f"root {root} is no rank of {self.num_ranks}")
        address, num_bytes = memory_of(x)
        self._end(self._core.headrace_shm_broadcast(self._group, address, num_bytes, root))

    def abort(
        self, outcome: CollectiveOutcome = CollectiveOutcome.ABORTED, rank: int | None = None
    ) -> None:
        """End all waits, in every process; the first call sets the reason.

        Args:
            rank: the rank that failed. Default: this rank; None for the watcher.
        """
        about = self.rank if rank is None else rank
        self._core.headrace_shm_abort(self._group, outcome, about)

    def revive(self) -> None:
        """Make the group of use again after an `abort`. No rank may be in a collective."""
        self._core.headrace_shm_revive(self._group)

    def rejoin(self) -> None:
        """Rejoin a revived group as this rank, before any other call."""
        self._core.headrace_shm_rejoin(self._group)

    def check(self) -> None:
        """Raise `CollectiveFailed` if the group has come to its end."""
        self._end(self._core.headrace_shm_verdict(self._group))

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Do nothing: a CPU has no graphs to capture."""
        yield

    def waits(self) -> dict[str, int]:
        """Return how often this rank met the others, and looked, yielded and slept meanwhile."""
        counts = (ctypes.c_int64 * 4)()
        self._core.headrace_shm_waits(self._group, counts)
        return dict(zip(("rounds", "looks", "yields", "sleeps"), counts, strict=True))

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one fail."""
        if self._group:
            self._core.headrace_shm_leave(self._group)
            self._group = None

    def _end(self, verdict: int) -> None:
        if verdict == CollectiveOutcome.OK:
            return
        outcome = CollectiveOutcome(verdict & 0xFF)
        rank, by = (verdict >> 8 & 0xFF) - 1, (verdict >> 16 & 0xFF) - 1
        if outcome is CollectiveOutcome.MISMATCH:
            text = f"rank {rank} called {self._called(rank)}, rank {by} {self._called(by)}"
        elif outcome is CollectiveOutcome.PEER_DIED:
            text = f"rank {rank} died"
        else:
            text = "the workers were told to stop" if rank < 0 else f"rank {rank} failed"
        raise CollectiveFailed(outcome, None if rank < 0 else rank, text)

    def _called(self, rank: int) -> str:
        """Return what a rank called last, as text."""
        meta: int = self._core.headrace_shm_meta(self._group, rank)
        name, detail, size = COLLECTIVES[meta >> 60], meta >> 48 & 0xFFF, meta & ((1 << 48) - 1)
        details = {
            "all_reduce": f" of {size} {NUMBERS[detail % len(NUMBERS)]}",
            "all_gather": f" of {size} bytes",
            "broadcast": f" of {size} bytes from rank {detail}",
        }
        return name + details.get(name, "")


def memory_of(x: Any) -> tuple[int, int]:
    """Return where an array begins, and its bytes."""
    if hasattr(x, "data_ptr"):
        if not x.is_contiguous() or x.device.type != "cpu":
            raise ValueError("a collective takes contiguous tensors on the CPU")
        return x.data_ptr(), x.nbytes
    if not x.flags.c_contiguous:
        raise ValueError("a collective takes contiguous arrays")
    return x.__array_interface__["data"][0], x.nbytes


def no_segment(code: int, num_ranks: int) -> HeadraceError:
    """Return the error of a group that could not be made or joined."""
    if code in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
        return HeadraceError(
            f"there is no memory for the all-reduce of {num_ranks} workers, 512 KiB for each "
            f"({os.strerror(code)}); it counts as shared memory of this container"
        )
    return HeadraceError(f"the all-reduce of {num_ranks} workers: {os.strerror(code)}")


@functools.cache
def core() -> ctypes.CDLL:
    """Return the C++ core with the types of its functions."""
    library = load_core()
    pointer, int32 = ctypes.c_void_p, ctypes.c_int32
    uint32, uint64 = ctypes.c_uint32, ctypes.c_uint64
    types: dict[str, tuple[Any, list[Any]]] = {
        "create": (int32, [int32, uint64]),
        "join": (pointer, [int32, int32, int32, int32, pointer]),
        "leave": (None, [pointer]),
        "all_reduce": (uint32, [pointer, pointer, uint64, int32]),
        "all_gather": (uint32, [pointer, pointer, pointer, uint64]),
        "broadcast": (uint32, [pointer, pointer, uint64, int32]),
        "abort": (None, [pointer, int32, int32]),
        "revive": (None, [pointer]),
        "rejoin": (None, [pointer]),
        "verdict": (uint32, [pointer]),
        "meta": (uint64, [pointer, int32]),
        "waits": (None, [pointer, pointer]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, f"headrace_shm_{name}")
        function.restype, function.argtypes = result, arguments
    return library
