"""Copies pages and states between a GPU and its host tier, on a stream of its own beside the steps.

On the GPU a page lies in pieces: the keys and the values of each layer. On its way it is gathered
in one place there, so that it crosses the bus in one copy. A state lies in one place here and
there. Few records are launched at a time: a step waits for no more than their launches.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from headrace.engine_proc.shm.cache_memory import CacheMemory
from headrace.engine_proc.shm.page_memory import whole
from headrace.engine_proc.worker.execution.cache_split import CacheSplit
from headrace.ipc.worker_messages import CopyPages, PagesCopied, RecordKind

LAUNCHED_RECORDS = 16


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
    """A copy, and those of its records that are not launched: places on the GPU and the host."""

    to_host: bool
    unlaunched: deque[tuple[RecordKind, int, int]]
    began: TimedEvent
    ended: TimedEvent

    @property
    def is_done(self) -> bool:
        """Whether all records are there."""
        return not self.unlaunched and self.ended.query()


class CudaPageCopier:
    """A `PageCopier`.

    Args:
        kv: the GPU's pages, each [layers, 2, pages, page_tokens, kv_heads, head_dim]; those of
            heads of other sizes are behind the first ones in a record.
        states: its slots, [slots, numbers]; none of a model without states.
        memory: the host's, which the driver has pinned.
        split: the pages and states that it has.
        make_event: of a GPU's stream, or of a CPU.
    """

    def __init__(
        self,
        kv: Sequence[Tensor],
        states: Tensor,
        memory: CacheMemory,
        split: CacheSplit,
        make_event: Callable[[], TimedEvent] | None = None,
    ) -> None:
        self._kv = kv
        self._states = states
        self._memory = memory
        pages = [group[:, :, 0] for group in kv]
        self._gathered = page = kv[0].new_empty(sum(own.numel() for own in pages))
        cuts = page.split([own.numel() for own in pages])
        self._parts = [cut.view(own.shape) for cut, own in zip(cuts, pages, strict=True)]
        self._host_pages = records_at(memory.address, split.num_pages, page.dtype, page.shape)
        behind = memory.address + whole(self._host_pages.nbytes)
        shape = states.shape[1:]
        self._host_states = records_at(behind, split.num_states, states.dtype, shape)
        self._stream = torch.cuda.Stream(page.device) if page.is_cuda else None
        self._make_event = make_event or (timed_event if page.is_cuda else HostEvent)
        self._copies: deque[CopyUnderWay] = deque()

    def begin(self, copies: CopyPages) -> None:
        """See `PageCopier`."""
        records: deque[tuple[RecordKind, int, int]] = deque()
        for kind, *arrays in (
            (RecordKind.PAGES, copies.pages, copies.host_pages),
            (RecordKind.STATES, copies.slots, copies.host_slots),
        ):
            places, host_places = (np.frombuffer(one, np.int32).tolist() for one in arrays)
            records += [(kind, *pair) for pair in zip(places, host_places, strict=True)]
        events = self._make_event(), self._make_event()
        with self._on_stream():
            events[0].record()
        self._copies.append(CopyUnderWay(copies.to_host, records, *events))

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
        """Launch some of the records that have not been."""
        room = LAUNCHED_RECORDS
        with self._on_stream():
            for copy in self._copies:
                while copy.unlaunched and room:
                    self._copy(copy.to_host, *copy.unlaunched.popleft())
                    room -= 1
                    if not copy.unlaunched:
                        copy.ended.record()

    def _copy(self, to_host: bool, kind: RecordKind, place: int, host_place: int) -> None:
        if kind is RecordKind.STATES:
            ends = self._states[place], self._host_states[host_place]
            source, target = ends if to_host else reversed(ends)
            target.copy_(source, non_blocking=True)
            return
        on_gpu, on_host = [group[:, :, place] for group in self._kv], self._host_pages[host_place]
        if to_host:
            for part, own in zip(self._parts, on_gpu, strict=True):
                part.copy_(own)
            on_host.copy_(self._gathered, non_blocking=True)
        else:
            self._gathered.copy_(on_host, non_blocking=True)
            for part, own in zip(self._parts, on_gpu, strict=True):
                own.copy_(part)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def records_at(address: int, count: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return the records of a kind that lie at an address, as [count, *shape]."""
    num_bytes = count * shape.numel() * dtype.itemsize
    if not num_bytes:
        return torch.empty(count, *shape, dtype=dtype)
    block = memoryview((ctypes.c_uint8 * num_bytes).from_address(address))
    flat = torch.from_numpy(np.frombuffer(block, np.uint8)).view(dtype)
    return flat.view(count, *shape)


def timed_event() -> TimedEvent:
    """Return an event of the current GPU."""
    event: TimedEvent = torch.cuda.Event(enable_timing=True)
    return event
