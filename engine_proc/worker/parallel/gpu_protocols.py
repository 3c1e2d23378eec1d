"""Protocols that the all-reduce needs of a GPU: memory that other processes map, and launches.

`ipc_memory.py` and `ipc_kernels.py` are the real ones. Tests have CPU threads in their place.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

Argument = Any  # of a kernel: int is a pointer; numpy's uint32 and float32 are what they say


class IpcRegion(msgspec.Struct, array_like=True, frozen=True):
    """A piece of GPU memory as another process finds it: in the allocation of a handle."""

    handle: bytes
    offset: int


class Memory(Protocol):
    """Memory of one GPU, in one process. Every call raises if the driver fails."""

    def allocate(self, num_bytes: int) -> int:
        """Return zeroed memory that can be exported."""

    def free(self, address: int) -> None:
        """Free an allocation."""

    def write(self, address: int, data: bytes) -> None:
        """Copy to the GPU; it is there on return."""

    def read(self, address: int, num_bytes: int) -> bytes:
        """Copy from the GPU."""

    def export(self, address: int, num_bytes: int) -> IpcRegion | None:
        """Return where others find a tensor; None where its memory cannot be exported."""

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process."""

    def close(self, address: int) -> None:
        """Unmap an opened allocation."""

    def map_host(self, address: int, num_bytes: int) -> int:
        """Return where kernels find a page of the host."""

    def unmap_host(self, address: int) -> None:
        """Undo `map_host`, by the host's address."""

    def synchronize(self) -> None:
        """Wait until everything that was launched has ended."""

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream is being captured."""


class Kernels(Protocol):
    """The kernels of `csrc/collectives/all_reduce.cuh`, for one number of ranks."""

    num_threads: int  # of a block
    max_blocks: int
    group_address: int  # of the `Group` that they read

    def launch(
        self, name: str, num_blocks: int, stream: int, arguments: Sequence[Argument]
    ) -> None:
        """Launch a kernel by name."""
