"""Measure a sum over GPUs, beside NCCL's and torch's symmetric memory.

Method: a process per GPU. A CUDA graph of 50 sums in a row is replayed once per round, on all ranks
        together. A round's figure is the slowest rank's, for one sum. bf16, fixed inputs. "eager"
        is the kernel that copies its input to the workspace, in a graph, too.
Run:    python bench/cuda_all_reduce.py --rounds 20 --ranks 4
"""

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from headrace.engine_proc.collectives.control_page import ControlPage
from headrace.system.all_reduce_policy import WORLDS
from support.report import Quantity, Report, parser

KB = 1 << 10
SIZES = [2 * KB << power for power in range(16)]  # to 64 MiB
CHAIN = 50
WARM_UPS = 3
OURS, EAGER, NCCL = "headrace", "headrace, eager", "NCCL"
ONE_SHOT, TWO_SHOT = "symmetric memory, one-shot", "symmetric memory, two-shot"
MULTIMEM, WINDOW = "symmetric memory, multimem", "NCCL, symmetric memory"
SYSTEMS = (OURS, EAGER, NCCL, WINDOW, ONE_SHOT, TWO_SHOT, MULTIMEM)
POOLS: list[Any] = []  # of NCCL's windows
KEPT: list[torch.Tensor] = []  # inputs of graphs, which other ranks have mapped


class StorePeers:
    """The other ranks, through torch's store."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.rank, self.world, self._store, self._count = rank, world, store, 0

    def gather(self, data: bytes) -> list[bytes]:
        """Return what every rank gives, by rank."""
        self._count += 1
        keys = [f"{self._count}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], data.hex())
        return [bytes.fromhex(self._store.get(key).decode()) for key in keys]


def open_ours(store: dist.Store, rank: int, world: int, page_fd: int) -> Any:
    """Join the group of our own kernels."""
    from cuda.bindings import driver
    from cuda.core import Device

    from headrace.engine_proc.worker.parallel.ipc_all_reduce import IpcAllReduce, Parts, PeerGpu
    from headrace.engine_proc.worker.parallel.ipc_kernels import CudaKernels, cache_folder, cubin
    from headrace.engine_proc.worker.parallel.ipc_memory import CudaMemory
    from headrace.engine_proc.worker.parallel.torch_collectives import TorchCollectives
    from headrace.system.all_reduce_policy import MAX_BYTES
    from headrace.system.gpu_topology import load_nvml, topology

    device = Device(rank)
    device.set_current()
    peers = StorePeers(store, rank, world)
    uuids = [uuid.decode() for uuid in peers.gather(device.uuid.encode())]
    group = dist.distributed_c10d._get_default_group()
    return IpcAllReduce(
        peers,
        PeerGpu(device.uuid, os.uname().nodename, topology(load_nvml(), uuids), MAX_BYTES),
        ControlPage(page_fd),
        Parts(
            lambda: CudaMemory(driver),
            lambda: CudaKernels(cubin(f"sm_{device.arch}", world, cache_folder())),
            stream=lambda: torch.cuda.current_stream().cuda_stream,
            open_fallback=lambda is_trusted: TorchCollectives(group),
        ),
    )


def calls(num_bytes: int, ours: Any, world: int) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Yield each system with its call and the context of its capture."""
    import torch.distributed._symmetric_memory as symmetric

    size, group = num_bytes // 2, dist.group.WORLD.group_name
    x = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    KEPT.append(x)
    if ours.choice(x).algorithm.value != NCCL:
        yield OURS, lambda: ours.all_reduce(x), ours.capture
        yield EAGER, lambda: ours.all_reduce(x), functools.partial(ours.capture, registered=False)
    yield NCCL, lambda: dist.all_reduce(x), contextlib.nullcontext
    window = window_of(size)
    if window is not None:
        yield WINDOW, lambda: dist.all_reduce(window), contextlib.nullcontext
    shared = symmetric.empty(size, dtype=torch.bfloat16, device="cuda")
    symmetric.rendezvous(shared, group)
    shared.zero_()
    one_shot = torch.ops.symm_mem.one_shot_all_reduce
    two_shot = torch.ops.symm_mem.two_shot_all_reduce_
    yield ONE_SHOT, lambda: one_shot(shared, "sum", group), contextlib.nullcontext
    if size % (8 * world) == 0:
        yield TWO_SHOT, lambda: two_shot(shared, "sum", group), contextlib.nullcontext
        if has_multicast(x.device):
            multimem = torch.ops.symm_mem.multimem_all_reduce_
            yield MULTIMEM, lambda: multimem(shared, "sum", group), contextlib.nullcontext


