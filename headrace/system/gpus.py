"""The GPUs of this machine, from the CUDA driver; free memory, from NVML.

Nothing here makes a context, which would take half a gigabyte of each.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.errors import HeadraceError
from headrace.system.gpu_topology import call, device

TEXT_BYTES = 256


class MemoryInfo(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    index: int  # among those that this process may use
    name: str
    capability: tuple[int, int]  # of computing, major and minor
    num_processors: int
    total_bytes: int
    free_bytes: int
    pci: str  # where it is plugged in
    uuid: str  # numbers are each process's own


def load_driver() -> Any:
    """Return the module `cuda.bindings.driver`, ready for use.

    Raises:
        HeadraceError: it is not installed, or there is no driver, or it does not work.
    """
    try:
        from cuda.bindings import driver

        ask(driver, "cuInit", 0)
    except (ImportError, RuntimeError) as error:  # its own errors of loading are RuntimeErrors
        raise HeadraceError(f"cuda-python: {error}") from None
    return driver


def ask(driver: Any, name: str, *arguments: Any) -> Any:
    """Return what a function of the driver gives: nothing, or a value."""
    code, *values = getattr(driver, name)(*arguments)
    if code != 0:
        raise HeadraceError(f"{name}: {getattr(code, 'name', code)}")
    return values[0] if values else None


def look(driver: Any, nvml: Any) -> Iterator[Gpu]:
    """Yield the GPUs that this process may use.

    Raises:
        HeadraceError: one does not answer.
    """
    attributes = driver.CUdevice_attribute
    for index in range(ask(driver, "cuDeviceGetCount")):
        one = ask(driver, "cuDeviceGet", index)

        def attribute(name: str, one: Any = one) -> int:
            which = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(ask(driver, "cuDeviceGetAttribute", which, one))

        memory = MemoryInfo()
        uuid = uuid_of(bytes(ask(driver, "cuDeviceGetUuid", one).bytes))
        call(nvml, "nvmlDeviceGetMemoryInfo", device(nvml, uuid), ctypes.byref(memory))
        yield Gpu(
            index=index,
            name=text(ask(driver, "cuDeviceGetName", TEXT_BYTES, one)),
            capability=(
                attribute("COMPUTE_CAPABILITY_MAJOR"),
                attribute("COMPUTE_CAPABILITY_MINOR"),
            ),
            num_processors=attribute("MULTIPROCESSOR_COUNT"),
            total_bytes=int(ask(driver, "cuDeviceTotalMem", one)),
            free_bytes=memory.free,
            pci=text(ask(driver, "cuDeviceGetPCIBusId", TEXT_BYTES, one)),
            uuid=uuid,
        )


def text(data: bytes) -> str:
    """Return the text before the first zero byte."""
    return data.split(b"\0")[0].decode()


def uuid_of(data: bytes) -> str:
    """Return a UUID as people and NVML write it."""
    digits = data.hex()
    return "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
