"""GPU memory asks the driver as cuda.bindings has it. The driver here is none: it never ran these
calls on a GPU."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine_proc.worker.parallel.gpu_protocols import Memory
from headrace.engine_proc.worker.parallel.ipc_memory import (
    HANDLE_BYTES,
    WHOLE_BYTES,
    CudaError,
    CudaMemory,
)

IPC_CAPABLE = 10


class Handle:
    """A CUipcMemHandle: 64 bytes that only a pointer shows."""

    def __init__(self) -> None:
        self.data = ctypes.create_string_buffer(HANDLE_BYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self.data)


class Driver:
    """Answers in the form of cuda.bindings.driver, with memory of the host."""

    CUipcMemHandle = Handle
    CUpointer_attribute = SimpleNamespace(
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE=IPC_CAPABLE
    )

    def __init__(self) -> None:
        self.buffers: dict[int, Any] = {}
        self.capable = 1
        self.capturing: list[int] = []
        self.called: list[str] = []

    def cuMemAlloc(self, num_bytes: int) -> tuple[int, int]:
        buffer = ctypes.create_string_buffer(b"\xff" * num_bytes, num_bytes)
        self.buffers[ctypes.addressof(buffer)] = buffer
        return 0, ctypes.addressof(buffer)

    def cuMemFree(self, address: int) -> tuple[int]:
        del self.buffers[address]
        return (0,)

    def cuMemsetD8(self, address: int, value: int, num_bytes: int) -> tuple[int]:
        ctypes.memset(address, value, num_bytes)
        return (0,)

    def cuMemcpyHtoD(self, target: int, source: int, num_bytes: int) -> tuple[int]:
        ctypes.memmove(target, source, num_bytes)
        return (0,)

    cuMemcpyDtoH = cuMemcpyHtoD

    def cuMemHostAlloc(self, num_bytes: int, flags: int) -> tuple[int, int]:
        assert flags == 1
        return self.cuMemAlloc(num_bytes)

    cuMemFreeHost = cuMemFree

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[int, int]:
        assert attribute == IPC_CAPABLE
        return 0, self.capable

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int, int]:
        base = max(base for base in self.buffers if base <= address)
        return 0, base, len(self.buffers[base])

    def cuIpcGetMemHandle(self, base: int) -> tuple[int, Handle]:
        handle = Handle()
        handle.data.raw = base.to_bytes(HANDLE_BYTES, "little")
        return 0, handle

    def cuIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[int, int]:
        assert flags == 1
        return 0, int.from_bytes(handle.data.raw, "little") + (1 << 40)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        assert flags == 0
        return 0, address + 1

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, int]:
        return 0, int(stream in self.capturing)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def answer(*arguments: Any) -> tuple[int]:
            self.called.append(name)
            return (0,)

        return answer


def test_memory_is_zeroed_written_read_and_freed() -> None:
    driver = Driver()
    memory: Memory = CudaMemory(driver)
    address = memory.allocate(5)
    assert len(driver.buffers[address]) == WHOLE_BYTES
    assert memory.read(address, 5) == bytes(5)
    memory.write(address + 1, b"abc")
    assert memory.read(address, 5) == b"\0abc\0"
    assert driver.called == ["cuStreamSynchronize"] * 2
    memory.synchronize()
    assert driver.called[2:] == ["cuCtxSynchronize"]
    memory.free(address)
    assert not driver.buffers


def test_a_tensor_is_exported_as_its_place_in_an_allocation() -> None:
    driver = Driver()
    memory = CudaMemory(driver)
    base = memory.allocate(100)
    region = memory.export(base + 48, 16)
    assert region is not None
    assert (len(region.handle), region.offset) == (HANDLE_BYTES, 48)
    assert memory.open(region.handle) == base + (1 << 40)
    assert memory.export(base + WHOLE_BYTES - 16, 32) is None, "it goes on in another allocation"
    driver.capable = 0
    assert memory.export(base, 16) is None


def test_a_page_of_the_host_is_mapped() -> None:
    driver = Driver()
    memory = CudaMemory(driver)
    assert memory.map_host(4096, 4096) == 4097
    memory.unmap_host(4096)
    memory.close(1)
    assert driver.called == ["cuMemHostRegister", "cuMemHostUnregister", "cuIpcCloseMemHandle"]


def test_memory_of_the_host_is_pinned_and_given_back() -> None:
    driver = Driver()
    memory = CudaMemory(driver)
    address = memory.allocate_host(12)
    assert len(driver.buffers[address]) == 12
    memory.free_host(address)
    assert not driver.buffers


def test_capturing_stream_is_distinguished_from_running_one() -> None:
    driver = Driver()
    driver.capturing = [7]
    memory = CudaMemory(driver)
    assert memory.is_capturing(7)
    assert not memory.is_capturing(0)


def test_what_the_driver_refuses_is_named() -> None:
    driver = Driver()
    driver.cuMemAlloc = lambda n: (SimpleNamespace(name="OUT_OF_MEMORY"), None)  # type: ignore
    with pytest.raises(CudaError, match="cuMemAlloc: OUT_OF_MEMORY"):
        CudaMemory(driver).allocate(1)


def test_the_driver_has_all_that_is_asked_of_it() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    asked = {name for name in vars(Driver) if name.startswith(("cu", "CU"))}
    asked |= {
        "cuCtxSynchronize",
        "cuStreamSynchronize",
        "cuMemHostRegister",
        "cuMemHostUnregister",
        "cuIpcCloseMemHandle",
        "cuLibraryGetGlobal",
    }
    assert {name for name in asked if not hasattr(driver, name)} == set()
    attributes = driver.CUpointer_attribute
    assert attributes.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE == IPC_CAPABLE
    assert driver.CUipcMemHandle().getPtr()
