"""The memory that steps come and go through: it stays where it is, so that graphs know where."""

import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.graph_sizes import Sizes
from headrace.engine_proc.worker.cuda.host_to_device import ArraySender
from headrace.engine_proc.worker.cuda.step_inputs import pack, packed_size
from headrace.engine_proc.worker.execution.executor import Batch


class StepBuffers:
    """One step on the device, and what comes of it.

    Args:
        most: the largest step; more rows than these have logits of their own.
        page_tokens, max_pages: of a page, and of a sequence.
        rope_parts, state_parts: of positions and sequences; see `step_inputs.pack`.
    """

    def __init__(
        self,
        most: Sizes,
        *,
        page_tokens: int,
        max_pages: int,
        vocab_size: int,
        device: torch.device,
        rope_parts: int = 0,
        state_parts: int = 0,
    ) -> None:
        all_rows = Sizes(most.num_tokens, most.num_sequences, most.num_tokens)
        self.max_pages, self._page_tokens = max_pages, page_tokens
        self.rope_parts, self.state_parts = rope_parts, state_parts
        size = packed_size(all_rows, max_pages, rope_parts, state_parts)
        self._sender = ArraySender(size, device)  # no tokens, at first
        self.drawn = torch.zeros(most.num_tokens, dtype=torch.int32, device=device)  # by row
        self.logits = torch.zeros(most.num_rows, vocab_size, device=device)

    @property
    def packed(self) -> Tensor:
        """The step, as `prepare_inputs` takes it."""
        return self._sender.received

    def send(self, batch: Batch) -> Sizes:
        """Send a step once the one before has been computed; return its sizes."""
        assert batch.page_table.shape[1] <= self.max_pages
        parts = self.rope_parts, self.state_parts
        sizes, end = pack(batch, self._page_tokens, self._sender.begin(), *parts)
        self._sender.send(end)
        return sizes

    def clear(self) -> None:
        """Have a step without tokens, which changes nothing."""
        self.packed.zero_()

    def logits_of(self, num_rows: int) -> Tensor:
        """Return room for logits, [rows, vocab_size]."""
        if num_rows <= len(self.logits):
            return self.logits[:num_rows]
        return self.logits.new_empty(num_rows, self.logits.shape[1])
