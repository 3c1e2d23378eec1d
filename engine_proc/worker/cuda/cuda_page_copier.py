"""Copies pages between a GPU and its host tier, on a stream of its own beside the steps.

On the GPU a page lies in pieces: the keys and the values of each layer. On its way it is gathered
in one place there, so that it crosses the bus in one copy. Few pages are launched at a time: a step
waits for no more than their launches.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from headrace.engine_proc.shm.cache_memory import CacheMemory
from headrace.ipc.worker_messages import CopyPages, PagesCopied

LAUNCHED_PAGES = 16


class TimedEvent(Protocol):
    """A place in a stream, as torch.cuda.Event."""

    def record(self) -> None:
        """Record the current position of the current stream."""

    def query(self) -> bool:
        """Whether all is done that comes before."""

    def elapsed_time(self, end: Self) -> float:
        """Return the milliseconds to another."""


class HostEvent:
    """A `TimedEvent` of a CPU, which copies at once."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        """See `TimedEvent`."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """See `TimedEvent`."""
        return True

    def elapsed_time(self, end: "HostEvent") -> float:
        """See `TimedEvent`."""
        return 1000 * (end._at - self._at)


@dataclass(eq=False)
class CopyUnderWay:
    """A copy, and those of its pages that are not launched: of the GPU, and of the host."""

    to_host: bool
    unlaunched: deque[tuple[int, int]]
    began: TimedEvent
    ended: TimedEvent

    @property
    def is_done(self) -> bool:
        """Whether all pages are there."""
        return not self.unlaunched and self.ended.query()


class CudaPageCopier:
    """A `PageCopier`.

    Args:
        kv: the GPU's pages, [layers, 2, pages, page_tokens, kv_heads, head_dim].
        memory: the host's, which the driver has pinned.
        num_host_pages: that it has.
        make_event: of a GPU's stream, or of a CPU.
    """

    def __init__(
        self,
        kv: Tensor,
        memory: CacheMemory,
        num_host_pages: int,
        make_event: Callable[[], TimedEvent] | None = None,
    ) -> None:
        self._kv = kv
        self._memory = memory
        self._gathered = torch.empty_like(kv[:, :, 0], memory_format=torch.contiguous_format)
        num_bytes = num_host_pages * self._gathered.nbytes
        block = memoryview((ctypes.c_uint8 * num_bytes).from_address(memory.address))
        flat = torch.from_numpy(np.frombuffer(block, np.uint8)).view(kv.dtype)
        self._host = flat.view(num_host_pages, *self._gathered.shape)
        self._stream = torch.cuda.Stream(kv.device) if kv.is_cuda else None
        self._make_event = make_event or (timed_event if kv.is_cuda else HostEvent)
        self._copies: deque[CopyUnderWay] = deque()

    def begin(self, copies: CopyPages) -> None:
        """See `PageCopier`."""
        pages = np.frombuffer(copies.pages, np.int32).tolist()
        host_pages = np.frombuffer(copies.host_pages, np.int32).tolist()
        pairs = deque(zip(pages, host_pages, strict=True))
        events = self._make_event(), self._make_event()
        with self._on_stream():
            events[0].record()
        self._copies.append(CopyUnderWay(copies.to_host, pairs, *events))

    def settle(self, send: Callable[[PagesCopied], None]) -> bool:
        """See `PageCopier`."""
        if self._copies:
            self._launch()
        while self._copies and self._copies[0].is_done:
            copy = self._copies.popleft()
            send(PagesCopied(copy.began.elapsed_time(copy.ended) / 1000))
        return bool(self._copies)

    @torch.inference_mode()
    def _launch(self) -> None:
        """Launch some of the pages that have not been."""
        room = LAUNCHED_PAGES
        with self._on_stream():
            for copy in self._copies:
                while copy.unlaunched and room:
                    self._copy(copy.to_host, *copy.unlaunched.popleft())
                    room -= 1
                    if not copy.unlaunched:
                        copy.ended.record()

    def _copy(self, to_host: bool, page: int, host_page: int) -> None:
        on_gpu, on_host = self._kv[:, :, page], self._host[host_page]
        if to_host:
            self._gathered.copy_(on_gpu)
            on_host.copy_(self._gathered, non_blocking=True)
        else:
            self._gathered.copy_(on_host, non_blocking=True)
            on_gpu.copy_(self._gathered)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def timed_event() -> TimedEvent:
    """Return an event of the current GPU."""
    event: TimedEvent = torch.cuda.Event(enable_timing=True)
    return event
