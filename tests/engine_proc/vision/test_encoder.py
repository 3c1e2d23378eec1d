"""Embeddings are written to their rows; images without one are reported."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.engine_proc.shm.embedding_area import EmbeddingArea
from headrace.engine_proc.vision.embedding_store import EmbeddingStore
from headrace.engine_proc.vision.encoder import Floats, Tensors, encode
from headrace.ipc.arena import Arena, Region
from headrace.ipc.messages import Tensor
from headrace.ipc.worker_messages import Encode, Encoded

ROW_SIZE = 3


class Repeats:
    """Makes rows of the pixels' sum; raises where a picture has a pixel that is negative."""

    def __init__(self, num_rows: int = 2) -> None:
        self.num_rows = num_rows
        self.max_images = 10
        self.is_broken = False
        self.calls: list[int] = []  # images of each
        self.after_reading: Any = lambda: None

    def encode(self, images: Sequence[Tensors]) -> list[Floats]:
        self.after_reading()
        self.calls.append(len(images))
        if len(images) > self.max_images:
            raise MemoryError(f"no room for {len(images)}")
        if any(image["pixels"].min() < 0 for image in images):
            raise ValueError("a negative pixel")
        size = (self.num_rows, ROW_SIZE)
        return [np.full(size, image["pixels"].sum(), np.float32) for image in images]

    def check(self) -> None:
        if self.is_broken:
            raise RuntimeError("an illegal memory access")


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

    def encode(
        self,
        images: list[dict[str, Tensor]],
        rows: list[list[int]],
        store: EmbeddingStore | None = None,
    ) -> Encoded:
        keys = [str(place).encode() for place in range(len(images))]
        message = Encode(images, [np.array(own, np.int32).tobytes() for own in rows], keys)
        return encode(message, self.encoder, self.arena, self.area.rows, store)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_rows_lie_where_they_were_wanted(rig: Rig) -> None:
    images = [rig.put(1, 2), rig.put(5)]
    assert rig.encode(images, [[6, 1], [0, 3]]) == Encoded()
    assert rig.area.rows[:, 0].tolist() == [5, 3, 0, 5, 0, 0, 3, 0]
    assert rig.encoder.calls == [2]


def test_rows_of_a_store_need_no_encoder(rig: Rig, tmp_path: Path) -> None:
    store = EmbeddingStore.open(str(tmp_path), 1 << 20, "f" * 32, "model", ROW_SIZE)
    assert rig.encode([rig.put(1, 2)], [[0, 1]], store) == Encoded()
    images = [rig.put(1, 2), rig.put(5)]
    assert rig.encode(images, [[6, 4], [2, 3]], store) == Encoded(num_stored=1)
    assert rig.area.rows[:, 0].tolist() == [3, 3, 5, 5, 3, 0, 3, 0]
    assert rig.encoder.calls == [1, 1]


def test_both_ends_of_the_area_are_the_same_memory(rig: Rig) -> None:
    rig.encode([rig.put(7)], [[2, 3]])
    assert EmbeddingArea(rig.area.fd, ROW_SIZE).rows[2].tolist() == [7, 7, 7]


def test_an_image_that_raises_does_so_alone(rig: Rig) -> None:
    images = [rig.put(1), rig.put(-1), rig.put(2)]
    answer = rig.encode(images, [[0, 1], [2, 3], [4, 5]])
    assert answer.gone == []
    assert list(answer.failed) == [1] and "a negative pixel" in answer.failed[1]
    assert rig.area.rows[:, 0].tolist() == [1, 1, 0, 0, 2, 2, 0, 0]
    assert rig.encoder.calls == [3, 1, 1, 1]


def test_images_without_memory_together_are_encoded_one_by_one(rig: Rig) -> None:
    rig.encoder.max_images = 1
    images = [rig.put(1), rig.put(2)]
    assert rig.encode(images, [[0, 1], [2, 3]]) == Encoded()
    assert rig.area.rows[:, 0].tolist() == [1, 1, 2, 2, 0, 0, 0, 0]
    assert rig.encoder.calls == [2, 1, 1]


def test_too_few_rows_are_encoded_again_image_by_image(rig: Rig) -> None:
    whole = rig.encoder.encode
    rig.encoder.encode = lambda images: whole(images)[:1]  # type: ignore[method-assign]
    images = [rig.put(1), rig.put(2)]
    assert rig.encode(images, [[0, 1], [2, 3]]) == Encoded()
    assert rig.encoder.calls == [2, 1, 1]


@pytest.mark.parametrize("images", [[-1], [1, -1]])
def test_a_device_that_has_failed_for_good_fails_no_image(rig: Rig, images: list[int]) -> None:
    rig.encoder.is_broken = True
    rows = [[2 * place, 2 * place + 1] for place in range(len(images))]
    with pytest.raises(RuntimeError, match="illegal"):
        rig.encode([rig.put(image) for image in images], rows)


def test_an_image_of_other_rows_than_announced_fails(rig: Rig) -> None:
    answer = rig.encode([rig.put(1)], [[0, 1, 2]])
    assert answer.failed == {0: "an image became [2, 3] numbers, not [3, 3]"}
    assert not rig.area.rows.any()


def test_what_is_not_in_the_arena_any_more_is_gone(rig: Rig) -> None:
    old, new = rig.put(1), rig.put(2)
    rig.region.free(old["pixels"].offset)
    assert rig.encode([old, new], [[0, 1], [2, 3]]) == Encoded([0])
    assert rig.area.rows[:, 0].tolist() == [0, 0, 2, 2, 0, 0, 0, 0]
    rig.region.free(new["pixels"].offset)
    assert rig.encode([new], [[0, 1]]) == Encoded([0])
    assert rig.encoder.calls == [1]


def test_what_goes_after_it_was_read_is_encoded(rig: Rig) -> None:
    image = rig.put(1)
    rig.encoder.after_reading = lambda: rig.region.free(image["pixels"].offset)
    assert rig.encode([image], [[0, 1]]) == Encoded()
    assert rig.area.rows[0, 0] == 1
