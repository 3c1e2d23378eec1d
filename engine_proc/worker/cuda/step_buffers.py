"""The memory that steps come and go through: it stays where it is, so that graphs know where.

A step is sent in one copy from pinned memory, of which there are two pieces: while one is on its
way, the next step is written into the other.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.buckets import Sizes
from headrace.engine_proc.worker.cuda.step_inputs import pack, packed_size
from headrace.engine_proc.worker.executor import Batch

NUM_PIECES = 2


class Event(Protocol):
    """A place in a stream, as torch.cuda.Event."""

    def record(self) -> None:
        """Be the place that the current stream has reached."""
        ...

    def synchronize(self) -> None:
        """Wait until all is done that comes before."""
        ...


class NoEvent:
    """Of a CPU, which copies at once."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class StepBuffers:
    """One step on the device, what is sent of it, and what comes of it.

    Args:
        most: the largest step; more rows than these have logits of their own.
        max_pages: of a sequence.
        make_event: of the stream that steps are run on.
    """

    def __init__(
        self,
        most: Sizes,
        max_pages: int,
        vocab_size: int,
        device: torch.device,
        make_event: Callable[[], Event] | None = None,
    ) -> None:
        is_gpu = device.type == "cuda"
        all_rows = Sizes(most.num_tokens, most.num_sequences, most.num_tokens)
        size = packed_size(all_rows, max_pages)
        if make_event is None:
            make_event = torch.cuda.Event if is_gpu else NoEvent
        self.max_pages = max_pages
        self.packed = torch.zeros(size, dtype=torch.int32, device=device)  # no tokens
        self.drawn = torch.zeros(most.num_tokens, dtype=torch.int32, device=device)
        self.logits = torch.zeros(most.num_rows, vocab_size, device=device)
        self._pieces = [
            (torch.zeros(size, dtype=torch.int32, pin_memory=is_gpu), make_event())
            for _ in range(NUM_PIECES)
        ]
        self._turn = 0

    def send(self, batch: Batch) -> Sizes:
        """Send a step once the one before has been computed; return its sizes."""
        piece, sent = self._pieces[self._turn]
        self._turn = (self._turn + 1) % NUM_PIECES
        sent.synchronize()
        sizes, end = pack(batch, piece.numpy())
        self.packed[:end].copy_(piece[:end], non_blocking=True)
        sent.record()
        return sizes

    def clear(self) -> None:
        """Have a step without tokens, which changes nothing."""
        self.packed.zero_()

    def logits_of(self, num_rows: int) -> Tensor:
        """Return room for logits, [rows, vocab_size]."""
        if num_rows <= len(self.logits):
            return self.logits[:num_rows]
        return self.logits.new_empty(num_rows, self.logits.shape[1])
