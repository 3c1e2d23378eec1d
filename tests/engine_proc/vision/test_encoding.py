"""Embeddings come to be where they were wanted; who has none is told apart from who has."""

from typing import Any

import numpy as np
import pytest

from headrace.arena import Arena, Region
from headrace.engine_proc.embedding_area import EmbeddingArea
from headrace.engine_proc.vision.encoding import Floats, Tensors, encode
from headrace.messages import Encode, Encoded, Tensor

ROW_SIZE = 3


class Repeats:
    """Makes rows of the pixels' sum; raises where a picture has a pixel that is negative."""

    def __init__(self, num_rows: int = 2) -> None:
        self.num_rows = num_rows
        self.after_reading: Any = lambda: None

    def encode(self, image: Tensors) -> Floats:
        self.after_reading()
        if image["pixels"].min() < 0:
            raise ValueError("a negative pixel")
        return np.full((self.num_rows, ROW_SIZE), image["pixels"].sum(), np.float32)


class Rig:
    """An arena with one region, and an area of embeddings."""

    def __init__(self) -> None:
        self.arena = Arena.create(1, 1 << 16)
        self.region: Region = self.arena.region(0)
        self.area = EmbeddingArea.create(8, ROW_SIZE)
        self.encoder = Repeats()

    def put(self, *pixels: float) -> dict[str, Tensor]:
        """Put an image into the arena."""
        data = np.array(pixels, np.float32)
        place = self.region.allocate(data.nbytes)
        assert place is not None
        self.region.view(place)[: data.nbytes] = data.tobytes()
        self.region.send(place)
        return {"pixels": Tensor(place, self.region.generation(place), "f4", [1, len(pixels)])}

    def encode(self, images: list[dict[str, Tensor]], rows: list[list[int]]) -> Encoded:
        message = Encode(images, [np.array(own, np.int32).tobytes() for own in rows])
        return encode(message, self.encoder, self.arena, self.area.rows)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_rows_lie_where_they_were_wanted(rig: Rig) -> None:
    images = [rig.put(1, 2), rig.put(5)]
    assert rig.encode(images, [[6, 1], [0, 3]]) == Encoded()
    assert rig.area.rows[:, 0].tolist() == [5, 3, 0, 5, 0, 0, 3, 0]


def test_both_ends_of_the_area_are_the_same_memory(rig: Rig) -> None:
    rig.encode([rig.put(7)], [[2, 3]])
    assert EmbeddingArea(rig.area.fd, ROW_SIZE).rows[2].tolist() == [7, 7, 7]


def test_an_image_that_raises_does_so_alone(rig: Rig) -> None:
    images = [rig.put(1), rig.put(-1), rig.put(2)]
    answer = rig.encode(images, [[0, 1], [2, 3], [4, 5]])
    assert answer.gone == []
    assert list(answer.failed) == [1] and "a negative pixel" in answer.failed[1]
    assert rig.area.rows[:, 0].tolist() == [1, 1, 0, 0, 2, 2, 0, 0]


def test_an_image_of_other_rows_than_were_told_fails(rig: Rig) -> None:
    answer = rig.encode([rig.put(1)], [[0, 1, 2]])
    assert answer.failed == {0: "an image became [2, 3] numbers, not [3, 3]"}
    assert not rig.area.rows.any()


def test_what_is_not_in_the_arena_any_more_is_gone(rig: Rig) -> None:
    old, new = rig.put(1), rig.put(2)
    rig.region.free(old["pixels"].offset)
    assert rig.encode([old, new], [[0, 1], [2, 3]]) == Encoded([0])
    assert rig.area.rows[:, 0].tolist() == [0, 0, 2, 2, 0, 0, 0, 0]


def test_what_goes_after_it_was_read_is_encoded(rig: Rig) -> None:
    image = rig.put(1)
    rig.encoder.after_reading = lambda: rig.region.free(image["pixels"].offset)
    assert rig.encode([image], [[0, 1]]) == Encoded()
    assert rig.area.rows[0, 0] == 1
