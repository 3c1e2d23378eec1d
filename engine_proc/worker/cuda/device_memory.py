"""Queries of a GPU's memory, and measurement of a step's peak."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from headrace.engine_proc.worker.cuda.memory_plan import Figures, graph_bytes
from headrace.engine_proc.worker.execution.out_of_memory import is_out_of_memory
from headrace.errors import ConfigError

FEWER_SEQUENCES = "lower --max-num-seqs or --max-model-len"
SMALLER_STEP = "lower --max-num-batched-tokens or --max-num-seqs, or raise --tp"
SMALLER_WEIGHTS = "use --quantization, a smaller model, or raise --tp"
LESS_CACHE = "lower --gpu-memory-utilization or --kv-cache-memory-bytes, or use --enforce-eager"


class DeviceMemory(Protocol):
    """Memory of the GPU that this process uses."""

    def free_and_total(self) -> tuple[int, int]:
        """Return free memory, for any process, and total memory, bytes."""

    def held(self) -> int:
        """Return what torch has from the driver, used or not."""

    def peak_held(self) -> int:
        """Return the most it has had since `trim`."""

    def trim(self) -> None:
        """Give back what torch has and does not use, and forget the peak."""


class TorchMemory:
    """A `DeviceMemory`, as torch has it."""

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        """See `DeviceMemory`. The first call creates the context, whose memory is then not free."""
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total

    def held(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_reserved(self._device)

    def peak_held(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.max_memory_reserved(self._device)

    def trim(self) -> None:
        """See `DeviceMemory`. Running work may still use memory that looks free, so it is
        awaited."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


@contextmanager
def fitting(what: str, advice: str) -> Iterator[None]:
    """A context that turns lack of memory into a `ConfigError` with the remedy."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"the GPU has no room for {what}: {advice}") from None


def measure(
    memory: DeviceMemory,
    free_before: int,
    run: Callable[[], object],
    num_tokens: int,
    graph_sizes: list[int],
    tower_bytes: int = 0,
) -> Figures:
    """Run the largest step and return its measurements.

    Args:
        free_before: what was free when this process had loaded nothing.
        run: runs the step, of `num_tokens`; once to compile kernels and load libraries, once to be
            looked at.
        graph_sizes: tokens of each graph that will be captured.
        tower_bytes: that the vision worker has, since before `free_before`.

    Raises:
        ConfigError: there is no room for the step.
    """
    with fitting(f"a step of {num_tokens} tokens", SMALLER_STEP):
        run()
        memory.trim()
        held = memory.held()
        run()
    peak = memory.peak_held()
    memory.trim()
    free, total = memory.free_and_total()
    return Figures(
        total=total,
        free_before=free_before,
        free=free,
        held=held,
        peak=max(peak, held),
        graphs=graph_bytes(max(peak - held, 0), num_tokens, graph_sizes),
        tower=tower_bytes,
    )
