"""Ranks of an `IpcAllReduce` as threads of a test, each with a GPU of its own."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpu_threads import DEADLINE_S, ThreadGpu, ThreadPeers, on_ranks
from torch import Tensor

from headrace.engine_proc.collectives.collectives import (
    CollectiveOutcome,
    Collectives,
)
from headrace.engine_proc.collectives.control_page import ControlPage
from headrace.engine_proc.worker.parallel.ipc_all_reduce import IpcAllReduce, Parts, PeerGpu
from headrace.engine_proc.worker.parallel.ipc_group import Trial
from headrace.system.all_reduce_policy import Topology

MAX_BYTES = 128 << 10
TRIAL = Trial(num_sums=4, limit_ns=int(DEADLINE_S * 1e9))


class Nccl(Collectives[Tensor]):
    """Counts what comes to it, and gives its input back."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_trusted: bool | None = None

    def open(self, is_trusted: bool) -> "Nccl":
        assert self.is_trusted is None, "opened twice"
        self.is_trusted = is_trusted
        return self

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append("all_reduce")
        return x

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        self.calls.append("all_gather")

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        self.calls.append("broadcast")

    def capture(self) -> Any:
        raise AssertionError

    def abort(self) -> None:
        self.calls.append("abort")

    def check(self) -> None:
        self.calls.append("check")

    def close(self) -> None:
        self.calls.append("close")


class Rank:
    """A rank with its GPU.

    Args:
        gpu: for each rank, what its GPU is given.
        uuid, topology, disabled: for each rank, as in `PeerGpu`.
    """

    def __init__(
        self,
        peers: ThreadPeers,
        page_fd: int,
        make_gpu: Callable[..., Any],
        gpu: Callable[[int], dict[str, Any]] = lambda rank: {},
        uuid: Callable[[int], str] = "GPU-{}".format,
        topology: Callable[[int], Topology] = lambda rank: Topology.NVLINK,
        disabled: Callable[[int], str] = lambda rank: "",
        **options: Any,
    ) -> None:
        self.rank, self.world, self.peers = peers.rank, peers.world, peers
        self.gpu = make_gpu(peers.world, **gpu(peers.rank))
        self.page = ControlPage(page_fd)
        self.nccl = Nccl()
        parts = Parts(
            lambda: self.gpu,
            lambda: self.gpu.kernels,
            stream=lambda: self.gpu.stream,
            open_fallback=self.nccl.open,
        )
        options = {"trial": TRIAL} | options
        own = peers.rank
        self.all_reduce = IpcAllReduce(
            peers,
            PeerGpu(uuid(own), "host", topology(own), MAX_BYTES, disabled(own)),
            page=self.page,
            parts=parts,
            **options,
        )
        self.gpu.waits = True

    def values(self, num_lanes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
        return self.place(values(self.rank, num_lanes, dtype, seed))

    def place(self, x: Tensor) -> Tensor:
        """Return a tensor on this rank's GPU."""
        return x.to(self.gpu.device)


def values(rank: int, num_lanes: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return what a rank gives."""
    random = np.random.default_rng([rank, seed])
    return torch.from_numpy(random.standard_normal(num_lanes, np.float32)).to(dtype)


@functools.lru_cache(maxsize=256)  # all ranks compare with the same
def summed(world: int, num_lanes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return the sum as it should be: fp32, by rank, rounded once."""
    total = values(0, num_lanes, dtype, seed).float()
    for rank in range(1, world):
        total = total + values(rank, num_lanes, dtype, seed).float()
    return total.to(dtype)


def ranks_do(
    world: int,
    body: Callable[[Rank], Any],
    make_gpu: Callable[..., Any] = ThreadGpu,
    **options: Any,
) -> list[Any]:
    """Run `body` on all ranks of a group, which is closed if it is whole."""
    page = ControlPage.create()

    def run(peers: ThreadPeers) -> Any:
        rank = Rank(peers, page.fd, make_gpu, **options)
        try:
            result = body(rank)
        except BaseException:
            page.abort()  # kernels of the others wait for ever
            raise
        enabled, failed = rank.all_reduce.enabled, rank.page.aborted is not CollectiveOutcome.OK
        rank.gpu.synchronize()
        rank.all_reduce.close()
        if enabled and failed:  # what it leaves to the end of the process
            rank.gpu.unmap_host(rank.page.address)
        assert rank.nccl.calls[-1] == "close"
        if isinstance(rank.gpu, ThreadGpu):
            assert not rank.gpu.opened.sizes, "something is still mapped"
            if enabled and not failed:
                assert not [n for n in rank.gpu.memory.sizes.values() if n > 1 << 20]
        return result

    return on_ranks(world, run)


def all_equal(results: list[Tensor], wanted: Tensor) -> None:
    for result in results:
        assert result.dtype == wanted.dtype
        assert torch.equal(result.cpu(), wanted)


def capture_sums(
    rank: Rank, inputs: list[Tensor], registered: bool = True
) -> tuple[Any, list[Tensor]]:
    """Capture a graph with the sum of each input."""
    with rank.all_reduce.capture(registered):
        rank.all_reduce.all_reduce(inputs[0])  # to warm up; not captured
        return rank.gpu.capture(lambda: [rank.all_reduce.all_reduce(x) for x in inputs])


def replay_and_compare(
    rank: Rank, graph: Any, inputs: list[Tensor], outs: list[Tensor], num_times: int = 8
) -> None:
    """Run a graph with inputs that change, and eager sums between."""
    for seed in range(1, 1 + num_times):
        for x in inputs:
            x.copy_(rank.values(x.numel(), x.dtype, seed))
        rank.gpu.replay(graph)
        eager = rank.all_reduce.all_reduce(rank.values(40, torch.float32, seed))
        rank.gpu.synchronize()
        for x, out in zip(inputs, outs, strict=True):
            assert torch.equal(out.cpu(), summed(rank.world, x.numel(), x.dtype, seed))
        assert torch.equal(eager.cpu(), summed(rank.world, 40, torch.float32, seed))


def three_inputs(rank: Rank) -> list[Tensor]:
    """Return tensors in the middle of allocations, elsewhere on each rank."""
    offset = 48 + 16 * rank.rank
    sizes = (2, 7, 60)
    return [rank.gpu.tensor(torch.zeros(8 * n, dtype=torch.bfloat16), offset) for n in sizes]
