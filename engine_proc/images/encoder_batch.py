"""Batches images for one call of the vision tower. Pure.

Waiting images are joined in order while their tensors can be concatenated and their total stays
within the limit. An image above the limit is encoded alone. No image waits for others to arrive.
"""

import math
from collections.abc import Sequence

from headrace.ipc.messages import Image

MAX_IMAGES = 64  # of a batch; bounds its messages

Form = dict[str, tuple[str, list[int]]]


def can_join(image: Image, others: Sequence[Image], max_numbers: int) -> bool:
    """Whether an image can go with others, which go together.

    Args:
        others: none can be joined by any image.
        max_numbers: of pixels that several images may have together; 0 is that each goes alone.
    """
    if not others:
        return True
    if len(others) == MAX_IMAGES or form(image) != form(others[0]):
        return False
    return num_numbers(image) + sum(map(num_numbers, others)) <= max_numbers


def form(image: Image) -> Form:
    """Return what images have in common that can be joined: all but the first lengths of tensors.

    Those are how many tiles an image has, or patches.
    """
    return {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in image.tensors.items()}


def num_numbers(image: Image) -> int:
    """Return how many numbers its pixels are: those of its largest tensor."""
    return max(math.prod(tensor.shape) for tensor in image.tensors.values())
