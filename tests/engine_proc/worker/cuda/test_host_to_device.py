"""Numbers are sent from memory that is not written to while they are on their way."""

import ctypes
import gc
from typing import Any

import pytest
import torch
from random_decoders import SPEC, batch, with_images

from headrace.engine_proc.worker.cuda.host_to_device import ArraySender
from headrace.engine_proc.worker.cuda.pinned_memory import pinned
from headrace.engine_proc.worker.cuda.step_inputs import image_inputs


class SaidEvent:
    """Says what is done with it."""

    def __init__(self, said: list[tuple[str, "SaidEvent"]]) -> None:
        self._said = said

    def record(self) -> None:
        self._said.append(("sent", self))

    def synchronize(self) -> None:
        self._said.append(("wait", self))


def test_a_piece_is_written_to_again_when_it_has_been_sent() -> None:
    said: list[tuple[str, SaidEvent]] = []
    sender = ArraySender(3, torch.device("cpu"), lambda: SaidEvent(said))
    for number in range(4):
        sender.begin()[:2] = number
        sender.send(2)
        assert sender.received.tolist() == [number, number, 0]
    verbs = [verb for verb, _ in said]
    events = [event for _, event in said]
    assert verbs == ["wait", "sent"] * 4
    assert events[0::2] == events[1::2]
    assert events[0] is events[4] is not events[2]
    assert events[2] is events[6]


def test_no_copy_to_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of images, and of what tokens see, which a step without a graph has."""
    pinned_ones: list[torch.Tensor] = []
    copied: list[tuple[torch.Tensor, torch.device, bool]] = []

    def pin_memory(numbers: torch.Tensor) -> torch.Tensor:
        pinned_ones.append(numbers.clone())
        return pinned_ones[-1]

    def to(numbers: torch.Tensor, device: Any, non_blocking: bool = False) -> torch.Tensor:
        copied.append((numbers, device, non_blocking))
        return numbers

    step = with_images(batch([(0, 0, 23)]), SPEC)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    on_host = image_inputs(step, cpu, torch.float32, 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", pin_memory)
        patch.setattr(torch.Tensor, "to", to)
        on_gpu = image_inputs(step, gpu, torch.float32, 1)
    copied = [copy for copy in copied if copy[1] == gpu]
    assert [id(numbers) for numbers, _, _ in copied] == [id(numbers) for numbers in pinned_ones]
    assert [is_asynchronous for _, _, is_asynchronous in copied] == [True] * 3
    assert on_host is not None and on_gpu is not None
    assert step.last_seen is not None and on_host.last_seen is not None
    assert on_host.last_seen.data_ptr() != step.last_seen.ctypes.data
    assert on_gpu.last_seen is not None and torch.equal(on_gpu.last_seen, on_host.last_seen)


class Pages:
    """Memory that a driver has pinned, as it was left by others."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}

    def allocate_host(self, num_bytes: int) -> int:
        block = ctypes.create_string_buffer(b"\xff" * num_bytes, num_bytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free_host(self, address: int) -> None:
        del self.blocks[address]


def test_sent_array_stays_pinned_until_released() -> None:
    pages = Pages()
    sender = ArraySender(3, torch.device("cpu"), make_room=lambda num: pinned(num, pages))
    assert [len(block) for block in pages.blocks.values()] == [12, 12]
    assert not any(any(block.raw) for block in pages.blocks.values())
    numbers = sender.begin()
    numbers[:] = [1, 2, 3]
    assert numbers.tobytes() in [block.raw for block in pages.blocks.values()]
    sender.send(3)
    assert sender.received.tolist() == [1, 2, 3]
    del sender
    gc.collect()
    assert len(pages.blocks) == 1  # of the numbers
    del numbers
    gc.collect()
    assert not pages.blocks


def test_a_gpu_is_sent_to_from_pinned_memory(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("there is no GPU")
    sender = ArraySender(1 << 20, device)
    for number in range(4):
        sender.begin()[:] = number
        sender.send(1 << 20)
        assert sender.received.unique().tolist() == [number]
    assert all(piece.is_pinned() for piece, _ in sender._pieces)
