"""CUDA graphs on a CPU: launches are recorded during capture, and repeated on replay.

What a graph may not do fails here, too. Python does not run again in a replay, so numbers are what
they were. No code waits for the device, and nothing is read but what stays where it is and what the
graph itself has made. That memory belongs to the graphs that run before and after, too: before a
replay there is rubbish in it, and after it again.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
TO_HOST = ("cpu", "numpy", "tolist", "item", "__bool__", "__int__", "__float__", "__array__")
HOST_CALLS = {getattr(Tensor, name) for name in TO_HOST}
MAKES_ROOM = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided"}


class NotCapturable(Exception):
    """A graph may not do this."""


class RecordedGraph:
    """The launches, in order."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], object]] = []
        self.made: list[Tensor] = []

    @torch.inference_mode()
    def replay(self) -> None:
        """Launch it again."""
        for tensor in self.made:
            spoil(tensor)
        for launch in self.launches:
            launch()
        for tensor in self.made:
            spoil(tensor)


class RecordedGraphs:
    """A `GraphMaker`. `stays` are the tensors that graphs may read and write."""

    def __init__(self, stays: Iterable[Tensor]) -> None:
        self._stays = {address(tensor) for tensor in stays}
        self.num_warm_ups = self.num_graphs = 0

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run."""
        self.num_warm_ups += 1
        run()

    def capture(self, run: Callable[[], object]) -> RecordedGraph:
        """Run, and record launches."""
        self.num_graphs += 1
        graph = RecordedGraph()
        recorder = Recorder(graph, set(self._stays))
        with HostCalls(), recorder, recorder.kernels():
            run()
        return graph

    def free_bytes(self) -> int:
        """Return free memory; a graph takes a MiB."""
        return 100 - self.num_graphs << 20


class HostCalls(TorchFunctionMode):
    """Refuses what waits for the device. On a CPU most of it is nothing, and never gets to torch's
    operators."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func in HOST_CALLS:
            raise NotCapturable(f"{func.__name__} waits for the device")
        return func(*args, **kwargs or {})


class Recorder(TorchDispatchMode):
    """Writes down torch's operators, and Triton's kernels."""

    def __init__(self, graph: RecordedGraph, known: set[int]) -> None:
        super().__init__()
        self._graph, self._known = graph, known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name in WAITS or is_masked(schema.name, args):
            raise NotCapturable(f"{schema.name} waits for the device")
        self._check(schema.name, args, kwargs)
        result = func(*args, **kwargs)
        infos = [argument.alias_info for argument in schema.arguments]
        made = [tensor for tensor in tensors(result) if address(tensor) not in self._known]
        self._known |= {address(tensor) for tensor in made}
        self._graph.made += made
        if schema.name in MAKES_ROOM:
            pass
        elif any(info is not None and info.is_write for info in infos):
            self._graph.launches.append(lambda: func(*args, **kwargs))
        elif made:
            self._graph.launches.append(lambda: fill(made, func(*args, **kwargs)))
        return result

    def _check(self, name: str, args: Any, kwargs: Any) -> None:
        for tensor in tensors((args, kwargs)):
            if address(tensor) not in self._known and tensor.numel():
                raise NotCapturable(f"{name} reads memory that will not be there: {tensor.shape}")

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Write down Triton's kernels, too."""
        launch = InterpretedFunction.run

        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self._check(kernel.fn.__name__, args, kwargs)
            with _disable_current_modes():
                launch(kernel, *args, **kwargs)
            self._graph.launches.append(lambda: launch(kernel, *args, **kwargs))

        InterpretedFunction.run = run
        try:
            yield
        finally:
            InterpretedFunction.run = launch


def is_masked(name: str, args: Any) -> bool:
    """Whether rows are chosen by a mask, whose number only the device knows."""
    return name == "aten::index" and any(x.dtype == torch.bool for x in tensors(args[1]))


def tensors(tree: object) -> list[Tensor]:
    """Return the tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def address(tensor: Tensor) -> int:
    """Return where a tensor's memory is."""
    return tensor.untyped_storage().data_ptr()


def fill(places: list[Tensor], numbers: object) -> None:
    """Write results where they were when captured."""
    for place, number in zip(places, tensors(numbers), strict=True):
        place.copy_(number)


def spoil(tensor: Tensor) -> None:
    """Fill memory with NaN and invalid indices."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def device_tensors(owner: object) -> Iterator[Tensor]:
    """Yield the tensors that an object holds on the device; `_pieces` of buffers are the host's."""
    if isinstance(owner, Tensor):
        yield owner
    elif isinstance(owner, Mapping):
        for value in owner.values():
            yield from device_tensors(value)
    elif isinstance(owner, list | tuple):
        for value in owner:
            yield from device_tensors(value)
    elif dataclasses.is_dataclass(owner) or type(owner).__module__.startswith("headrace."):
        for name, value in vars(owner).items():
            if name != "_pieces":
                yield from device_tensors(value)
