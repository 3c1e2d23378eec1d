"""The engines of a server: a group for each model, whose members are its replicas.

Groups follow each other in the order of the models, and so do the seats of their engines and of
these engines' workers. Seats for further engines come after all of those.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.board.board import Board
from headrace.board.fields import MAX_REPLICAS, EngineField, Seating, WorkerField
from headrace.config.config import CPU_KV_BYTES, ServerConfig
from headrace.config.kv_events_config import parse_kv_events
from headrace.config.process_configs import ModelCapacity, ModelCard
from headrace.errors import ConfigError
from headrace.system.machine import has_gpus


class EngineGroup(msgspec.Struct, frozen=True):
    """A model and the flags that hold for it. Its engines are replicas of it."""

    config: ServerConfig
    card: ModelCard

    @property
    def least_bytes(self) -> int:
        """What its engines take of a CPU's memory at least: weights, and a KV cache of a flag.

        Each engine has its own: weights are copied from their files.
        """
        config = self.config
        if expects_gpus(config):
            return 0
        num_bytes = self.least_weight_bytes + (config.kv_cache_memory_bytes or 0)
        return config.data_parallel_size * num_bytes

    @property
    def least_weight_bytes(self) -> int:
        """What weights take of a CPU's memory at least.

        They may be held in three quarters of their bytes, rounded to a quarter.
        """
        config = self.config
        is_as_stored = config.quantization == "none" and config.dtype == "auto"
        return self.card.weight_bytes * (3 if is_as_stored else 1) // 4

    @property
    def replica_bytes(self) -> int:
        """What an engine takes of a CPU's memory with full KV cache and store; 0 on GPUs.

        Adapters do not count: their sizes are not known yet.
        """
        config = self.config
        if config.engine == "mock" or expects_gpus(config):
            return 0
        num_bytes = config.kv_cache_memory_bytes
        cache = CPU_KV_BYTES if num_bytes is None else num_bytes
        return self.least_weight_bytes + self.card.draft_bytes + cache + config.kv_store_bytes

    @property
    def capacity(self) -> ModelCapacity:
        """What frontends know of the model."""
        config = self.config
        return ModelCapacity(
            name=self.card.name,
            encoded_name=msgspec.json.encode(self.card.name).decode(),
            max_num_requests=config.max_num_seqs + config.max_num_queued,
            replica_bytes=self.replica_bytes,
        )


class EnginePlace(NamedTuple):
    """Where an engine is: its group, its place among the replicas, and its first worker's index."""

    group: int
    replica: int
    first_worker: int


def expects_gpus(config: ServerConfig) -> bool:
    """Whether weights and pages go to GPUs, judged by flags and machine."""
    if config.engine == "mock":
        return False
    return config.device == "cuda" or (config.device == "auto" and has_gpus())


def num_seats(configs: Sequence[ServerConfig], may_grow: bool) -> list[int]:
    """Return how many engines each model may have.

    Args:
        may_grow: more than it begins with. On GPUs it has no more: all engines use the first GPUs.
    """
    sizes = [config.data_parallel_size for config in configs]
    growing = [not expects_gpus(config) for config in configs]
    if not may_grow or not any(growing) or parse_kv_events(configs[0].kv_events_config) is not None:
        return sizes
    num_spare = (MAX_REPLICAS - sum(sizes)) // sum(growing)
    return [size + num_spare * grows for size, grows in zip(sizes, growing, strict=True)]


def places_of(configs: Sequence[ServerConfig], may_grow: bool = False) -> list[EnginePlace]:
    """Return the place of each engine, by its index."""
    sizes = num_seats(configs, may_grow)
    engines = [
        (i, replica) for i, c in enumerate(configs) for replica in range(c.data_parallel_size)
    ]
    further = [(i, replica) for i, size in enumerate(sizes) for replica in range(size)]
    found: list[EnginePlace] = []
    first_worker = 0
    for group, replica in dict.fromkeys(engines + further):
        found.append(EnginePlace(group, replica, first_worker))
        first_worker += configs[group].tp
    return found


def write_places(board: Board, configs: Sequence[ServerConfig], may_grow: bool = False) -> None:
    """Publish which model each engine has, and which engine each worker belongs to.

    Seats beyond those of the flags are vacant.
    """
    workers = list(board.of("worker"))
    for slot, place in zip(board.of("engine"), places_of(configs, may_grow), strict=True):
        slot[EngineField.MODEL] = place.group
        if place.replica >= configs[place.group].data_parallel_size:
            slot[EngineField.SEATING] = Seating.VACANT
            slot[EngineField.IS_SPARE] = 1
        end = place.first_worker + configs[place.group].tp
        for worker in workers[place.first_worker : end]:
            worker[WorkerField.ENGINE] = slot.seat.index


def check_groups(groups: Sequence[EngineGroup]) -> None:
    """Refuse models that cannot be served together, or with the replicas that are asked for.

    Raises:
        ConfigError: what is wrong, in one line.
    """
    num_engines = sum(group.config.data_parallel_size for group in groups)
    if num_engines > MAX_REPLICAS:
        raise ConfigError(
            f"the models have {num_engines} engines together, by --data-parallel-size; at most "
            f"{MAX_REPLICAS} fit"
        )
    for group in groups:
        size, card = group.config.data_parallel_size, group.card
        if card.takes_images and size > 1:
            raise ConfigError(
                f"--data-parallel-size {size} is for models of text alone, and {card.path} takes "
                "images; leave it out, or give --max-images 0"
            )
        if card.takes_images and len(groups) > 1:
            raise ConfigError(
                f"{card.path} takes images, which go with one model alone; serve it by itself, or "
                "with --max-images 0"
            )
    names = [group.card.name for group in groups]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError(
                f"two models are called {name}; give one a served_model_name below models in "
                "--config"
            )


def reserved_bytes(groups: Sequence[EngineGroup], own: int) -> int:
    """Return how much memory the groups beside one's own take at least."""
    return sum(group.least_bytes for place, group in enumerate(groups) if place != own)
