"""What a whole step costs: its launches' bytes by what they are, operations, and time at best."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from recorded_graphs import device_tensors
from torch import Tensor

from headrace.engine_proc.worker.cuda.cuda_executor import CudaExecutor
from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.cuda.step_inputs import pack, packed_size
from headrace.engine_proc.worker.execution.executor import Batch
from support.launch_costs import (
    BARRIERS,
    Cost,
    StepShape,
    Tiles,
    barriers_of,
    bytes_from_peers,
    cost_of,
    tiles_of,
)
from support.step_launches import Launch

WEIGHTS, KEYS, STATES, LOGITS, INPUTS = "weights", "keys and values", "states", "logits", "inputs"
REST = "activations"
KINDS = (WEIGHTS, KEYS, STATES, LOGITS, INPUTS, REST)


@dataclass(frozen=True)
class Gpu:
    """What a GPU does at best. Each is said where it is used, and none is this model's finding."""

    bytes_per_s: float  # of memory, as read by a kernel that does nothing else
    operations_per_s: float  # of products in bf16
    peer_bytes_per_s: float  # from all other GPUs together


@dataclass(frozen=True)
class StepCost:
    """A step's cost."""

    launches: list[Launch]
    costs: list[Cost]
    tiles: list[Tiles]  # of each kind of window
    num_bytes: Counter[str]  # by kind
    loaded_bytes: float  # of keys and values by programs, whatever caches have

    @property
    def reductions(self) -> list[Launch]:
        """The calls of the all-reduce."""
        return [launch for launch in self.launches if launch.kernel in BARRIERS]

    @property
    def num_barriers(self) -> int:
        """How often ranks wait for each other."""
        return sum(map(barriers_of, self.reductions))

    @property
    def peer_bytes(self) -> float:
        """What a rank reads of others."""
        return sum(map(bytes_from_peers, self.reductions))

    @property
    def operations(self) -> float:
        """Floating-point operations of products."""
        return sum(cost.operations for cost in self.costs)

    def seconds(self, gpu: Gpu) -> float:
        """Return the time of all launches, each at the slower of memory and products."""
        alone = sum(
            max(cost.num_bytes / gpu.bytes_per_s, cost.operations / gpu.operations_per_s)
            for cost in self.costs
        )
        return alone + self.peer_bytes / gpu.peer_bytes_per_s


def storage_of(tensor: Tensor) -> int:
    """Return which memory a tensor is in."""
    return tensor.untyped_storage()._cdata


def owners_of(executor: CudaExecutor) -> dict[int, str]:
    """Return what is in memory that stays between steps."""
    owners = {storage_of(x): WEIGHTS for x in device_tensors(executor.loaded)}
    buffers = executor.buffers
    owners |= {storage_of(group): KEYS for group in executor.kv.groups}
    owners[storage_of(executor.states)] = STATES
    return owners | {storage_of(buffers.logits): LOGITS, storage_of(buffers.packed): INPUTS}


def shape_of(executor: CudaExecutor, batch: Batch, sizes: Sizes, num_experts: float) -> StepShape:
    """Return what the device knows of a batch, padded to a size."""
    parts = executor.buffers.rope_parts, executor.buffers.state_parts
    page_tokens = executor.page_tokens
    room = np.empty(packed_size(sizes, batch.page_table.shape[1], *parts), np.int32)
    own, num_packed = pack(batch, page_tokens, room, *parts)
    firsts = np.flatnonzero(np.diff(batch.sequences, prepend=-1))
    ends = np.append(firsts[1:], len(batch.sequences))
    missing = sizes.num_sequences - own.num_sequences
    starts = [*firsts.tolist(), *[own.num_tokens] * (missing + 1), sizes.num_tokens]
    keys = (batch.positions[ends - 1] + 1).tolist()
    has_states = batch.state_in is not None
    num_states = int((batch.state_in[batch.sequences[firsts]] >= 0).sum()) if has_states else 0
    of_states = parts[1] * own.num_sequences  # which another kernel reads
    return StepShape(
        query_starts=starts,
        num_keys=[*keys, *[0] * (missing + 1)],
        page_tokens=page_tokens,
        num_packed=num_packed - of_states,
        num_drawn=0 if batch.token_sources is None else int((batch.token_sources >= 0).sum()),
        num_experts=num_experts,
        num_states=num_states,
    )


def experts_chosen(num_tokens: int, num_experts: int, num_chosen: int) -> float:
    """Return how many experts of a layer tokens choose, where each choice is as likely."""
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens)


def step_cost(executor: CudaExecutor, launches: list[Launch], shape: StepShape) -> StepCost:
    """Return the cost of a step that has launched these."""
    owners = owners_of(executor)
    by_window: dict[tuple[Any, Any], Tiles] = {}
    costs, num_bytes, loaded = [], Counter[str](), 0.0
    for launch in launches:
        window = launch.arguments.get("WINDOW"), launch.arguments.get("IS_CHUNKED")
        if launch.kernel == "schedule_kernel":
            by_window[window] = tiles_of(launch, shape)
        tiles = by_window.get(window)
        cost = cost_of(launch, shape, tiles)
        if launch.kernel == "attention_kernel" and tiles is not None:
            loaded += tiles.num_loaded * bytes_of_key(launch)
        costs.append(cost)
        tensors = launch.tensors
        for name, num in [*cost.read.items(), *cost.written.items()]:
            num_bytes[owners.get(storage_of(tensors[name]), REST)] += num
    return StepCost(launches, costs, list(by_window.values()), num_bytes, loaded)


def bytes_of_key(attention: Launch) -> int:
    """Return the bytes of a token's key and value in a layer."""
    keys = attention.tensors["keys"]
    return 2 * keys.shape[2] * keys.shape[3] * keys.element_size()


def with_states(batch: Batch) -> Batch:
    """Return a batch whose sequences have states, each in a slot of its own."""
    slots = np.arange(len(batch.page_table), dtype=np.int32)
    firsts = np.flatnonzero(np.diff(batch.sequences, prepend=-1))
    own, begun = batch.sequences[firsts], np.full_like(slots, -1)
    begun[own] = np.where(batch.positions[firsts] > 0, own, -1)
    return replace(batch, state_in=begun, state_out=slots + len(slots))
