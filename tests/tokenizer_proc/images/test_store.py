"""Images stay while a request needs them or their room is not needed; without room, it waits."""

from collections.abc import Callable

import numpy as np
import pytest

from headrace.ipc.arena import PAGE_BYTES, Arena
from headrace.ipc.messages import Tensor
from headrace.tokenizer_proc.images.processor import Prepared
from headrace.tokenizer_proc.images.store import ImageStore, NeverFits, Stored


class Rig:
    """A store of eight pages, and an engine that is done with something when it is waited for."""

    def __init__(self) -> None:
        self.arena = Arena.create(1, 8 * PAGE_BYTES)
        self.region = self.arena.region(0)
        assert self.region.max_bytes == 8 * PAGE_BYTES
        self.store = ImageStore(self.region)
        self.when_waiting: list[Callable[[], None]] = []

    def wait(self) -> None:
        self.when_waiting.pop(0)()

    def put(self, name: str, num_pages: int, beside: list[Stored] | None = None) -> Stored:
        pixels = np.full((num_pages, PAGE_BYTES // 4), ord(name), np.float32)
        return self.store.put(
            name.encode(), Prepared({"pixel_values": pixels}, name, []), beside or [], self.wait
        )

    def release(self, tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            self.arena.release(tensor)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_what_is_put_is_read_by_what_is_sent(rig: Rig) -> None:
    tensors = {
        "pixel_values": np.arange(12, dtype=np.float32).reshape(3, 4),
        "image_grid_thw": np.array([[1, 2, 3]]),
        "pixel_attention_mask": np.ones((2, 5), np.uint8),
    }
    sent = rig.store.send(rig.store.put(b"a", Prepared(tensors, "text", []), [], rig.wait))
    assert {name: tensor.dtype for name, tensor in sent.items()} == {
        "pixel_values": "f4",
        "image_grid_thw": "i8",
        "pixel_attention_mask": "u1",
    }
    for name, tensor in sent.items():
        read = np.frombuffer(rig.arena.read(tensor), tensor.dtype).reshape(tensor.shape)
        np.testing.assert_array_equal(read, tensors[name])


def test_forgotten_images_keep_their_room_until_it_is_needed(rig: Rig) -> None:
    used, about_to_be = rig.put("a", 4), rig.put("b", 3)
    sent = rig.store.send(used)
    rig.store.forget()
    assert rig.store.find(b"a") is None and rig.store.find(b"b") is None
    assert rig.store.has(used) and rig.store.has(about_to_be)
    later = rig.store.send(about_to_be)
    assert rig.arena.holds(later["pixel_values"])
    rig.release(later)
    again = rig.put("a", 4)
    assert rig.store.find(b"a") is again and not rig.store.has(about_to_be)
    rig.release(sent)
    rig.put("c", 4)
    assert not rig.store.has(used) and rig.store.has(again)


def test_an_image_is_found_until_its_room_is_needed(rig: Rig) -> None:
    first, second = rig.put("a", 4), rig.put("b", 3)
    assert rig.store.find(b"a") is first  # wanted again, after the other
    third = rig.put("c", 4)
    assert rig.store.find(b"b") is None and not rig.store.has(second)
    assert rig.store.find(b"a") is first
    assert rig.store.find(b"c") is third
    assert rig.store.num_bytes == 8 * PAGE_BYTES


def test_what_the_engine_needs_is_waited_for(rig: Rig) -> None:
    tensors = [rig.store.send(rig.put(name, 4)) for name in "ab"]
    assert rig.store.sent_bytes() == 8 * PAGE_BYTES
    rig.when_waiting = [lambda: None, lambda: rig.release(tensors[1])]
    rig.put("c", 4)
    assert not rig.when_waiting
    assert rig.store.find(b"a") and not rig.store.find(b"b")
    assert rig.store.sent_bytes() == 4 * PAGE_BYTES


def test_an_image_that_was_sent_twice_is_needed_twice(rig: Rig) -> None:
    stored = rig.put("a", 5)
    sent = [rig.store.send(stored), rig.store.send(stored)]
    rig.when_waiting = [lambda: rig.release(sent[0]), lambda: rig.release(sent[1])]
    rig.put("b", 5)
    assert not rig.when_waiting


def test_what_is_taken_back_makes_room(rig: Rig) -> None:
    stored = rig.put("a", 5)
    sent, refused = rig.store.send(stored), rig.store.send(stored)
    rig.store.take_back(refused.values())
    assert rig.store.sent_bytes() == 5 * PAGE_BYTES
    rig.release(sent)
    assert rig.store.sent_bytes() == 0
    before = rig.store.send(stored)
    rig.region.forget_sent()
    after = rig.store.send(stored)
    rig.store.take_back(before.values())
    assert rig.store.sent_bytes() == 5 * PAGE_BYTES, "the engine's death has counted the other"
    rig.store.take_back(after.values())
    assert rig.store.sent_bytes() == 0


def test_a_prompts_images_do_not_drive_each_other_out(rig: Rig) -> None:
    first, stranger = rig.put("a", 3), rig.put("b", 3)
    second = rig.put("c", 4, beside=[first])
    assert rig.store.has(first) and rig.store.has(second) and not rig.store.has(stranger)
    with pytest.raises(NeverFits, match=rf"{9 * PAGE_BYTES} bytes .* room for {8 * PAGE_BYTES} "):
        rig.put("d", 2, beside=[first, second])
    assert rig.store.has(first) and rig.store.has(second)
    rig.store.clear()
    assert rig.store.num_bytes == 0


def test_oversized_image_is_refused_when_the_engine_is_idle(rig: Rig) -> None:
    sent = rig.store.send(rig.put("a", 1))
    rig.when_waiting = [lambda: rig.release(sent)]
    with pytest.raises(NeverFits, match=f"{9 * PAGE_BYTES} bytes"):
        rig.put("b", 9)
    assert not rig.when_waiting and rig.store.num_bytes == 0


def test_all_tensors_of_an_image_are_there_or_none(rig: Rig) -> None:
    pair = {name: np.zeros(5 * PAGE_BYTES, np.uint8) for name in ("first", "second")}
    with pytest.raises(NeverFits):
        rig.store.put(b"a", Prepared(pair, "", []), [], rig.wait)
    assert rig.store.num_bytes == 0


def test_what_a_dead_engine_had_is_sent_anew(rig: Rig) -> None:
    stored = rig.put("a", 8)
    before = rig.store.send(stored)
    rig.when_waiting = [rig.region.forget_sent]
    rig.put("b", 4)
    assert not rig.arena.holds(before["pixel_values"])
    stored = rig.put("c", 4)
    rig.store.send(stored)
    rig.region.forget_sent()
    after = rig.store.send(stored)
    assert rig.arena.holds(after["pixel_values"])
    assert rig.store.sent_bytes() == 4 * PAGE_BYTES
    rig.release(after)
    assert rig.store.sent_bytes() == 0
