"""GPU memory by the CUDA driver: a `Memory`."""

import ctypes
from typing import Any

from headrace.engine_proc.worker.parallel.gpu_protocols import IpcRegion
from headrace.errors import HeadraceError

HANDLE_BYTES = 64
WHOLE_BYTES = 2 << 20  # what the driver maps at once: nothing else is in an exported allocation
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
DEFAULT_STREAM = 0  # where copies are made that name none
PORTABLE_AND_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP
PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for all contexts of the process


class CudaError(HeadraceError):
    """A call of the driver failed; the text has the call and the driver's name of the error."""


class CudaMemory:
    """The memory of the GPU whose context is current in this thread.

    Args:
        driver: the module `cuda.bindings.driver`.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def _call(self, name: str, *arguments: Any) -> Any:
        """Return what a function of the driver gives: nothing, a value, or several."""
        code, *values = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise CudaError(f"{name}: {getattr(code, 'name', code)}")
        return values[0] if len(values) == 1 else values

    def allocate(self, num_bytes: int) -> int:
        """Allocate whole pages, not from a pool: what pools give cannot always be exported."""
        num_bytes = -(-num_bytes // WHOLE_BYTES) * WHOLE_BYTES
        address = int(self._call("cuMemAlloc", num_bytes))
        self._call("cuMemsetD8", address, 0, num_bytes)
        self._call("cuStreamSynchronize", DEFAULT_STREAM)
        return address

    def free(self, address: int) -> None:
        """Free an allocation."""
        self._call("cuMemFree", address)

    def write(self, address: int, data: bytes) -> None:
        """Copy to the GPU; it is there on return."""
        source = ctypes.create_string_buffer(data, len(data))
        self._call("cuMemcpyHtoD", address, ctypes.addressof(source), len(data))
        self._call("cuStreamSynchronize", DEFAULT_STREAM)

    def read(self, address: int, num_bytes: int) -> bytes:
        """Copy from the GPU."""
        target = ctypes.create_string_buffer(num_bytes)
        self._call("cuMemcpyDtoH", ctypes.addressof(target), address, num_bytes)
        return target.raw

    def export(self, address: int, num_bytes: int) -> IpcRegion | None:
        """Return where others find a tensor.

        None where it is not in one allocation of IPC: with torch's expandable segments.
        """
        capable = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        if not int(self._call("cuPointerGetAttribute", capable, address)):
            return None
        base, size = map(int, self._call("cuMemGetAddressRange", address))
        if address + num_bytes > base + size:
            return None
        handle = self._call("cuIpcGetMemHandle", base)
        return IpcRegion(ctypes.string_at(handle.getPtr(), HANDLE_BYTES), address - base)

    def open(self, handle: bytes) -> int:
        """Map an allocation of another process."""
        theirs = self._driver.CUipcMemHandle()
        ctypes.memmove(theirs.getPtr(), handle, HANDLE_BYTES)
        return int(self._call("cuIpcOpenMemHandle", theirs, LAZY_PEER_ACCESS))

    def close(self, address: int) -> None:
        """Unmap an opened allocation."""
        self._call("cuIpcCloseMemHandle", address)

    def allocate_host(self, num_bytes: int) -> int:
        """Return memory of the host that is pinned: copies to and from it need no host."""
        return int(self._call("cuMemHostAlloc", num_bytes, PORTABLE))

    def free_host(self, address: int) -> None:
        """Free a host allocation."""
        self._call("cuMemFreeHost", address)

    def map_host(self, address: int, num_bytes: int) -> int:
        """Return where kernels find a page of the host."""
        self._call("cuMemHostRegister", address, num_bytes, PORTABLE_AND_MAPPED)
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def unmap_host(self, address: int) -> None:
        """Undo `map_host`."""
        self._call("cuMemHostUnregister", address)

    def synchronize(self) -> None:
        """Wait until everything that was launched has ended."""
        self._call("cuCtxSynchronize")

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream is being captured."""
        return int(self._call("cuStreamIsCapturing", stream)) != 0
