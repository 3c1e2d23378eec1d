"""Collectives of torch do what ours do; gloo stands for NCCL, which needs GPUs."""

from types import SimpleNamespace
from typing import Any

import torch
from gpu_threads import ThreadPeers, on_ranks
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo

from headrace.engine_proc.worker.parallel.torch_collectives import TorchCollectives

GLOO = ProcessGroup.BackendType.GLOO


def process_group(store: HashStore, peers: ThreadPeers) -> ProcessGroup:
    """Return what `init_process_group` makes, which is one for a process."""
    group = ProcessGroup(store, peers.rank, peers.world)
    gloo = ProcessGroupGloo(store, peers.rank, peers.world)
    group._set_default_backend(GLOO)
    group._register_backend(torch.device("cpu"), GLOO, gloo)
    return group


def test_ranks_sum_gather_and_broadcast() -> None:
    store = HashStore()

    def body(peers: ThreadPeers) -> list[list[float]]:
        group = TorchCollectives(process_group(store, peers))
        own = torch.tensor([1.0, 10.0]) * (peers.rank + 1)
        gathered = torch.zeros(peers.world, 2)
        group.all_gather(own, gathered)
        from_last = own.clone()
        group.broadcast(from_last, root=peers.world - 1)
        with group.capture():
            summed = group.all_reduce(own)
        group.check()
        group.abort()
        group.close()
        return [summed.tolist(), gathered.flatten().tolist(), from_last.tolist()]

    assert on_ranks(2, body) == [[[3, 30], [1, 10, 2, 20], [2, 20]]] * 2


def test_what_is_gathered_goes_where_it_is_wanted() -> None:
    """Into one tensor: a list of one for each rank would be copied there."""
    gathered: list[tuple[Tensor, Tensor]] = []

    def gather(out: Tensor, x: Tensor) -> Any:
        gathered.append((out, x))
        return SimpleNamespace(wait=lambda: None)

    group: Any = SimpleNamespace(rank=lambda: 0, _allgather_base=gather)  # and no other way
    x, out = torch.ones(3, 4), torch.zeros(2, 3, 4)
    TorchCollectives(group).all_gather(x, out)
    ((target, source),) = gathered
    assert source is x
    assert target.shape == (6, 4)
    assert target.data_ptr() == out.data_ptr()
