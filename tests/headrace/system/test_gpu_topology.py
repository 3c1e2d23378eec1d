"""The links of GPUs are read as NVML tells them."""

from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.system.all_reduce_policy import Topology
from headrace.system.gpu_topology import CAN_READ, HAS_NVLINK, LIBRARY, load_nvml, topology


class Nvml:
    """GPUs 0 to 3, with NVLink within pairs; the last has no peer access."""

    def __init__(self) -> None:
        self.uuids = [f"GPU-{index}" for index in range(4)]

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = 100 + index
        return 0 if index < len(self.uuids) else 2

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return self.nvmlDeviceGetHandleByIndex_v2(self.uuids.index(uuid.decode()), handle)

    def nvmlDeviceGetP2PStatus(self, a: Any, b: Any, caps: int, status: Any) -> int:
        pair = {a.value - 100, b.value - 100}
        has = {HAS_NVLINK: pair == {0, 1}, CAN_READ: 3 not in pair}
        status._obj.value = 0 if has[caps] else 5
        return 0


@pytest.mark.parametrize(
    ("which", "found"),
    [
        ([0, 1], Topology.NVLINK),
        (["GPU-0", "1"], Topology.NVLINK),
        ([0, 1, 2], Topology.PCIE),
        ([0, 1, 2, 3], Topology.NONE),
        ([0, 0], Topology.NVLINK),
        ([2], Topology.NVLINK),
    ],
)
def test_the_worst_link_counts(which: list[int | str], found: Topology) -> None:
    assert topology(Nvml(), which) is found


def test_a_gpu_that_is_not_there_is_named_by_what_failed() -> None:
    with pytest.raises(HeadraceError, match="nvmlDeviceGetHandleByIndex_v2: error 2"):
        topology(Nvml(), [0, 9])


def test_a_host_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.system.gpu_topology.LIBRARY", LIBRARY + ".none")
    with pytest.raises(HeadraceError, match="NVML: "):
        load_nvml()
