"""Sums over GPUs of one host by our own kernels, by NCCL where those cannot be.

Eager calls copy the input to a workspace that the others have mapped. Calls in a graph read inputs
where they lie: their addresses are exchanged at the end of `capture`.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec

from headrace.engine_proc.collectives.collectives import (
    CollectiveFailed,
    CollectiveOutcome,
    Collectives,
)
from headrace.engine_proc.collectives.control_page import ControlPage
from headrace.engine_proc.worker.parallel.gpu_protocols import Kernels, Memory
from headrace.engine_proc.worker.parallel.graph_inputs import GraphInputs, Recapture
from headrace.engine_proc.worker.parallel.ipc_group import (
    FusedNorm,
    IpcGroup,
    Trial,
    TrialFailed,
)
from headrace.engine_proc.worker.parallel.ipc_workspace import Layout
from headrace.engine_proc.worker.parallel.joint_steps import StepPeers, StepRefused, jointly, refuse
from headrace.system.all_reduce_policy import (
    VECTOR_BYTES,
    Algorithm,
    AllReduceChoice,
    Topology,
    choose,
    fuses,
    why_not_ours,
)

log = logging.getLogger(__name__)
TRIAL = Trial()


class DeviceTensor(Protocol):
    """The part of torch.Tensor that the all-reduce uses."""

    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...
    def contiguous(self) -> Self: ...
    def clone(self) -> Self: ...
    def new_empty(self, size: Any) -> Self: ...


class PeerGpu(msgspec.Struct, array_like=True, frozen=True):
    """A rank's GPU and its settings, as sent to the other ranks."""

    uuid: str
    host: str  # memory is shared within one
    topology: Topology  # of the GPUs of all ranks, as this one sees it
    max_bytes: int
    disabled: str = ""  # what says that our own kernels are not to be used


@dataclass(frozen=True)
class Parts:
    """The factories of the all-reduce's parts, called once all ranks have agreed to go on.

    Args:
        stream: returns the current one, as an address.
        open_fallback: called at last, with whether GPUs may read each other's memory: where a trial
            has shown that they cannot, NCCL would hang.
    """

    open_memory: Callable[[], Memory]
    load_kernels: Callable[[], Kernels]
    stream: Callable[[], int]
    open_fallback: Callable[[bool], Collectives[Any]]


