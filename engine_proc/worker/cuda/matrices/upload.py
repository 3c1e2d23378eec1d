"""Sends weights to the device in pieces, so that the host never has one decoded as a whole."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from headrace.engine_proc.worker.checkpoints.weights import Weight

W = TypeVar("W", bound=Weight)
PIECE_NUMBERS = 1 << 22  # decoded at a time: 16 MB of fp32


def to_device(parts: Sequence[Weight], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Send the numbers of weights to the device as one tensor, row after row."""
    return send(parts, lambda piece: piece.to_float32(), device, dtype)


def send(
    parts: Sequence[W],
    read: Callable[[W], npt.NDArray[Any]],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Send what `read` returns of weights, as many rows as they have, to the device as one."""
    num_rows, first = sum(part.shape[0] for part in parts), 0
    out = torch.empty(0, *parts[0].shape[1:], device=device, dtype=dtype)
    for piece in pieces(parts):
        rows = torch.from_numpy(read(piece)).to(dtype)
        if first == 0:
            out = torch.empty(num_rows, *rows.shape[1:], device=device, dtype=dtype)
        out[first : first + len(rows)] = rows
        first += len(rows)
    return out


def pieces(parts: Sequence[W]) -> Iterator[W]:
    """Cut weights into rows that are decoded together."""
    for part in parts:
        num_rows = part.shape[0]
        step = max(1, PIECE_NUMBERS // math.prod(part.shape[1:]))
        for first in range(0, num_rows, step):
            yield part.rows(first, min(first + step, num_rows))
