"""The tensor-parallel group of GPU workers: our own all-reduce, with NCCL as the fallback."""

import logging
import os
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from headrace.engine_proc.collectives.control_page import ControlPage
from headrace.engine_proc.worker.parallel.gpu_protocols import Kernels, Memory
from headrace.engine_proc.worker.parallel.host_peers import HostPeers
from headrace.engine_proc.worker.parallel.ipc_all_reduce import IpcAllReduce, Parts, PeerGpu
from headrace.engine_proc.worker.parallel.joint_steps import StepPeers
from headrace.engine_proc.worker.parallel.torch_collectives import TorchCollectives
from headrace.errors import HeadraceError
from headrace.system.all_reduce_policy import MAX_BYTES, P2P_DISABLE, Topology, disabled_by
from headrace.system.gpu_topology import load_nvml, topology

log = logging.getLogger(__name__)


def open_group(peers: HostPeers, control_fd: int, is_disabled: bool) -> IpcAllReduce:
    """Meet the other workers. The rank's GPU is the current device.

    Args:
        control_fd: of the page that ends all waits.
        is_disabled: sums are NCCL's, whatever their size.
    """
    device = torch.device("cuda", peers.rank)
    torch.zeros(1, device=device)  # from here on its context is this thread's
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    links = worst_link([theirs.decode() for theirs in peers.gather(uuid.encode())])
    disabled = disabled_by(is_disabled, os.environ)
    return IpcAllReduce(
        peers,
        PeerGpu(uuid, os.uname().nodename, links, MAX_BYTES, disabled),
        ControlPage(control_fd),
        parts(device, peers),
    )


def open_nccl(device: torch.device, peers: StepPeers, is_trusted: bool) -> TorchCollectives:
    """Have NCCL meet the other workers, all of which are on this host.

    Args:
        is_trusted: GPUs may read each other's memory; else NCCL goes through the host's.
    """
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # where it listens for the others
    if not is_trusted:
        os.environ[P2P_DISABLE] = "1"
    dist.init_process_group(
        "nccl",
        store=meeting_place(peers),
        rank=peers.rank,
        world_size=peers.world,
        device_id=device,
    )
    assert dist.group.WORLD is not None
    return TorchCollectives(dist.group.WORLD)


def meeting_place(peers: StepPeers) -> Store:
    """Return where NCCL's ranks find each other: a file in memory, of rank 0, without a name."""
    path = ""
    if peers.rank == 0:
        fd = os.memfd_create("headrace-ranks", os.MFD_CLOEXEC)  # open as long as the process lives
        path = f"/proc/{os.getpid()}/fd/{fd}"
    return FileStore(peers.gather(path.encode())[0].decode(), peers.world)


def worst_link(uuids: Sequence[str]) -> Topology:
    """Return how these GPUs reach each other."""
    try:
        return topology(load_nvml(), uuids)
    except HeadraceError as error:
        log.warning("how the GPUs reach each other cannot be read: %s", error)
        return Topology.NONE


def parts(device: torch.device, peers: StepPeers) -> Parts:
    """Return what the all-reduce is made of, by cuda-python, which may be missing."""

    def open_memory() -> Memory:
        from cuda.bindings import driver

        from headrace.engine_proc.worker.parallel.ipc_memory import CudaMemory

        return CudaMemory(driver)

    def load_kernels() -> Kernels:
        from cuda.core import Device

        from headrace.engine_proc.worker.parallel.ipc_kernels import (
            CudaKernels,
            cache_folder,
            cubin,
        )

        Device(device.index).set_current()  # torch's context, which is the primary one
        major, minor = torch.cuda.get_device_capability(device)
        return CudaKernels(cubin(f"sm_{major}{minor}", peers.world, cache_folder()))

    return Parts(
        open_memory,
        load_kernels,
        stream=lambda: torch.cuda.current_stream().cuda_stream,
        open_fallback=partial(open_nccl, device, peers),
    )
