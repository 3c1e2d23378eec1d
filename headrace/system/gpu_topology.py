"""Connections between the GPUs of a host, as NVML reports them, which comes with the driver.

What it says is a claim: `engine_proc/worker/parallel/ipc_group.py` tries it out.
"""

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

from headrace.errors import HeadraceError
from headrace.system.all_reduce_policy import Topology

LIBRARY = "libnvidia-ml.so.1"
CAN_READ, HAS_NVLINK = 0, 2  # nvmlGpuP2PCapsIndex_t
OK = 0


def load_nvml() -> Any:
    """Return NVML, ready for use.

    Raises:
        HeadraceError: there is no driver, or it does not work.
    """
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise HeadraceError(f"NVML: {error}") from None
    call(nvml, "nvmlInit_v2")
    return nvml


def call(nvml: Any, name: str, *arguments: Any) -> None:
    """Call a function of NVML."""
    code = getattr(nvml, name)(*arguments)
    if code != OK:
        raise HeadraceError(f"{name}: error {code}")


def device(nvml: Any, which: int | str) -> ctypes.c_void_p:
    """Return NVML's handle of a GPU, by its number or its UUID."""
    handle = ctypes.c_void_p()
    if isinstance(which, int):
        call(nvml, "nvmlDeviceGetHandleByIndex_v2", which, ctypes.byref(handle))
    else:
        uuid = "GPU-" + which.removeprefix("GPU-")
        call(nvml, "nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
    return handle


def topology(nvml: Any, which: Sequence[int | str]) -> Topology:
    """Return the worst link between any two of these GPUs; both ways count."""
    devices = [device(nvml, one) for one in which]
    links = (link(nvml, a, b) for a, b in itertools.permutations(devices, 2))
    return min(links, default=Topology.NVLINK)


def link(nvml: Any, a: ctypes.c_void_p, b: ctypes.c_void_p) -> Topology:
    """Return how a GPU reaches another."""
    if a.value == b.value:
        return Topology.NVLINK
    for caps, found in ((HAS_NVLINK, Topology.NVLINK), (CAN_READ, Topology.PCIE)):
        status = ctypes.c_int()
        call(nvml, "nvmlDeviceGetP2PStatus", a, b, caps, ctypes.byref(status))
        if status.value == OK:
            return found
    return Topology.NONE
