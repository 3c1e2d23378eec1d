"""Memory of engines that outlives their processes: the supervisor holds it."""

import os
from collections.abc import Sequence

from headrace.board.board import Board
from headrace.board.fields import EngineField
from headrace.config.config import ServerConfig
from headrace.config.process_configs import StoreTiers
from headrace.ipc.prefix_index import PrefixIndex, create_prefix_index


class EngineFiles:
    """Descriptors by engine. They take no memory until a process writes there.

    Attributes:
        cache_fds: of the tables of pages, then of each worker's pages.
        prefix_fds: each `PrefixIndex`: of its pages, and of those that its store has in memory. An
            engine that never has replicas has none.
        store_tiers: none without a KV store.
    """

    def __init__(self, board: Board, configs: Sequence[ServerConfig], takes_images: bool) -> None:
        """Make them for the engines of a board that tells of their models."""
        self.cache_fds: list[tuple[int, ...]] = []
        self.prefix_fds: dict[int, tuple[int, ...]] = {}
        for slot in board.of("engine"):
            config = configs[slot[EngineField.MODEL]]
            computes = config.engine != "mock" and not board.is_remote(slot)
            self.cache_fds.append(make_cache_files(config.num_workers) if computes else ())
            if len(board.replicas_of(slot)) > 1 or config.engine_listen is not None:
                may_have_store = config.kv_store_bytes > 0 or board.is_remote(slot)
                indexes = [create_prefix_index() for _ in range(1 + may_have_store)]
                self.prefix_fds[slot.seat.index] = tuple(indexes)
        num_stores = sum(1 for _ in board.of("kv_store"))
        self.store_tiers = [
            make_store_tiers(configs[0], takes_images, self.prefix_fds.get(engine, ()))
            for engine in range(num_stores)
        ]

    def clear(self, engine: int) -> None:
        """Give the memory of an engine back to the system. Its processes have ended."""
        fds = self.cache_fds[engine]
        if self.store_tiers:
            fds += self.store_tiers[engine].memory_fds
        for fd in fds:
            os.ftruncate(fd, 0)
        for fd in self.prefix_fds.get(engine, ()):
            PrefixIndex(fd).clear()


def make_cache_files(num_workers: int) -> tuple[int, ...]:
    """Return the descriptors of an engine's tables and of each worker's pages."""
    names = ["headrace-tables", *(f"headrace-pages-{i}" for i in range(num_workers))]
    return tuple(os.memfd_create(name, os.MFD_CLOEXEC) for name in names)


def make_store_tiers(
    config: ServerConfig, takes_images: bool, prefix_fds: tuple[int, ...]
) -> StoreTiers:
    """Return the tiers of the KV store; those in memory outlive all other processes."""
    names = ("headrace-store-pages", "headrace-store-states") if config.kv_store_bytes else ()
    return StoreTiers(
        memory_fds=tuple(os.memfd_create(name, os.MFD_CLOEXEC) for name in names),
        index_fd=prefix_fds[1] if len(prefix_fds) > 1 else None,
        memory_bytes=config.kv_store_bytes,
        directory=None if config.kv_store is None else os.path.abspath(config.kv_store),
        disk_bytes=config.kv_store_disk_bytes,
        takes_images=takes_images,
    )
