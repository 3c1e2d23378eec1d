"""Encodes a batch of images: tensors out of the arena, embeddings into the area."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.arena import Arena, Stale
from headrace.messages import Encode, Encoded, Tensor

Floats = npt.NDArray[np.float32]
Tensors = Mapping[str, npt.NDArray[Any]]  # of one image

log = logging.getLogger(__name__)


class Encoder(Protocol):
    """What makes rows of images, [rows, row_size] of each."""

    def encode(self, images: Sequence[Tensors]) -> list[Floats]: ...


def encode(message: Encode, encoder: Encoder, arena: Arena, area: Floats) -> Encoded:
    """Write the rows of all images that can be encoded; say which cannot."""
    gone: list[int] = []
    failed: dict[int, str] = {}
    images: dict[int, Tensors] = {}
    for place, tensors in enumerate(message.images):
        try:
            images[place] = {name: read(arena, tensor) for name, tensor in tensors.items()}
        except Stale:
            gone.append(place)
    for place, made in encode_all(images, encoder, failed).items():
        rows = np.frombuffer(message.rows[place], np.int32)
        wanted = (len(rows), area.shape[1])
        if made.shape == wanted:
            area[rows] = made
        else:
            failed[place] = f"an image became {list(made.shape)} numbers, not {list(wanted)}"
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


def encode_all(
    images: dict[int, Tensors], encoder: Encoder, failed: dict[int, str]
) -> dict[int, Floats]:
    """Return the rows of images: of all together or, where that fails, of each alone."""
    try:
        made = encoder.encode(list(images.values())) if images else []
        return dict(zip(images, made, strict=True))
    except Exception as error:  # whatever transformers and torch make of an image
        if len(images) == 1:
            place = next(iter(images))
            log.exception("an image cannot be encoded")
            failed[place] = f"it cannot be encoded: {error!r}"
            return {}
    alone = [encode_all({place: image}, encoder, failed) for place, image in images.items()]
    return {place: rows for one in alone for place, rows in one.items()}
