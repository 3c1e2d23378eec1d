"""What a step on GPUs launches, in order: Triton's kernels, torch's operators, sums over GPUs.

Tensors are on torch's meta device, where nothing runs: a model may have any size. Where Triton
interprets kernels, they run, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.parallel.ipc_all_reduce import IpcAllReduce
from headrace.system.all_reduce_policy import MAX_BYTES, Algorithm, Topology

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
MAKES_ROOM = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"}
GATHER = "gather"
Call = Callable[..., object]


@dataclass(frozen=True)
class Launch:
    """A kernel, an operator of torch ("aten::..."), or a call of the all-reduce.

    `arguments` are what it is given, by name: of operators, which have no names, "0", "1" and so
    on, and "out" or "in place". Of sums over GPUs they are numbers, and no tensors.
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The arguments that are tensors, those of descriptors included."""
        bases = {
            name: value.base if isinstance(value, TensorDescriptor) else value
            for name, value in self.arguments.items()
        }
        return {name: value for name, value in bases.items() if isinstance(value, Tensor)}


class LaunchRecorder(TorchDispatchMode):
    """Keeps all launches.

    Args:
        also: is given what `JITFunction.run` is.
    """

    def __init__(self, also: Call = lambda *_, **__: None) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self._also = also

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if not func.is_view and schema.name not in MAKES_ROOM:
            given = tree_leaves((args, kwargs or {}))
            arguments = {str(i): x for i, x in enumerate(given) if isinstance(x, Tensor)}
            is_written = [
                a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
            ]
            place = "in place" if any(is_written) else "out"
            self.launches.append(Launch(schema.name, (), arguments | {place: result}))
        return result

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Keep Triton's kernels, too."""
        runs = {kind: kind.run for kind in (InterpretedFunction, JITFunction)}

        def run(kernel: Any, *args: Any, grid: Any, **named: Any) -> None:
            values = dict(zip(kernel.arg_names, args, strict=False)) | named
            for option in ("warmup", *OPTIONS):
                values.pop(option, None)
            self.launches.append(Launch(kernel.fn.__name__, grid, values))
            with _disable_current_modes():
                if isinstance(kernel, InterpretedFunction):
                    runs[InterpretedFunction](kernel, *args, grid=grid, **named)
                else:
                    self._also(kernel, *args, **named)

        for kind in runs:
            kind.run = run
        try:
            yield
        finally:
            for kind, before in runs.items():
                kind.run = before


class RecordedAllReduce(IpcAllReduce):
    """A rank's all-reduce, whose calls are kept and not made.

    Args:
        in_graph: inputs are read where they lie, as far as the policy says so.
    """

    def __init__(self, launches: list[Launch], world: int, in_graph: bool) -> None:
        self.rank, self.why_not = 0, ""
        self._peers: Any = SimpleNamespace(world=world)
        self._gpu: Any = SimpleNamespace(max_bytes=MAX_BYTES)
        self._topology = Topology.NVLINK
        self._registers = in_graph
        self._group: Any = self
        self._launches = launches

    def sum(
        self,
        algorithm: Algorithm,
        dtype: str,
        num_bytes: int,
        source: int,
        target: int,
        stream: int,
        row: int,
    ) -> None:
        """Keep a call of `IpcGroup.sum`."""
        self._keep(algorithm.value, num_bytes, row > 0)

    def gather(self, num_bytes: int, *_: int) -> None:
        """Keep a call of `IpcGroup.gather`."""
        self._keep(GATHER, num_bytes, False)

    def _keep(self, name: str, num_bytes: int, registered: bool) -> None:
        arguments = {"num_bytes": num_bytes, "registered": registered, "world": self._peers.world}
        self._launches.append(Launch(name, (), arguments))

    def _row(self, stream: int, address: int, num_bytes: int, call: str) -> int:
        return 1

    def _own_stream(self) -> int:
        return 0


@torch.inference_mode()
def launches_of(executor: CudaExecutor, recorder: LaunchRecorder, sizes: Sizes) -> list[Launch]:
    """Return what a step of a size launches, up to its logits."""
    recorder.launches.clear()
    with recorder, recorder.kernels():
        executor.compute(sizes)
    return list(recorder.launches)
