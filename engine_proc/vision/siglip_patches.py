"""What the first layer of a SigLIP tower sees: patches with their positions. Pure."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from headrace.engine_proc.vision.encoder import Tensors
from headrace.engine_proc.vision.siglip_weights import numbers
from headrace.engine_proc.worker.checkpoints.weights import Weights
from headrace.engine_proc.worker.execution.executor import Floats

PIXEL = 3  # numbers


class Grid(NamedTuple):
    """The patches of a tile, [height * width, hidden], line by line."""

    embeds: Floats
    height: int
    width: int


class PatchSizes(NamedTuple):
    """The patches that a tower was made for: so many a side."""

    hidden: int
    patch: int  # pixels a side
    side: int
    most: int  # of a tile


Patches = Callable[[Tensors], Iterator[Grid]]


def square_tiles(weights: Weights, sizes: PatchSizes) -> Patches:
    """SigLIP: tiles are squares of one size; of pixels past the last patch nothing is seen.

    The function that it returns raises `ValueError` for others, and for padded ones.
    """
    hidden, patch, side, _ = sizes
    kernel = numbers(weights, "embeddings.patch_embedding.weight", hidden, PIXEL, patch, patch)
    kernel = kernel.reshape(hidden, -1).T
    bias = numbers(weights, "embeddings.patch_embedding.bias", hidden)
    positions = numbers(weights, "embeddings.position_embedding.weight", side**2, hidden) + bias
    edge = side * patch

    def patches(image: Tensors) -> Iterator[Grid]:
        pixels, mask = image["pixel_values"], image.get("pixel_attention_mask")
        channels, height, width = pixels.shape[-3:]
        fits = (channels, height // patch, width // patch) == (PIXEL, side, side)
        if not fits or not (mask is None or mask[..., :edge, :edge].all()):
            raise ValueError(f"tiles are {pixels.shape}, not 3 x {edge} x {edge} without padding")
        seen = pixels[..., :edge, :edge]
        for tile in seen.reshape(-1, PIXEL, side, patch, side, patch):
            flat = tile.transpose(1, 3, 0, 2, 4).reshape(side**2, -1)
            yield Grid(flat @ kernel + positions, side, side)

    return patches


def flat_patches(weights: Weights, sizes: PatchSizes) -> Patches:
    """SigLIP 2: tiles have shapes of their own, and positions are stretched over them.

    The function that it returns raises `ValueError` for a tile of too many patches.
    """
    hidden, patch, side, most = sizes
    kernel = numbers(weights, "embeddings.patch_embedding.weight", hidden, PIXEL * patch**2).T
    bias = numbers(weights, "embeddings.patch_embedding.bias", hidden)
    positions = numbers(weights, "embeddings.position_embedding.weight", side**2, hidden)
    square = positions.reshape(side, side, hidden)

    def patches(image: Tensors) -> Iterator[Grid]:
        shapes = image["spatial_shapes"].tolist()
        for flat, (height, width) in zip(image["pixel_values"], shapes, strict=True):
            if height * width > most:
                raise ValueError(f"a tile has {height} x {width} patches, of {most} at most")
            own = stretched(square, height, width) + bias
            yield Grid(flat[: height * width] @ kernel + own, height, width)

    return patches


def stretched(square: Floats, height: int, width: int) -> Floats:
    """Return positions, [side, side, hidden], resized as torch does: bilinear, with antialias."""
    rows, columns = (resizing(len(square), size) for size in (height, width))
    lines = np.tensordot(rows, square, 1)
    found: Floats = np.einsum("wv,hvc->hwc", columns, lines, optimize=True)
    return found.reshape(height * width, -1)


def resizing(old: int, new: int) -> Floats:
    """Return the matrix that resizes a line of `old` numbers, [new, old]."""
    scale = old / new
    reach = max(scale, 1.0)  # of the triangle that weighs neighbours
    centers = (np.arange(new) + 0.5) * scale
    distances = np.abs(np.arange(old) + 0.5 - centers[:, None]) / reach
    weights = np.maximum(0.0, 1.0 - distances)
    found: Floats = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return found
