"""GPUs are read as the driver tells of them. The driver here is none: it never ran these calls."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.system import gpus as module
from headrace.system.gpus import Gpu, ask, load_driver, look

UUID = bytes(range(16))
TEXT_OF_UUID = "00010203-0405-0607-0809-0a0b0c0d0e0f"
ATTRIBUTES = {
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
}


class Driver:
    """Answers in the form of cuda.bindings.driver, of one GPU with the handle 7."""

    CUdevice_attribute = SimpleNamespace(**{name: name for name in ATTRIBUTES})

    def cuInit(self, flags: int) -> tuple[int]:
        return (0,)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, 1

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, 7 + index

    def cuDeviceGetName(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, b"NVIDIA H200".ljust(length, b"\0")

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, b"0000:18:00.0\0"

    def cuDeviceGetUuid(self, device: int) -> tuple[int, Any]:
        return 0, SimpleNamespace(bytes=UUID)

    def cuDeviceTotalMem(self, device: int) -> tuple[int, int]:
        assert device == 7
        return 0, 100

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[int, int]:
        return 0, ATTRIBUTES[attribute]


class Nvml:
    """Knows one GPU, by its UUID."""

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        handle._obj.value = 5
        return 0 if uuid.decode() == f"GPU-{TEXT_OF_UUID}" else 2

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        assert handle.value == 5
        memory._obj.total, memory._obj.free, memory._obj.used = 101, 60, 41
        return 0


def test_a_gpu_is_seen_as_driver_and_nvml_tell() -> None:
    assert list(look(Driver(), Nvml())) == [
        Gpu(0, "NVIDIA H200", (9, 0), 132, 100, 60, "0000:18:00.0", TEXT_OF_UUID)
    ]


def test_what_the_driver_refuses_is_named() -> None:
    refusing = SimpleNamespace(cuInit=lambda flags: (SimpleNamespace(name="NO_DEVICE"),))
    with pytest.raises(HeadraceError, match="cuInit: NO_DEVICE"):
        ask(refusing, "cuInit", 0)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such library")

    monkeypatch.setattr(module, "ask", fail)
    with pytest.raises(HeadraceError, match="cuda-python: "):
        load_driver()


def test_the_driver_has_all_that_is_asked_of_it() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    asked = {name for name in vars(Driver) if name.startswith(("cu", "CU"))}
    assert {name for name in asked if not hasattr(driver, name)} == set()
    attributes = driver.CUdevice_attribute
    assert {name for name in ATTRIBUTES if not hasattr(attributes, name)} == set()
    assert len(driver.CUuuid().bytes) == len(UUID)
