"""How workers on GPUs find each other; gloo stands for NCCL, which needs GPUs."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import as_threads
from torch.distributed import ProcessGroupGloo

from headrace.engine_proc.collectives.control_page import ControlPage
from headrace.engine_proc.collectives.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.worker.parallel import tensor_parallel_group
from headrace.engine_proc.worker.parallel.host_peers import HostPeers
from headrace.engine_proc.worker.parallel.tensor_parallel_group import (
    meeting_place,
    open_group,
    open_nccl,
    worst_link,
)
from headrace.engine_proc.worker.parallel.torch_collectives import TorchCollectives
from headrace.errors import HeadraceError
from headrace.system.all_reduce_policy import Topology


def test_ranks_meet_in_a_file_that_has_no_name() -> None:
    def body(group: ShmAllReduce) -> list[float]:
        store = meeting_place(HostPeers(group))
        collectives = TorchCollectives(ProcessGroupGloo(store, group.rank, group.num_ranks))
        assert collectives.rank == group.rank
        summed: list[float] = collectives.all_reduce(torch.ones(2) * (group.rank + 1)).tolist()
        HostPeers(group).gather(b"done")
        collectives.close()
        return summed

    assert as_threads(2, body) == [[3, 3], [3, 3]]


def test_sums_are_torchs_where_the_flags_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank: torch has one group in a process."""
    init, asked = dist.init_process_group, []

    def init_gloo(backend: str, device_id: torch.device, **options: Any) -> None:
        asked.append((backend, device_id))
        init("gloo", **options)

    gpu = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(uuid="GPU-0"))
    pretended = SimpleNamespace(device=torch.device, zeros=lambda *_, **__: None, cuda=gpu)
    monkeypatch.setattr(tensor_parallel_group, "torch", pretended)
    monkeypatch.setattr(dist, "init_process_group", init_gloo)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)

    def body(group: ShmAllReduce) -> None:
        opened = open_group(HostPeers(group), ControlPage.create().fd, is_disabled=True)
        assert opened.why_not == "--disable-custom-all-reduce"
        x, gathered = torch.tensor([1.0, 2.0]), torch.zeros(1, 2)
        opened.all_gather(x, gathered)
        opened.broadcast(x)
        assert opened.all_reduce(x).tolist() == gathered[0].tolist() == [1, 2]
        opened.check()
        opened.close()

    try:
        as_threads(1, body)
    finally:
        dist.destroy_process_group()
    assert asked == [("nccl", torch.device("cuda", 0))]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_P2P_DISABLE" not in os.environ


def test_nccl_is_told_that_gpus_reach_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is initialized: that is when it looks for ways."""
    seen: list[str | None] = []

    def init(*_: Any, **__: Any) -> None:
        seen.extend(map(os.environ.get, ("NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME")))
        raise ZeroDivisionError

    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "eth0"})
    monkeypatch.setattr(dist, "init_process_group", init)

    def body(group: ShmAllReduce) -> None:
        with pytest.raises(ZeroDivisionError):
            open_nccl(torch.device("cpu"), HostPeers(group), is_trusted=False)

    as_threads(1, body)
    assert seen == ["1", "eth0"]


def test_unknown_gpu_links_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise HeadraceError("NVML: no such file")

    monkeypatch.setattr(tensor_parallel_group, "load_nvml", refuse)
    assert worst_link(["a", "b"]) is Topology.NONE
