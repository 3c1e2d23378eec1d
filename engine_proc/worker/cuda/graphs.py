"""CUDA graphs of steps: what a step launches, launched at once.

There is one graph of the forward pass for each of some sizes (see `graph_sizes.py`), and another of
the sampler. A grammar's masks can come in between. Graphs share memory, as only one runs at a time.
"""

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch

from headrace.engine_proc.worker.parallel.graph_inputs import Recapture

K = TypeVar("K", bound=Hashable)
Run = Callable[[], object]  # launches work that reads and writes what stays where it is

log = logging.getLogger(__name__)


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch it on the current stream."""
        ...


class GraphMaker(Protocol):
    """Captures graphs that share memory."""

    def warm_up(self, run: Run) -> None:
        """Run, so that all is compiled and loaded: none of that can be captured."""
        ...

    def capture(self, run: Run) -> Graph:
        """Run, but record launches instead of executing them."""
        ...

    def free_bytes(self) -> int:
        """Return free device memory, with all caches emptied."""
        ...


class CudaGraphs:
    """A `GraphMaker`, of torch."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def warm_up(self, run: Run) -> None:
        """Run on the stream that captures, after and before all else."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, run: Run) -> Graph:
        """Run, but record launches. Other threads may continue: NCCL has some."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph

    def free_bytes(self) -> int:
        """Return free device memory, with all caches emptied."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]


def capture_all(
    open_maker: Callable[[], GraphMaker],
    runs: Mapping[K, Run],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[K, Graph]:
    """Capture graphs in the order given, the largest first: the others find room in its memory.

    Args:
        open_maker: called again where all has to be captured again.
        around: `Collectives.capture` of a group, in which all ranks capture the same.
        progress: called with (graphs captured, graphs in all).
    """
    began = time.monotonic()
    for is_last in (False, True):
        maker = open_maker()
        before = maker.free_bytes()
        graphs: dict[K, Graph] = {}
        try:
            with around():
                for done, (key, run) in enumerate(runs.items()):
                    progress(done, len(runs))
                    maker.warm_up(run)
                    graphs[key] = maker.capture(run)
        except Recapture as error:
            if is_last:
                raise
            log.info("capturing CUDA graphs again: %s", error)
            continue
        break
    progress(len(runs), len(runs))
    num_mb = (before - maker.free_bytes()) >> 20
    took = time.monotonic() - began
    log.info("captured %d CUDA graphs in %.1f s; they take %d MiB", len(runs), took, num_mb)
    return graphs
