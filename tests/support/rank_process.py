"""A rank as a process of its own, with memory that the others really map.

Run: rank_process.py RANK WORLD threads|cuda PAGE_FD. It talks to `RankProcesses` over its standard
input and output; sums, captures a graph and replays it, says "right", and then sums until it fails.
"""

import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO

import torch

from headrace.engine_proc.collectives.collectives import CollectiveFailed
from headrace.engine_proc.collectives.control_page import ControlPage
from headrace.engine_proc.worker.parallel.ipc_all_reduce import IpcAllReduce, Parts, PeerGpu
from headrace.engine_proc.worker.parallel.ipc_group import Trial
from headrace.system import all_reduce_policy
from headrace.system.all_reduce_policy import Topology

LENGTH = struct.Struct("=I")
GATHER, SAY = b"g", b"s"
NUM_VALUES = 2048
NUM_TIMES = 10


def send(file: BinaryIO, data: bytes) -> None:
    """Write a message."""
    file.write(LENGTH.pack(len(data)) + data)
    file.flush()


def receive(file: BinaryIO) -> bytes:
    """Return the next message; b"" at the end."""
    head = file.read(LENGTH.size)
    return file.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else b""


class PipePeers:
    """The other ranks, through the parent."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def gather(self, data: bytes) -> list[bytes]:
        send(sys.stdout.buffer, GATHER + data)
        return [receive(sys.stdin.buffer) for _ in range(self.world)]


class RankProcesses:
    """Processes of all ranks, and their reports."""

    def __init__(self, world: int, kind: str, page: ControlPage) -> None:
        from gpu_threads import Meeting

        self.said: list[list[str]] = [[] for _ in range(world)]
        self.news = threading.Condition()
        self._ended: set[int] = set()
        self._meeting = Meeting(world)
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(world), kind, str(page.fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[page.fd],
                env=env,
            )
            for rank in range(world)
        ]
        self._threads = [threading.Thread(target=self._serve, args=[r]) for r in range(world)]
        for thread in self._threads:
            thread.start()

    def _serve(self, rank: int) -> None:
        process = self.processes[rank]
        assert process.stdin is not None and process.stdout is not None
        while message := receive(process.stdout):  # type: ignore[arg-type]
            if message[:1] == GATHER:
                for data in self._meeting.gather(rank, message[1:]):
                    send(process.stdin, data)  # type: ignore[arg-type]
            else:
                with self.news:
                    self.said[rank].append(message[1:].decode())
                    self.news.notify_all()
        with self.news:
            self._ended.add(rank)
            self.news.notify_all()

    def wait(self, rank: int, num_said: int, timeout_s: float) -> None:
        """Wait until a rank has reported so many times, or has ended."""

        def is_over() -> bool:
            return len(self.said[rank]) >= num_said or rank in self._ended

        with self.news:
            assert self.news.wait_for(is_over, timeout_s)
        assert len(self.said[rank]) >= num_said, f"rank {rank} has ended: {self.said[rank]}"

    def stop(self) -> None:
        """End what still runs."""
        for process in self.processes:
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join()
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


class CudaGpu:
    """The one GPU that all ranks share, through memory of their own contexts."""

    device = "cuda"

    def __init__(self, world: int) -> None:
        from cuda.bindings import driver
        from gpu_streams import code

        from headrace.engine_proc.worker.parallel.ipc_kernels import CudaKernels
        from headrace.engine_proc.worker.parallel.ipc_memory import CudaMemory

        torch.zeros(1, device="cuda")
        self.memory: Any = CudaMemory(driver)
        self.kernels: Any = CudaKernels(code(world, ()), max_blocks=2)

    @property
    def stream(self) -> int:
        current: int = torch.cuda.current_stream().cuda_stream
        return current

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        return values.to("cuda")

    def capture(self, body: Any) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = body()
        return graph, result

    def replay(self, graph: Any) -> None:
        graph.replay()

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class ThreadsGpu:
    """A GPU of CPU threads with the same face."""

    device = "cpu"

    def __init__(self, world: int) -> None:
        from gpu_threads import ThreadGpu

        gpu = ThreadGpu(world)
        gpu.waits = True
        self.memory: Any = gpu
        self.kernels: Any = gpu
        self.tensor, self.capture = gpu.tensor, gpu.capture
        self.replay, self.synchronize = gpu.replay, gpu.synchronize

    @property
    def stream(self) -> int:
        current: int = self.memory.stream
        return current


def given(rank: int, time: int) -> torch.Tensor:
    """Return what a rank gives: small whole numbers, whose sums are exact."""
    return (torch.arange(NUM_VALUES) * (rank + 1) + time).remainder(97).to(torch.float32)


def sum_and_replay(all_reduce: IpcAllReduce, gpu: Any, peers: PipePeers) -> bool:
    """Return whether eager sums and those of a graph are right."""
    x = gpu.tensor(given(peers.rank, 0))
    with all_reduce.capture():
        graph, out = gpu.capture(lambda: all_reduce.all_reduce(x))
    right = True
    for time in range(NUM_TIMES):
        x.copy_(given(peers.rank, time))
        wanted = sum(given(rank, time) for rank in range(peers.world))
        gpu.replay(graph)
        eager = all_reduce.all_reduce(x)
        gpu.synchronize()
        right &= torch.equal(out.cpu(), wanted) and torch.equal(eager.cpu(), wanted)
    return right


def main(rank: int, world: int, kind: str, page_fd: int) -> None:
    """Run one rank."""

    def say(text: str) -> None:
        send(sys.stdout.buffer, SAY + text.encode())

    all_reduce_policy.STAGED_BYTES = 0  # small inputs of graphs are read in place, too
    peers, page = PipePeers(rank, world), ControlPage(page_fd)
    gpu: Any = CudaGpu(world) if kind == "cuda" else ThreadsGpu(world)
    all_reduce = IpcAllReduce(
        peers,
        PeerGpu("the one", "this host", Topology.NVLINK, 1 << 20),
        page,
        Parts(
            lambda: gpu.memory,
            lambda: gpu.kernels,
            stream=lambda: gpu.stream,
            open_fallback=lambda is_trusted: None,  # type: ignore[arg-type,return-value]  # not used
        ),
        shares_gpu=True,
        trial=Trial(num_sums=3, limit_ns=300_000_000_000),
    )
    if not all_reduce.enabled:
        say(all_reduce.why_not)
        return
    say("right" if sum_and_replay(all_reduce, gpu, peers) else "wrong")
    page.check(rank)
    x, gathered = gpu.tensor(given(rank, 0)), torch.empty(world, NUM_VALUES, device=gpu.device)
    try:
        while True:
            all_reduce.all_reduce(x)
            all_reduce.all_gather(x, gathered)
            gpu.synchronize()
            page.check(rank)
    except CollectiveFailed as failed:
        say(f"{failed.outcome.name}: {failed}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
