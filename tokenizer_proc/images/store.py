"""Prepared images in this process's region of the arena, where they wait for the engine.

An image that the engine is done with stays until its room is needed, so that it need not be
prepared again. Without room, a request waits for the engine.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.ipc.arena import Region
from headrace.ipc.messages import Tensor
from headrace.tokenizer_proc.images.processor import Prepared


class NeverFits(Exception):
    """There is no room, and waiting would not help; the text has the bytes needed and available.

    Without other images of the same request, there may be room.
    """


@dataclass(frozen=True, eq=False)
class Stored:
    """An image in the arena."""

    key: bytes
    text: str
    grid: list[int]
    tensors: Mapping[str, Tensor]  # the generations are those of when it was stored


class ImageStore:
    """The images of one region, those wanted least lately first."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._images: OrderedDict[tuple[int, bytes], Stored] = OrderedDict()
        self._num_resets = 0  # part of the keys: images of before are not found

    @property
    def num_bytes(self) -> int:
        """Size of the images, bytes."""
        return self._size(self._images.values())

    def sent_bytes(self) -> int:
        """Return how many of these the engine is not done with."""
        return self._size([stored for stored in self._images.values() if self._is_sent(stored)])

    def find(self, key: bytes) -> Stored | None:
        """Return an image that is here."""
        found = self._images.get((self._num_resets, key))
        if found is not None:
            self._images.move_to_end((self._num_resets, key))
        return found

    def put(
        self, key: bytes, prepared: Prepared, beside: Collection[Stored], wait: Callable[[], None]
    ) -> Stored:
        """Store an image, as soon as there is room; none of those `beside` it makes any.

        Args:
            wait: returns after a moment in which the engine may be done with something; where it
                raises, nothing is stored.

        Raises:
            NeverFits: there is none, and the engine is done with all others.
        """
        arrays = prepared.tensors
        places = self._places([array.nbytes for array in arrays.values()], beside, wait)
        tensors = {}
        for (name, array), place in zip(arrays.items(), places, strict=True):
            self._write(place, array)
            dtype = array.dtype.str.lstrip("<|")
            generation = self._region.generation(place)
            tensors[name] = Tensor(place, generation, dtype, list(array.shape))
        stored = self._images[self._num_resets, key] = Stored(
            key, prepared.text, prepared.grid, tensors
        )
        return stored

    def send(self, stored: Stored) -> dict[str, Tensor]:
        """Count an image as sent once more; return its tensors as they are now."""
        tensors = {}
        for name, tensor in stored.tensors.items():
            self._region.send(tensor.offset)
            generation = self._region.generation(tensor.offset)
            tensors[name] = Tensor(tensor.offset, generation, tensor.dtype, tensor.shape)
        return tensors

    def take_back(self, tensors: Iterable[Tensor]) -> None:
        """Count an image as sent once less: its request is refused."""
        for tensor in tensors:
            self._region.take_back(tensor)

    def clear(self) -> None:
        """Give up all that the engine is done with."""
        while self._give_up_one(beside=()):
            pass

    def forget(self) -> None:
        """Find none of the images from now on.

        They keep their room until it is needed: a request may be about to send one.
        """
        self._num_resets += 1

    def has(self, stored: Stored) -> bool:
        """Whether an image is still here."""
        return stored in self._images.values()

    def _write(self, place: int, array: NDArray[Any]) -> None:
        view = np.frombuffer(self._region.view(place), np.uint8)[: array.nbytes]
        view[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def _places(
        self, sizes: list[int], beside: Collection[Stored], wait: Callable[[], None]
    ) -> list[int]:
        """Return places of these sizes, all or none; wait until there are some."""
        while (found := self._region.allocate_all(sizes)) is None:
            if self._give_up_one(beside):
                continue
            if not any(self._is_sent(stored) for stored in self._images.values()):
                raise NeverFits(
                    f"{sum(sizes) + self._size(beside)} bytes once they are prepared, and there is "
                    f"room for {self._region.max_bytes} (--image-memory-bytes)"
                )
            wait()
        return found

    def _give_up_one(self, beside: Collection[Stored]) -> bool:
        """Make room by dropping an image that is not in use; return whether there was one."""
        for key, stored in self._images.items():
            if stored not in beside and not self._is_sent(stored):
                del self._images[key]
                for tensor in stored.tensors.values():
                    self._region.free(tensor.offset)
                return True
        return False

    def _is_sent(self, stored: Stored) -> bool:
        """Whether the engine is not done with an image."""
        return any(self._region.num_sent(tensor.offset) for tensor in stored.tensors.values())

    def _size(self, images: Collection[Stored]) -> int:
        return sum(t.num_bytes for stored in images for t in stored.tensors.values())
