"""One rank of a group of GPUs that read each other's memory: set up jointly, and self-tested.

The driver's answers are not trusted. Access between two GPUs depends on the machine's fabric, its
virtualization and its containers. So before use, the group's kernels sum changing numbers on all
ranks, with a timeout.
"""

import zlib
from dataclasses import dataclass

import numpy as np

from headrace.engine_proc.collectives.control_page import PAGE_BYTES, ControlPage
from headrace.engine_proc.worker.parallel.gpu_protocols import IpcRegion, Kernels, Memory
from headrace.engine_proc.worker.parallel.ipc_workspace import (
    COUNTERS,
    COUNTERS_AT,
    FIRST_EPOCH,
    ROWS_AT,
    Layout,
    group_words,
)
from headrace.engine_proc.worker.parallel.joint_steps import StepPeers, StepRefused, jointly, meet
from headrace.errors import ConfigError
from headrace.system.all_reduce_policy import VECTOR_BYTES, Algorithm

KERNEL = {Algorithm.ONE_SHOT: "one_shot", Algorithm.TWO_SHOT: "two_shot"}
TRY_SIZES = (16, 4096, 65536)  # bytes: one vector, one block, several


@dataclass(frozen=True)
class Trial:
    """The self-test of a group: number of sums of each kind, and the timeout of a kernel."""

    num_sums: int = 100
    limit_ns: int = 2_000_000_000
    first_epoch: int = FIRST_EPOCH  # for tests of its overflow


@dataclass(frozen=True)
class FusedNorm:
    """An RMSNorm after the sum. All but the numbers are addresses."""

    residual: int
    residual_out: int
    weight: int
    row_bytes: int
    eps: float
    one_plus: bool  # the weight is 1 + what is stored


class TrialFailed(StepRefused):
    """Sums were late or wrong on some rank, so GPUs cannot read each other's memory."""