class IpcAllReduce(Collectives[Any]):
    """One rank's `Collectives`. One thread and, but for graphs, one stream.

    Where it cannot be used, on any rank, `enabled` is false on all, `why_not` says why, and the
    fallback does everything.

    Args:
        shares_gpu: ranks may have the same GPU, for tests.
    """

    def __init__(
        self,
        peers: StepPeers,
        gpu: PeerGpu,
        page: ControlPage,
        parts: Parts,
        shares_gpu: bool = False,
        trial: Trial = TRIAL,
    ) -> None:
        self._peers, self._gpu, self._page = peers, gpu, page
        self.rank = peers.rank
        self._stream = parts.stream
        self._bound: int | None = None
        self._captures = False  # within `capture`,
        self._registers = False  # whose graphs read inputs in place
        self._can_register = True
        gpus = jointly(peers, "GPU", lambda: gpu, PeerGpu)
        # Ranks may see different links: the worst counts.
        self._topology = min(theirs.topology for theirs in gpus)
        disabled = next((theirs.disabled for theirs in gpus if theirs.disabled), "")
        self.why_not = why_not_ours(peers.world, self._topology, disabled)
        is_trusted = True
        if not self.why_not:
            try:
                jointly(peers, "GPUs", lambda: check_gpus(gpus, shares_gpu), type(None))
                self._open(parts, trial)
            except StepRefused as error:
                self.why_not = str(error)
                is_trusted = not isinstance(error, TrialFailed)
        self._fallback = parts.open_fallback(is_trusted)
        if self.why_not and peers.rank == 0:
            log.warning("custom all-reduce is off: %s", self.why_not)

    def _open(self, parts: Parts, trial: Trial) -> None:
        peers = self._peers
        loaded: list[tuple[Memory, Kernels]] = []

        def load() -> None:
            loaded.append((parts.open_memory(), parts.load_kernels()))

        jointly(peers, "kernels", load, type(None))
        self._memory, kernels = loaded[0]
        layout = Layout(self._gpu.max_bytes, peers.world)
        self._group = IpcGroup(
            peers, self._memory, kernels, self._page, layout, self._stream(), trial
        )
        self._inputs = GraphInputs(peers, self._memory, self._group)

    @property
    def enabled(self) -> bool:
        """Whether our own kernels are used at all."""
        return not self.why_not

    def choice(self, x: DeviceTensor) -> AllReduceChoice:
        """Return the algorithm for a tensor like `x`."""
        if self.why_not:
            return AllReduceChoice(Algorithm.NCCL, False, self.why_not)
        world, max_bytes = self._peers.world, self._gpu.max_bytes
        return choose(x.nbytes, dtype_of(x), world, self._topology, self._registers, max_bytes)

    def all_reduce(self, x: Any) -> Any:
        """Return the sum of `x` over the ranks: in their order, in fp32, rounded once."""
        choice = self.choice(x)
        if choice.algorithm is Algorithm.NCCL:
            return self._fallback.all_reduce(x)
        if x.nbytes % VECTOR_BYTES:
            whole = self.all_reduce(padded(x))
            return whole[: x.numel()].view(x.shape)
        x, stream = aligned(x), self._own_stream()
        out = x.new_empty(x.shape)
        for start, num_bytes in self._slices(x):
            source, target = x.data_ptr() + start, out.data_ptr() + start
            call = f"{choice.algorithm.value} {dtype_of(x)} {tuple(x.shape)}"
            row = self._row(stream, source, num_bytes, call) if choice.registered else 0
            self._group.sum(choice.algorithm, dtype_of(x), num_bytes, source, target, stream, row)
        return out

    def _slices(self, x: DeviceTensor) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the size of each slice that is one call."""
        for start in range(0, x.nbytes, self._gpu.max_bytes):
            yield start, min(x.nbytes - start, self._gpu.max_bytes)

    def fuses(self, x: DeviceTensor) -> bool:
        """Whether `all_reduce_add_rmsnorm` takes a tensor like `x`; alike on all ranks."""
        world, row_bytes = self._peers.world, x.shape[-1] * x.element_size()
        max_bytes = self._gpu.max_bytes
        return self.enabled and fuses(
            x.nbytes, row_bytes, dtype_of(x), world, self._topology, max_bytes
        )

    def all_reduce_add_rmsnorm(
        self, x: Any, residual: Any, weight: Any, eps: float, one_plus: bool = False
    ) -> tuple[Any, Any]:
        """Return the RMSNorm of residual + sum, and residual + sum; bits are those of one by one.

        Args:
            x, residual: [..., hidden_size]
            weight: [hidden_size]
            one_plus: the weight is 1 + what is stored.
        """
        assert self.fuses(x), "fuses(x) is false"
        assert residual.shape == x.shape and weight.shape == x.shape[-1:]
        assert x.dtype == residual.dtype == weight.dtype
        x, residual, weight = aligned(x), aligned(residual), aligned(weight)
        stream = self._own_stream()
        out, after = x.new_empty(x.shape), x.new_empty(x.shape)
        addresses = (residual.data_ptr(), after.data_ptr(), weight.data_ptr())
        norm = FusedNorm(*addresses, weight.nbytes, eps, one_plus)
        call = f"fused {dtype_of(x)} {tuple(x.shape)}"
        row = self._row(stream, x.data_ptr(), x.nbytes, call) if self.choice(x).registered else 0
        self._group.sum_add_norm(
            dtype_of(x), x.nbytes, x.data_ptr(), out.data_ptr(), norm, stream, row
        )
        return out, after

    def _row(self, stream: int, address: int, num_bytes: int, call: str) -> int:
        """Return the row of a graph's input; 0 if it is copied, as during warm-up."""
        if not self._memory.is_capturing(stream):
            return 0
        return self._inputs.add(address, num_bytes, call)

    def _own_stream(self) -> int:
        """Return the current stream; raise if there would be two: calls have one order."""
        stream = self._stream()
        if self._captures:
            self._page.check(self.rank)  # a rank that cannot capture has said so
        else:
            if self._bound is None:
                self._bound = stream
            if stream != self._bound:
                raise RuntimeError("an all-reduce belongs to one stream: that of its first call")
        return stream

    @contextmanager
    def capture(self, registered: bool = True) -> Iterator[None]:
        """Capture graphs within this, on any stream; all ranks the same.

        Args:
            registered: graphs read inputs where they lie, and do not copy them.

        Raises:
            Recapture: on all ranks: capture again, all of it.
            CollectiveFailed: the ranks captured different graphs. Or one failed: so has the group.
        """
        if not self.enabled:
            yield
            return
        self._memory.synchronize()
        self._captures, self._registers = True, registered and self._can_register
        try:
            yield
        except BaseException as error:
            self._page.abort()  # warm-up sums of the others wait for those of this rank
            refuse(self._peers, "capture", error)
            raise
        finally:
            self._captures = self._registers = False
        try:
            jointly(self._peers, "capture", lambda: None, type(None))
        except StepRefused as error:
            raise CollectiveFailed(CollectiveOutcome.ABORTED, None, str(error)) from None
        try:
            self._inputs.register()
        except Recapture:
            self._can_register = False
            raise
        self._memory.synchronize()

    def all_gather(self, x: Any, out: Any) -> None:
        """Write the `x` of every rank to `out`, [num_ranks, *x.shape]."""
        if self.why_not or x.nbytes == 0 or x.nbytes % VECTOR_BYTES:
            self._fallback.all_gather(x, out)
            return
        assert out.is_contiguous() and out.data_ptr() % VECTOR_BYTES == 0
        x, stream = aligned(x), self._own_stream()
        for start, num_bytes in self._slices(x):
            source, target = x.data_ptr() + start, out.data_ptr() + start
            self._group.gather(num_bytes, source, target, x.nbytes, stream)

    def broadcast(self, x: Any, root: int = 0) -> None:
        """Replace `x` by that of rank `root`."""
        self._fallback.broadcast(x, root)

    def abort(self) -> None:
        """End all waits, on every rank. Kernels return without a result, those queued at once."""
        self._page.abort()
        self._fallback.abort()

    def check(self) -> None:
        """Raise `CollectiveFailed` if a kernel gave up; before that, results mean nothing.

        Reads this process's memory only: of what has not ended yet, nothing is known.
        """
        self._page.check(self._peers.rank)
        self._fallback.check()

    def close(self) -> None:
        """Leave the group. Graphs that were captured must not run any more."""
        if self.enabled:
            failed = self._page.aborted is not CollectiveOutcome.OK
            self._group.close(failed)
            self.why_not = "closed"
        self._fallback.close()


def check_gpus(gpus: list[PeerGpu], shares_gpu: bool) -> None:
    """Raise if the ranks' GPUs cannot form a group. GPUs are identified by UUID, since numbers
    differ between processes."""
    if len({gpu.host for gpu in gpus}) > 1:
        raise ValueError("the GPUs are in several hosts")
    if len({gpu.uuid for gpu in gpus}) < len(gpus) and not shares_gpu:
        raise ValueError("two ranks have the same GPU")
    if len({gpu.max_bytes for gpu in gpus}) > 1:
        raise ValueError("ranks have workspaces of different sizes")


def dtype_of(x: DeviceTensor) -> str:
    """Return a tensor's type as `all_reduce_policy` has it."""
    return str(x.dtype).removeprefix("torch.")


def padded(x: Any) -> Any:
    """Return the numbers of `x` and zeros up to a whole vector, in one dimension."""
    lanes = VECTOR_BYTES // x.element_size()
    whole = x.new_zeros(-(-x.numel() // lanes) * lanes)
    whole[: x.numel()] = x.reshape(-1)
    return whole


def aligned(x: Any) -> Any:
    """Return `x` where kernels can read it, copied if need be: a rank alone cannot choose NCCL."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % VECTOR_BYTES else x
