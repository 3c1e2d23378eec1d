"""Encodes images: tensors out of the arena, embeddings into the area."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.engine_proc.vision.embedding_store import EmbeddingStore, Floats
from headrace.ipc.arena import Arena, Stale
from headrace.ipc.messages import Tensor
from headrace.ipc.worker_messages import Encode, Encoded

Tensors = Mapping[str, npt.NDArray[Any]]  # of one image

log = logging.getLogger(__name__)


class ImageEncoder(Protocol):
    """Encodes images to embeddings, [rows, row_size] of each."""

    def encode(self, images: Sequence[Tensors]) -> list[Floats]: ...

    def check(self) -> None:
        """Raise if it can encode nothing any more."""


def encode(
    message: Encode,
    encoder: ImageEncoder,
    arena: Arena,
    area: Floats,
    store: EmbeddingStore | None = None,
) -> Encoded:
    """Write the rows of all images that can be encoded; return those that cannot.

    Args:
        store: where rows are looked for first, and kept.
    """
    images: dict[int, Tensors] = {}  # by place, like all that follows
    gone: list[int] = []
    num_stored = 0
    if store is not None:
        store.refresh()
    for place, tensors in enumerate(message.images):
        rows = np.frombuffer(message.rows[place], np.int32)
        if store is not None and (own := store.read(message.keys[place], len(rows))) is not None:
            area[rows] = own
            num_stored += 1
            continue
        try:
            images[place] = {name: read(arena, tensor) for name, tensor in tensors.items()}
        except Stale:
            gone.append(place)
    made, failed = rows_of(images, encoder)
    for place, own in made.items():
        rows = np.frombuffer(message.rows[place], np.int32)
        wanted = [len(rows), area.shape[1]]
        if list(own.shape) == wanted:
            area[rows] = own
            if store is not None:
                store.write(message.keys[place], own)
        else:
            failed[place] = f"an image became {list(own.shape)} numbers, not {wanted}"
    return Encoded(gone, failed, num_stored)


def rows_of(
    images: Mapping[int, Tensors], encoder: ImageEncoder
) -> tuple[dict[int, Floats], dict[int, str]]:
    """Return the rows of images, and why others have none.

    They go together; where that fails, one by one, so that each fails for itself alone.

    Raises:
        Exception: what the encoder has come to an end of.
    """
    if len(images) > 1:
        try:
            return dict(zip(images, encoder.encode([*images.values()]), strict=True)), {}
        except Exception as error:  # whatever transformers and torch make of images
            log.warning("%d images cannot be encoded together: %r", len(images), error)
        encoder.check()
    made: dict[int, Floats] = {}
    failed: dict[int, str] = {}
    for place, image in images.items():
        try:
            (made[place],) = encoder.encode([image])
        except Exception as error:  # likewise
            log.exception("an image cannot be encoded")
            failed[place] = f"it cannot be encoded: {error!r}"
            encoder.check()
    return made, failed


def read(arena: Arena, tensor: Tensor) -> npt.NDArray[Any]:
    """Return a copy of a tensor.

    Raises:
        Stale: it is gone, or went while it was read.
    """
    numbers = np.frombuffer(arena.read(tensor), f"<{tensor.dtype}").reshape(tensor.shape).copy()
    if not arena.holds(tensor):
        raise Stale("a tensor went while it was read")
    return numbers
