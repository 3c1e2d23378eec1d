"""Computes the numbers of KV pages and states that fit a GPU. Pure: measurements are passed in."""

from dataclasses import dataclass

from headrace.engine_proc.worker.execution.cache_split import (
    MOST_STATES,
    CacheSplit,
    split_cache,
)
from headrace.errors import ConfigError
from headrace.ipc.worker_messages import SLOTS_LOOKING_AHEAD, SLOTS_PER_SEQUENCE

GIB = 1 << 30
SPARE_BYTES = 256 << 20  # stays free where others leave less than our share: allocators cut
GRAPH_BYTES = 8 << 20  # of each graph beside the pool that they share; a guess, on the high side


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Memory of one GPU in bytes, after the weights are loaded and the largest step has run."""

    total: int
    free_before: int  # when nothing of this worker was there but its context,
    free: int  # and now
    held: int  # by this worker's tensors, weights and all: what torch has from the driver now,
    peak: int  # and the most it had during the step
    graphs: int = 0  # that their capture will take
    tower: int = 0  # that the vision worker has, from before this one was there

    @property
    def step(self) -> int:
        """Temporary memory of a step."""
        return self.peak - self.held

    @property
    def libraries(self) -> int:
        """Memory taken since the start, except by tensors: by NCCL, cuBLAS, compiled kernels.

        What other processes take meanwhile counts as ours; what they give back, as nothing.
        """
        return max(0, self.free_before - self.free - self.held)

    @property
    def others(self) -> int:
        """Memory of other processes before this one began, and this one's context."""
        return self.total - self.free_before - self.tower

    def room(self, share: float) -> int:
        """Return what keys and values may take: what our share leaves, if that much is free.

        Args:
            share: of all memory, for this worker and a tower; other processes do not reduce it.
        """
        taken = self.tower + self.held + self.libraries + self.step + self.graphs
        ours = int(self.total * share) - taken
        free = self.free - self.step - self.graphs - SPARE_BYTES
        return max(0, min(ours, free))


def graph_bytes(step_bytes: int, num_tokens: int, sizes: list[int]) -> int:
    """Estimate what the capture of graphs takes: they share a pool, as large as the largest needs.

    Args:
        step_bytes: what a step of `num_tokens` takes.
        sizes: tokens of each graph.
    """
    largest = max(sizes, default=0)
    return step_bytes * largest // num_tokens + GRAPH_BYTES * len(sizes)


def split_room(room: int, page_bytes: int, state_bytes: int, max_num_seqs: int) -> CacheSplit:
    """Return what fits into so many bytes; nothing, if the states of one sequence do not.

    Steps are sent ahead, so there are slots for that, unless states then had more than their part.
    """
    if room // MOST_STATES < SLOTS_PER_SEQUENCE * state_bytes:
        return CacheSplit(0, 0)
    return split_cache(room, page_bytes, state_bytes, max_num_seqs, SLOTS_LOOKING_AHEAD)


def check_split(
    figures: Figures,
    share: float,
    split: CacheSplit,
    *,
    state_bytes: int,
    page_tokens: int,
    max_model_len: int,
    max_num_seqs: int,
) -> None:
    """Raise `ConfigError`, with the remedy, if one sequence of full length does not fit.

    Args:
        split: of all workers, as many as the one has that has the least.
        state_bytes: of this worker's part of a state; 0 in models without states.
    """
    num_tokens = split.num_pages * page_tokens
    if num_tokens >= max_model_len:
        return
    lacks = f"keys and values of {num_tokens} tokens, less than one sequence"
    ways = [f"lower --max-model-len {max_model_len} or --max-num-batched-tokens", "raise --tp"]
    if split.num_states > SLOTS_PER_SEQUENCE:
        ways.insert(0, f"lower --max-num-seqs {max_num_seqs}")
    elif state_bytes and not split.num_states:
        least = MOST_STATES * SLOTS_PER_SEQUENCE * state_bytes
        room = figures.room(share) / GIB
        lacks = f"{room:.2f} GiB of cache, and states of one sequence need {least / GIB:.2f}"
        ways[0] = "lower --max-num-batched-tokens"
    if figures.room(1.0) > figures.room(share):
        ways.insert(0, f"raise --gpu-memory-utilization {share:g}")
    elif figures.others > figures.total // 10:
        ways.insert(0, "end the others")
    taken = {
        "weights": figures.held,
        "the largest step": figures.step,
        "libraries": figures.libraries,
        "graphs": figures.graphs,
        "the vision tower": figures.tower,
        "states": split.num_states * state_bytes,
        "other processes": figures.others,
    }
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in taken.items() if size)
    raise ConfigError(
        f"the GPU has room for {lacks}; of its {figures.total / GIB:.1f} GiB take {parts}: "
        f"{', '.join(ways)}"
    )


def check_bytes(num_bytes: int, free: int, is_restart: bool = False) -> None:
    """Raise `ConfigError` if the flag's bytes of pages and states are not free.

    Args:
        is_restart: it is not the flag that says how many, but the workers before.
    """
    if num_bytes > free and is_restart:
        raise ConfigError(
            f"the workers before had {num_bytes / GIB:.1f} GiB of cache on this GPU, and "
            f"{free / GIB:.1f} are free; see what else uses it, or lower --gpu-memory-utilization"
        )
    if num_bytes > free:
        raise ConfigError(
            f"--kv-cache-memory-bytes asks for {num_bytes / GIB:.1f} GiB of this GPU, and "
            f"{free / GIB:.1f} are free; leave it out to have what there is room for"
        )
