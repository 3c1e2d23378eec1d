"""Encodes images: tensors out of the arena, embeddings into the area."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.arena import Arena, Stale
from headrace.messages import Encode, Encoded, Tensor

Floats = npt.NDArray[np.float32]
Tensors = Mapping[str, npt.NDArray[Any]]  # of one image

log = logging.getLogger(__name__)


class Encoder(Protocol):
    """What makes rows of an image, [rows, row_size]."""

    def encode(self, image: Tensors) -> Floats: ...


def encode(message: Encode, encoder: Encoder, arena: Arena, area: Floats) -> Encoded:
    """Write the rows of all images that can be encoded; say which cannot."""
    gone: list[int] = []
    failed: dict[int, str] = {}
    for place, tensors in enumerate(message.images):
        rows = np.frombuffer(message.rows[place], np.int32)
        wanted = [len(rows), area.shape[1]]
        try:
            made = encoder.encode({name: read(arena, tensor) for name, tensor in tensors.items()})
        except Stale:
            gone.append(place)
        except Exception as error:  # whatever transformers and torch make of an image
            log.exception("an image cannot be encoded")
            failed[place] = f"it cannot be encoded: {error!r}"
        else:
            if list(made.shape) == wanted:
                area[rows] = made
            else:
                failed[place] = f"an image became {list(made.shape)} numbers, not {wanted}"
    return Encoded(gone, failed)


def read(arena: Arena, tensor: Tensor) -> npt.NDArray[Any]:
    """Return a copy of a tensor.

    Raises:
        Stale: it is gone, or went while it was read.
    """
    numbers = np.frombuffer(arena.read(tensor), f"<{tensor.dtype}").reshape(tensor.shape).copy()
    if not arena.holds(tensor):
        raise Stale("a tensor went while it was read")
    return numbers
