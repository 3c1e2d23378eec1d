"""Memory of the host that a GPU copies from and to by itself: pinned, by cuda-python.

Without cuda-python it is torch's, which has the same from the driver, in sizes of its own.
"""

import ctypes
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol, SupportsInt

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError

PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of the process

MakeRoom = Callable[[int], Tensor]  # returns so many zeros, [numbers], int32


class HostMemory(Protocol):
    """Host memory that the driver pins."""

    def allocate_host(self, num_bytes: int) -> int:
        """Return where pinned memory is."""

    def free_host(self, address: int) -> None:
        """Give it back."""


def room_for(device: torch.device) -> MakeRoom:
    """Return what makes room for numbers that go to a device. A GPU's context is current."""
    if device.type != "cuda":
        return partial(torch.zeros, dtype=torch.int32)
    try:
        from cuda.bindings import driver
    except ImportError:
        return partial(torch.zeros, dtype=torch.int32, pin_memory=True)
    from headrace.engine_proc.worker.parallel.ipc_memory import CudaMemory

    return partial(pinned, memory=CudaMemory(driver))


def pinned(num: int, memory: HostMemory) -> Tensor:
    """Return zeros in pinned memory, [numbers], int32; it goes with the last view of them."""
    address = memory.allocate_host(4 * num)
    block = (ctypes.c_int32 * num).from_address(address)
    # Where the process ends, so does the memory, and there may be no driver to ask any more.
    weakref.finalize(block, memory.free_host, address).atexit = False
    return torch.from_numpy(np.frombuffer(memoryview(block), np.int32)).zero_()


def pin(address: int, num_bytes: int, register: Callable[[int, int, int], SupportsInt]) -> None:
    """Pin memory that this process has mapped, until it ends.

    Args:
        register: `cudaHostRegister`; 0 is success.

    Raises:
        ConfigError: the driver does not.
    """
    code = register(address, num_bytes, PORTABLE)
    if int(code):
        raise ConfigError(
            f"--kv-store-bytes: the driver pins no {num_bytes} bytes of memory ({code}); lower it"
        )
