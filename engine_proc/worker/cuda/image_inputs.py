"""A step's image inputs: rows in place of embeddings."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.engine_proc.worker.execution.executor import Batch


@dataclass(frozen=True)
class ImageInputs:
    """Of a step that has some, on the device."""

    tokens: Tensor  # int64, those that come in as rows of images,
    parts: Tensor  # and these rows, [1 + deepstack, tokens, hidden_size]


def image_inputs(
    batch: Batch, device: torch.device, dtype: torch.dtype, num_parts: int
) -> ImageInputs | None:
    """Send what a batch has of images to the device; None is that it has nothing.

    Args:
        num_parts: of a row: what comes in, and what is added behind the first layers.
    """
    assert batch.last_seen is None, "tokens of an image see each other"
    if batch.embed_rows is None or batch.embeds is None:
        return None
    tokens = np.flatnonzero(batch.embed_rows >= 0)
    if not len(tokens):
        return None
    rows = batch.embeds[batch.embed_rows[tokens]]
    parts = np.stack(np.split(rows, num_parts, axis=1))
    return ImageInputs(
        tokens=torch.from_numpy(tokens).to(device),
        parts=torch.from_numpy(parts).to(device, dtype),
    )