def has_multicast(device: torch.device) -> bool:
    """Whether NVSwitch adds, for `multimem`."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index))


def window_of(size: int) -> torch.Tensor | None:
    """Return a tensor in memory that NCCL has registered with all ranks; None where it cannot."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    try:
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            window = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
        backend.register_mem_pool(pool, symm=True)
    except (AttributeError, RuntimeError, TypeError):
        return None
    POOLS.append(pool)
    return window


def measure(call: Callable[[], Any], around: Callable[[], Any], rounds: int) -> list[float]:
    """Return the microseconds of a call, round by round."""
    with around():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CHAIN):
                call()
    times = []
    for _ in range(WARM_UPS + rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CHAIN)
    return times[WARM_UPS:]


def be_rank(rank: int, world: int, page_fd: int, port: int, rounds: int) -> None:
    """Measure on one GPU, and print the times by size and system."""
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world)
    ours = open_ours(dist.PrefixStore("ours", store), rank, world, page_fd)
    times = {}
    for num_bytes in SIZES:
        times[num_bytes] = {
            name: measure(call, around, rounds)
            for name, call, around in calls(num_bytes, ours, world)
        }
    ours.check()
    print(json.dumps({"why_not": ours.why_not, "times": times}), flush=True)
    os._exit(0)  # the groups share their ends


def run_ranks(world: int, port: int, rounds: int) -> list[Any]:
    """Return what each rank prints."""
    page = ControlPage.create()
    shared = {"--rounds": rounds, "--ranks": world, "--page": page.fd, "--port": port}
    ranks = []
    for rank in range(world):
        options = [f"{name}={value}" for name, value in (shared | {"--rank": rank}).items()]
        command = [sys.executable, __file__, *options]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[page.fd]))
    outputs = [rank.communicate()[0] for rank in ranks]
    return [json.loads(text.splitlines()[-1]) for text in outputs]


def main() -> None:
    """Run."""
    options = parser(__doc__, rounds=20)
    options.add_argument("--ranks", type=int, default=0, help="GPUs; 0 is as many as can be")
    options.add_argument("--port", type=int, default=29511, help="where ranks meet")
    for name in ("--rank", "--page"):
        options.add_argument(name, type=int, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.rank is not None:
        be_rank(args.rank, args.ranks, args.page, args.port, args.rounds)
    num_gpus = torch.cuda.device_count()
    world = args.ranks or max((n for n in WORLDS if n <= num_gpus), default=2)
    report = Report("cuda_all_reduce", args)
    if world > num_gpus:
        report.miss(f"a sum over {world} GPUs: this machine has {num_gpus}")
        report.finish()
        return
    ranks = run_ranks(world, args.port, args.rounds)
    if ranks[0]["why_not"]:
        report.miss(f"our own kernels: {ranks[0]['why_not']}")
    for num_bytes in SIZES:
        times = [rank["times"][str(num_bytes)] for rank in ranks]
        slowest = {
            system: [max(of_ranks) for of_ranks in zip(*(t[system] for t in times), strict=True)]
            for system in SYSTEMS
            if system in times[0]
        }
        report.add(Quantity(f"{num_bytes // KB} KiB, {world} GPUs", "us", slowest))
    report.finish()


if __name__ == "__main__":
    main()
