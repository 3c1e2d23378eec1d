"""Loads adapters (LoRA) beside a worker's steps: one thread reads and packs them."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from headrace.engine_proc.worker.adapters.factors import AdapterRefused
from headrace.errors import in_a_line, without_middle
from headrace.ipc.adapter_registry import digest_of
from headrace.ipc.worker_messages import AdapterLoaded, LoadAdapter

log = logging.getLogger(__name__)


class AdapterSlots(Protocol):
    """Where an executor has adapters."""

    def pack(self, path: Path) -> Any:
        """Read an adapter, while steps run.

        Raises:
            AdapterRefused: it is broken, does not fit the model, or cannot be expressed.
            MemoryError: it does not fit.
        """
        ...

    def install(self, slot: int, packed: Any) -> None:
        """Put it into a slot, between steps; the one before is freed."""
        ...


class AdapterLoader:
    """The adapters of a worker's executor.

    Attributes:
        max_bytes: of a CPU's memory, that adapters of all workers may take together.
    """

    def __init__(self, slots: AdapterSlots, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self._slots = slots
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._loading: deque[tuple[LoadAdapter, Future[Any]]] = deque()

    def begin(self, load: LoadAdapter) -> None:
        """Begin to load an adapter."""
        self._loading.append((load, self._pool.submit(self._pack, load)))

    def settle(self, send: Callable[[AdapterLoaded], None]) -> bool:
        """Install what is loaded, between steps, and send the answers.

        Returns:
            Whether more is being loaded.
        """
        for answer in self._finished():
            send(answer)
        return bool(self._loading)

    def _finished(self) -> Iterator[AdapterLoaded]:
        while self._loading and self._loading[0][1].done():
            load, packed = self._loading.popleft()
            error = packed.exception()
            if error is None:
                self._slots.install(load.slot, packed.result())
                yield AdapterLoaded(load.slot)
                continue
            if not isinstance(error, AdapterRefused | MemoryError):
                log.error("adapter %s cannot be read", load.path, exc_info=error)
            assert isinstance(error, Exception)
            yield AdapterLoaded(load.slot, without_middle(in_a_line(error)))

    def _pack(self, load: LoadAdapter) -> Any:
        path = Path(load.path)
        if not is_unchanged(path, load.digest):
            raise AdapterRefused(f"{path}: has changed since it was added; load it again")
        return self._slots.pack(path)


def is_unchanged(path: Path, digest: bytes) -> bool:
    """Whether an adapter's files are still those of a digest."""
    try:
        return digest_of(path) == digest
    except OSError:
        return False
