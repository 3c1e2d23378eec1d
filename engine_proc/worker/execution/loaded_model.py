"""A model that is ready to run, and the sizes that every loader shares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.engine_proc.shm.stage_links import StageLinks
from headrace.engine_proc.worker.execution.adapter_loader import AdapterLoader
from headrace.engine_proc.worker.execution.runner import Runner
from headrace.ipc.worker_messages import CopyPages, PagesCopied
from headrace.system.machine import usable_cores

PAGE_TOKENS = 32  # of a page of the KV cache

Progress = Callable[[int, int], None]  # takes the parts that are loaded, and their number


class PageCopier(Protocol):
    """Copies pages between a device and its host tier, beside a worker's steps."""

    def begin(self, copies: CopyPages) -> None:
        """Begin a copy, after those before it."""

    def settle(self, send: Callable[[PagesCopied], None]) -> bool:
        """Answer for the copies that are done; return whether others are under way."""


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model: its runner, the size of its KV cache, and its abilities."""

    runner: Runner
    num_pages: int
    whole_prompts: bool = False
    looks_ahead: bool = False  # as in `WorkerReady`
    num_states: int = 0  # as in `WorkerReady`
    cache_id: bytes = b""  # as in `WorkerReady`, like the next
    page_bytes: int = 0
    state_bytes: int = 0
    eagle_bytes: int = 0
    num_host_pages: int = 0  # as in `WorkerReady`, like the next two
    num_host_states: int = 0
    numerics: str = ""
    copier: PageCopier | None = None  # with host pages
    adapters: AdapterLoader | None = None  # with `--enable-lora`
    links: StageLinks | None = None  # to other stages of a pipeline,
    hidden_size: int = 0  # and the numbers of a token that go there
    rest: Callable[[], None] = lambda: None  # gives back what steps take beside weights and pages
    can_rejoin: bool = True  # the workers sum through a group that can be used after an abort

    @property
    def adapter_bytes(self) -> int:
        """What adapters may take of a CPU's memory, in all workers together."""
        return 0 if self.adapters is None else self.adapters.max_bytes


def threads_of_rank(num_ranks: int) -> int:
    """Return how many threads a worker computes with: an equal part of the cores."""
    return max(1, usable_cores() // num_ranks)
