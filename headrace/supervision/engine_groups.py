"""The engines of a server: a group for each model, whose members are its replicas.

Groups follow each other in the order of the models, and so do the seats of their engines and of
these engines' workers. Seats for further engines come after all of those.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.board.board import Board
from headrace.board.fields import MAX_REPLICAS, EngineField, Seating, WorkerField
from headrace.config.config import CPU_KV_BYTES, ServerConfig
from headrace.config.flag_values import flag_name
from headrace.config.kv_events_config import parse_kv_events
from headrace.config.process_configs import ModelCapacity, ModelCard
from headrace.config.weight_files import sampled_digest
from headrace.errors import ConfigError
from headrace.extras import require
from headrace.ipc.curve_key import make_key, read_key
from headrace.ipc.schema_fingerprint import code_version
from headrace.supervision.load_policy import LoadPolicy
from headrace.system.machine import has_gpus

# Flags by which a text may differ, or that one engine takes and another does not.
SAME_FLAGS = (
    "engine",
    "hf_overrides",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "model_impl",
    "max_num_seqs",
)


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
        return config.num_own_engines * num_bytes

    @property
    def least_weight_bytes(self) -> int:
        """What weights take of a CPU's memory at least, a tied embedding of two stages twice.

        They may be held in three quarters of their bytes, rounded to a quarter.
        """
        config, card = self.config, self.card
        is_as_stored = config.quantization == "none" and config.dtype == "auto"
        stored = card.weight_bytes + (card.tied_bytes if config.pp > 1 else 0)
        return stored * (3 if is_as_stored else 1) // 4

    @property
    def replica_bytes(self) -> int:
        """What an engine takes of a CPU's memory with full KV cache and store; 0 on GPUs.

        Adapters do not count: workers reckon them (`replicas.py`).
        """
        config = self.config
        if config.engine == "mock" or expects_gpus(config):
            return 0
        num_bytes = config.kv_cache_memory_bytes
        cache = CPU_KV_BYTES if num_bytes is None else num_bytes
        return self.least_weight_bytes + self.card.draft_bytes + cache + config.kv_store_bytes

    def memory_share(self, memory_bytes: int) -> float:
        """Return which share of its GPUs or of a CPU's memory the engines of its flags may take."""
        return self.config.num_own_engines * self.replica_share(memory_bytes)

    def growth_share(self, memory_bytes: int) -> float:
        """Return the share that a further one may take; one that Ray places takes none here."""
        return 0.0 if self.config.num_placed_engines else self.replica_share(memory_bytes)

    def replica_share(self, memory_bytes: int) -> float:
        """Return the share that one of them may take."""
        if expects_gpus(self.config):
            return self.config.gpu_memory_utilization
        return self.replica_bytes / memory_bytes

    @property
    def terms(self) -> dict[str, str]:
        """What machines have to have alike whose engines are replicas of each other."""
        config, card = self.config, self.card
        flags = ("frontend_procs", "detokenizer_procs", *SAME_FLAGS)
        return {
            "version": code_version(),
            "model": card.name,
            "digest of weights": sampled_digest(Path(card.path)),
            "size of the vocabulary": str(card.vocab_size),
            "--max-model-len": str(card.max_model_len),
            **{flag_name(name): str(getattr(config, name)) for name in flags},
        }

    @property
    def capacity(self) -> ModelCapacity:
        """What frontends know of the model."""
        config = self.config
        return ModelCapacity(
            name=self.card.name,
            encoded_name=msgspec.json.encode(self.card.name).decode(),
            max_num_requests=config.max_num_seqs + config.max_num_queued,
            replica_bytes=0 if config.num_placed_engines else self.replica_bytes,
            why_fixed=self.why_fixed,
        )

    @property
    def why_fixed(self) -> str:
        """Why it gets no more engines than those of its flags, and what to do; "" if it does."""
        if self.card.takes_images:
            return (
                "a model that takes images has one engine; give --max-images 0, or run a server "
                "for each replica"
            )
        if self.config.has_remote_stages:
            return "stages on several machines are of one engine; run a server for each replica"
        if parse_kv_events(self.config.kv_events_config) is not None:
            return (
                "with --kv-events-config there are no more than --data-parallel-size; restart with "
                "a larger one, or without events"
            )
        if expects_gpus(self.config) and not self.config.num_placed_engines:
            return (
                "engines on GPUs share the first ones, and there are no more than "
                "--data-parallel-size; restart with a larger one, or run a server for each set of "
                "GPUs"
            )
        return ""


class EnginePlace(NamedTuple):
    """Where an engine is: its group, its place among the replicas, and its workers' indices."""

    group: int
    replica: int
    workers: range
    is_spare: bool = False  # nothing is there at first
    is_remote: bool = False  # on another machine,
    is_placed: bool = False  # by Ray


def expects_gpus(config: ServerConfig) -> bool:
    """Whether weights and pages go to GPUs, judged by flags and machine."""
    if config.engine == "mock":
        return False
    return config.may_use_gpus(has_gpus())


