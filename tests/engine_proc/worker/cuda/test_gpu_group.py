"""How workers on GPUs find each other; gloo stands for NCCL, which needs GPUs."""

import pytest
import torch
from ranks import as_threads
from torch.distributed import ProcessGroupGloo

from headrace.all_reduce_policy import Topology
from headrace.engine_proc.shm_all_reduce import ShmAllReduce
from headrace.engine_proc.worker.cuda import gpu_group
from headrace.engine_proc.worker.cuda.gpu_group import meeting_place, worst_link
from headrace.engine_proc.worker.host_peers import HostPeers
from headrace.engine_proc.worker.torch_collectives import TorchCollectives
from headrace.errors import HeadraceError


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


def test_links_that_nobody_can_tell_of_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise HeadraceError("NVML: no such file")

    monkeypatch.setattr(gpu_group, "load_nvml", refuse)
    assert worst_link(["a", "b"]) is Topology.NONE