class IpcGroup:
    """A rank's workspace and its view of the others'.

    Args:
        stream: for trying it out.

    Raises:
        StepRefused: on all ranks, if any could not.
        ConfigError: on all ranks, if the trial has left a GPU unusable to its process.
    """

    def __init__(
        self,
        peers: StepPeers,
        memory: Memory,
        kernels: Kernels,
        page: ControlPage,
        layout: Layout,
        stream: int,
        trial: Trial,
    ) -> None:
        self._peers, self._memory, self._kernels, self._page = peers, memory, kernels, page
        self._layout = layout
        self._own = self._page_address = 0
        self._opened: dict[bytes, int] = {}
        try:
            # Flags are zero before other ranks can write them: handles are sent only after this.
            handles = jointly(peers, "memory", lambda: self._allocate(trial), IpcRegion)
            jointly(peers, "mapping", lambda: self._open(handles, trial), type(None))
        except StepRefused:
            self._undo()
            raise
        try:
            jointly(peers, "trial", lambda: self._try(stream, trial.num_sums), type(None))
        except StepRefused as error:
            self._undo()
            raise TrialFailed(str(error)) from None

    def _allocate(self, trial: Trial) -> IpcRegion:
        self._own = self._memory.allocate(self._layout.num_bytes)
        self._page_address = self._memory.map_host(self._page.address, PAGE_BYTES)
        self._memory.write(self._own + COUNTERS_AT, COUNTERS.pack(trial.first_epoch, 0, 0))
        region = self._memory.export(self._own, self._layout.num_bytes)
        if region is None:
            raise MemoryError("the driver cannot share this GPU's memory between processes")
        return region

    def _open(self, regions: list[IpcRegion], trial: Trial) -> None:
        self._bases = [self.address_of(rank, region) for rank, region in enumerate(regions)]
        self._bases[self._peers.rank] = self._own
        self._write_group(trial.limit_ns)

    def _write_group(self, limit_ns: int) -> None:
        words = group_words(
            self._layout, self._peers.rank, self._bases, self._page_address, limit_ns
        )
        self._memory.write(self._kernels.group_address, words)

    @property
    def rows_address(self) -> int:
        """Address of the rows of graphs' inputs."""
        return self._own + ROWS_AT

    def address_of(self, rank: int, region: IpcRegion) -> int:
        """Return where this rank finds memory of another.

        Allocations are known by their handles: an address may be another one's by now.
        """
        if rank == self._peers.rank:
            return 0  # a process cannot open its own
        if region.handle not in self._opened:
            self._opened[region.handle] = self._memory.open(region.handle)
        return self._opened[region.handle] + region.offset

    def sum(
        self,
        algorithm: Algorithm,
        dtype: str,
        num_bytes: int,
        source: int,
        target: int,
        stream: int,
        row: int = 0,
    ) -> None:
        """Sum the tensor at `source` to `target`, which may be the same unless there is a row.

        Args:
            row: address of where all ranks have their `source`; 0 copies it to the workspace.
        """
        name, num_vectors = KERNEL[algorithm], num_bytes // VECTOR_BYTES
        per_block = self._kernels.num_threads
        if algorithm is Algorithm.TWO_SHOT:
            per_block *= self._layout.world
        num_blocks = -(-num_vectors // per_block)
        addresses = (row, source, target)
        self._launch(f"{name}_{dtype}", num_blocks, stream, addresses, (num_vectors,))

    def gather(self, num_bytes: int, source: int, target: int, stride: int, stream: int) -> None:
        """Copy the bytes at `source` of every rank to `target`, `stride` bytes apart."""
        num_vectors = num_bytes // VECTOR_BYTES
        num_blocks = -(-num_vectors // self._kernels.num_threads)
        numbers = (num_vectors, stride // VECTOR_BYTES)
        self._launch("gather_bytes", num_blocks, stream, (0, source, target), numbers)

    def sum_add_norm(
        self,
        dtype: str,
        num_bytes: int,
        source: int,
        target: int,
        norm: FusedNorm,
        stream: int,
        row: int,
    ) -> None:
        """Sum as `sum` does, add it to the residual and write the norm of that to `target`."""
        num_rows, row_vectors = num_bytes // norm.row_bytes, norm.row_bytes // VECTOR_BYTES
        addresses = (row, source, target, norm.residual, norm.residual_out, norm.weight)
        numbers = (num_rows, row_vectors, np.float32(norm.eps), int(norm.one_plus))
        self._launch(f"fused_{dtype}", num_rows, stream, addresses, numbers)

    def _launch(
        self,
        name: str,
        num_blocks: int,
        stream: int,
        addresses: tuple[int, ...],
        numbers: tuple[int | np.float32, ...],
    ) -> None:
        """Launch with addresses first, then numbers of 32 bits, then what all must agree on."""
        num_blocks = min(num_blocks, self._kernels.max_blocks)
        agreed = f"{name} {numbers} {num_blocks} {self._kernels.num_threads} {addresses[0] != 0}"
        scalars = [n if isinstance(n, np.float32) else np.uint32(n) for n in numbers]
        meta = np.uint32(zlib.crc32(agreed.encode()))
        arguments = (*addresses, *scalars, meta)
        self._kernels.launch(name, num_blocks, stream, arguments)

    def _try(self, stream: int, num_sums: int) -> None:
        """Sum numbers that change from call to call, many calls at a time."""
        sizes = [size for size in TRY_SIZES if size <= self._layout.half_bytes]
        tried = [sizes[index % len(sizes)] for index in range(num_sums)]
        try:
            buffer = self._memory.allocate(2 * num_sums * max(sizes))
            try:
                for algorithm in KERNEL:
                    self._try_one(algorithm, tried, buffer, stream)
            finally:
                self._memory.free(buffer)
        except BaseException:
            self._page.abort()  # the others need not wait
            raise
        self._write_group(limit_ns=0)

    def _try_one(self, algorithm: Algorithm, sizes: list[int], buffer: int, stream: int) -> None:
        memory, rank, world, most = self._memory, self._peers.rank, self._layout.world, max(sizes)
        counts = (np.arange(len(sizes) * most // 4) % 1021).astype(np.float32)
        memory.write(buffer, (counts * (rank + 1)).tobytes())
        sums_at = buffer + len(sizes) * most
        for index, size in enumerate(sizes):
            source, target = buffer + index * most, sums_at + index * most
            self.sum(algorithm, "float32", size, source, target, stream)
        memory.synchronize()
        self._page.check(rank)
        found = np.frombuffer(memory.read(sums_at, len(sizes) * most), np.float32)
        wanted = counts * (world * (world + 1) // 2)
        for index, size in enumerate(sizes):
            own = slice(index * most // 4, (index * most + size) // 4)
            if not np.array_equal(found[own], wanted[own]):
                raise ArithmeticError(f"sum {index} of {algorithm.value} is wrong")

    def close(self, failed: bool) -> None:
        """Leave the group.

        Args:
            failed: do not wait for other ranks; keep memory that they may read until the exit.
        """
        if failed:
            self._unmap()
            return
        self._memory.synchronize()
        meet(self._peers)
        self._unmap()
        meet(self._peers)  # no rank has this rank's memory mapped any more
        self._free()

    def _unmap(self) -> None:
        for address in self._opened.values():
            self._memory.close(address)
        self._opened.clear()

    def _free(self) -> None:
        if self._page_address:
            self._memory.unmap_host(self._page.address)
        if self._own:
            self._memory.free(self._own)

    def _undo(self) -> None:
        """Leave a group that is not to be, on all ranks.

        Raises:
            ConfigError: on all ranks: a kernel has faulted, and its GPU is lost to the process.
        """
        try:
            jointly(self._peers, "leaving", self._unmap, type(None))
            jointly(self._peers, "leaving", self._free, type(None))
        except StepRefused as error:
            raise ConfigError(
                f"a trial of the custom all-reduce has left a GPU unusable ({error}); "
                "use --disable-custom-all-reduce"
            ) from None
        if self._peers.rank == 0:
            self._page.clear()
        meet(self._peers)