def num_seats(configs: Sequence[ServerConfig], may_grow: bool) -> list[int]:
    """Return how many engines the server may start for each model, here or by Ray.

    Args:
        may_grow: more than it begins with. On its own GPUs it has no more: all engines use the
            first ones. Nor has one whose stages are on several machines.
    """
    sizes = [config.data_parallel_size for config in configs]
    growing = [
        not config.has_remote_stages and (config.num_placed_engines > 0 or not expects_gpus(config))
        for config in configs
    ]
    if not may_grow or not any(growing) or parse_kv_events(configs[0].kv_events_config) is not None:
        return sizes
    num_elsewhere = sum(len(config.remote_engines) for config in configs)
    num_spare = (MAX_REPLICAS - sum(sizes) - num_elsewhere) // sum(growing)
    return [size + num_spare * grows for size, grows in zip(sizes, growing, strict=True)]


def places_of(configs: Sequence[ServerConfig], may_grow: bool = False) -> list[EnginePlace]:
    """Return the place of each engine, by its index.

    Those on other machines come last, after them those that Ray places. Where it does, further ones
    are such, too.
    """
    sizes = num_seats(configs, may_grow)
    num_here = [
        config.num_own_engines if config.num_placed_engines else size
        for config, size in zip(configs, sizes, strict=True)
    ]
    engines = [(i, replica) for i, c in enumerate(configs) for replica in range(c.num_own_engines)]
    further = [(i, replica) for i, count in enumerate(num_here) for replica in range(count)]
    found: list[EnginePlace] = []
    end = 0
    for group, replica in dict.fromkeys(engines + further):
        start, end = end, end + configs[group].num_workers
        is_spare = replica >= configs[group].num_own_engines
        found.append(EnginePlace(group, replica, range(start, end), is_spare))
    for group, config in enumerate(configs):
        start, num_placed = num_here[group], sizes[group] - num_here[group]
        num_named = len(config.remote_engines)
        for place in range(num_named + num_placed):
            is_placed = place >= num_named
            is_spare = place >= config.num_remote_engines
            workers = range(end, end)
            found.append(
                EnginePlace(group, start + place, workers, is_spare, True, is_placed=is_placed)
            )
    return found


def write_places(
    board: Board,
    configs: Sequence[ServerConfig],
    may_grow: bool = False,
    num_first: int | None = None,
) -> None:
    """Publish which model each engine has, and which engine each worker belongs to.

    Seats beyond those of the flags are vacant, and so are those of models that are not loaded.

    Args:
        num_first: models that the server starts with; None is all.
    """
    num_loaded = len(configs) if num_first is None else num_first
    workers = list(board.of("worker"))
    for slot, place in zip(board.of("engine"), places_of(configs, may_grow), strict=True):
        slot[EngineField.MODEL] = place.group
        slot[EngineField.IS_REMOTE] = place.is_remote
        slot[EngineField.IS_PLACED] = place.is_placed
        if place.is_spare or place.group >= num_loaded:
            board.seat(slot, Seating.VACANT)
            slot[EngineField.IS_SPARE] = 1
        for index in place.workers:
            if index < len(workers):  # a mock has none
                workers[index][WorkerField.ENGINE] = slot.seat.index


def check_groups(groups: Sequence[EngineGroup]) -> None:
    """Refuse models that cannot be served together, or with the replicas that are asked for.

    Raises:
        ConfigError: what is wrong, in one line.
    """
    sizes = [g.config.num_own_engines + g.config.num_remote_engines for g in groups]
    if sum(sizes) > MAX_REPLICAS:
        raise ConfigError(
            f"the models have {sum(sizes)} engines together, by --data-parallel-size and "
            f"--remote-engines; at most {MAX_REPLICAS} fit"
        )
    for group in groups:
        config, card = group.config, group.card
        size = config.num_own_engines
        if config.num_placed_engines:
            require("ray", "--data-parallel-backend ray")
        if config.has_remote_stages:
            require("ray", "--distributed-executor-backend ray")
        if card.takes_images and (config.num_remote_engines or config.engine_listen is not None):
            raise ConfigError(
                f"{card.path} takes images, which do not go to other machines; give --max-images 0"
            )
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


def check_key(config: ServerConfig) -> None:
    """Have the key of links to other machines, if there are any.

    Raises:
        ConfigError: there is none.
    """
    if config.engine_key_file is None:
        return
    if config.engine_listen is not None:
        make_key(config.engine_key_file)
    read_key(config.engine_key_file)


def reserved_bytes(groups: Sequence[EngineGroup], own: int) -> int:
    """Return how much memory the groups beside one's own take at least.

    Of models that are loaded on demand, these are the largest ones that may be loaded beside it.
    """
    others = [group.least_bytes for place, group in enumerate(groups) if place != own]
    most = groups[own].config.max_loaded_models
    num_beside = len(others) if most is None else max(most - 1, 0)
    return sum(sorted(others, reverse=True)[:num_beside])


def load_policy(groups: Sequence[EngineGroup], memory_bytes: int) -> LoadPolicy:
    """Return which models are loaded together: so many, or as many as memory is enough for.

    Without a flag these are all, as long as none has more engines than its flags say.

    Args:
        memory_bytes: of this machine, or its container.
    """
    most = groups[0].config.max_loaded_models
    if most:
        return LoadPolicy([1.0] * len(groups), most)
    shares = [group.memory_share(memory_bytes) for group in groups]
    limit = 1.0 if most == 0 else max(sum(shares), 1.0)
    return LoadPolicy(shares, limit, [group.growth_share(memory_bytes) for group in groups])
