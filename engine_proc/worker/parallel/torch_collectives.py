"""Collectives by torch: NCCL between GPUs, for what our own kernels are not for."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroup

from headrace.engine_proc.collectives.collectives import Collectives


class TorchCollectives(Collectives[Tensor]):
    """One rank of a process group, which is closed with it.

    In a group of GPUs, results are there for what follows on the current stream.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace `x` by its sum over the ranks, in an order of the library's, and return it."""
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Write the `x` of every rank to `out`, [num_ranks, *x.shape]."""
        self._group._allgather_base(out.flatten(0, 1), x).wait()  # no list, which it would copy

    def broadcast(self, x: Tensor, root: int = 0) -> None:
        """Replace `x` by that of rank `root`."""
        options = BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([x], options).wait()

    def capture(self) -> AbstractContextManager[None]:
        """Nothing: NCCL's kernels are captured as they are."""
        return nullcontext()

    def abort(self) -> None:
        """End all waits of this rank."""
        self._group.abort()

    def check(self) -> None:
        """Nothing: a call that fails raises."""

    def close(self) -> None:
        """Leave the group."""
        self._group.shutdown()
