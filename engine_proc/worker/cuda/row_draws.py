"""Draws a token for each row of a step, in a CUDA graph where there is one that is large enough.

There are graphs with the limits of top-k and top-p, and without: the host knows the rows. A graph
comes after the graph of the forward pass, so that biases and masks are applied in between.
"""

import struct
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import fields
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.engine_proc.worker.cuda.graphs import Graph, Run
from headrace.engine_proc.worker.cuda.host_to_device import ArraySender
from headrace.engine_proc.worker.cuda.kernels.gumbel_sampler import Draws, draw
from headrace.engine_proc.worker.cuda.kernels.split_semaphore import new_turns
from headrace.engine_proc.worker.cuda.step_buffers import StepBuffers
from headrace.engine_proc.worker.execution.cpu_sampler import ROW
from headrace.engine_proc.worker.execution.executor import Int32s
from headrace.ipc.worker_messages import SAMPLING_CODES

# Where the fields of a `ROW` are, as so many numbers of 32 bits.
PLACES = {name: ROW.fields[name][1] // 4 for name in ROW.names or () if ROW.fields}
ROW_NUMBERS = ROW.itemsize // 4


class DrawSize(NamedTuple):
    """The draws of a graph."""

    num_rows: int
    has_limits: bool  # whether any row may have top-k or top-p


class RowDraws:
    """Rows on the device. Their drawn tokens are in `StepBuffers.drawn`."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._sender = ArraySender(len(buffers.drawn) * ROW_NUMBERS, buffers.drawn.device)
        self._turns = new_turns(len(buffers.drawn), buffers.drawn.device)
        self.num_sent = 0  # rows, the last time
        self._has_limits = False  # any of these
        self._sizes: list[int] = []
        self._graphs: dict[DrawSize, Graph] = {}

    @property
    def drawn(self) -> Tensor:
        """The last drawn tokens, [rows], int32, with room for more rows."""
        return self._buffers.drawn

    def send(self, rows: Int32s) -> Tensor:
        """Send a step's rows; return them as they are on the device, [rows, ROW_NUMBERS].

        Args:
            rows: `worker_messages.SAMPLING_ROW`, one after the other.
        """
        num = len(rows)
        self.num_sent = num // ROW_NUMBERS
        self._has_limits = has_limits(rows, self._buffers.logits.shape[1])
        end = (self._graph_for(num // ROW_NUMBERS) or 0) * ROW_NUMBERS or num
        out = self._sender.begin()
        out[:num] = rows
        out[num:end] = 0  # temperatures of rows that are missing: no time is spent on them
        self._sender.send(end)
        return self.columns(num // ROW_NUMBERS)

    def columns(self, num_rows: int) -> Tensor:
        """Return the rows that were sent last, as they are on the device."""
        return self._sender.received[: num_rows * ROW_NUMBERS].view(-1, ROW_NUMBERS)

    def draw(self, logits: Tensor) -> Tensor:
        """Draw for the rows that were sent last; return tokens, [rows], int32."""
        num_rows = len(logits)
        size = self._graph_for(num_rows)
        if size is None:
            self.compute(logits, self._has_limits)
        else:
            assert logits.data_ptr() == self._buffers.logits.data_ptr()
            self._graphs[DrawSize(size, self._has_limits)].replay()
        return self._buffers.drawn[:num_rows]

    def compute(self, logits: Tensor, has_limits: bool) -> None:
        """Draw for some rows, [rows, vocab_size]."""
        num_rows = len(logits)
        draws = draws_of(self.columns(num_rows))
        draw(logits, draws, self._buffers.drawn[:num_rows], self._turns, has_limits)

    def runs(self, sizes: Collection[int]) -> dict[DrawSize, Run]:
        """Return the draws to capture for these numbers of rows, the largest first."""
        logits = self._buffers.logits
        return {
            DrawSize(size, limited): partial(self.compute, logits[:size], limited)
            for size in sorted(sizes, reverse=True)
            for limited in (True, False)
        }

    def take(self, graphs: dict[DrawSize, Graph]) -> None:
        """Use the graphs of `runs` from here on."""
        self._sizes, self._graphs = sorted({size.num_rows for size in graphs}), graphs

    def _graph_for(self, num_rows: int) -> int | None:
        place = bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else None


def has_limits(rows: Int32s, vocab_size: int) -> bool:
    """Whether any row has top-k or top-p that limits what it may draw.

    Args:
        rows: `worker_messages.SAMPLING_ROW`, one after the other.
    """
    own = rows.view(ROW)
    is_limited = (own["top_k"] > 0) & (own["top_k"] < vocab_size) | (own["top_p"] < 1)
    return bool(np.any(is_limited & (own["temperature"] > 0)))


def draws_of(columns: Tensor) -> Draws:
    """Return how rows are drawn.

    Args:
        columns: [rows, ROW_NUMBERS], int32, of `worker_messages.SAMPLING_ROW`.
    """
    views = {"Q": columns.view(torch.int64), "f": columns.view(torch.float32), "i": columns}

    def column(name: str) -> Tensor:
        code = SAMPLING_CODES[name]
        return views[code][:, PLACES[name] * 4 // struct.calcsize(code)]

    return Draws(**{one.name: column(one.name) for one in fields(Draws)})
