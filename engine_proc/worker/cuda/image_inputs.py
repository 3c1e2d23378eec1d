"""A step's image inputs: rows in place of embeddings, and M-RoPE positions."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.engine_proc.worker.execution.executor import Batch


@dataclass(frozen=True)
class ImageInputs:
    """Of a step that has some, on the device."""

    tokens: Tensor  # int64, those that come in as rows of images,
    rows: Tensor  # and these rows, [tokens, hidden_size]
    rope_positions: Tensor | None  # [tokens of the step, 3], int32; None is one position for all


def image_inputs(batch: Batch, device: torch.device, dtype: torch.dtype) -> ImageInputs | None:
    """Send what a batch has of images to the device; None is that it has nothing."""
    assert batch.last_seen is None, "tokens of an image see each other"
    if batch.embed_rows is None and batch.rope_positions is None:
        return None
    tokens, rows = np.empty(0, np.int64), np.empty((0, 0), np.float32)
    if batch.embed_rows is not None and batch.embeds is not None:
        tokens = np.flatnonzero(batch.embed_rows >= 0)
        rows = batch.embeds[batch.embed_rows[tokens]]
    positions = batch.rope_positions
    return ImageInputs(
        tokens=torch.from_numpy(tokens).to(device),
        rows=torch.from_numpy(rows).to(device, dtype),
        rope_positions=None if positions is None else torch.tensor(positions, device=device),
    )
