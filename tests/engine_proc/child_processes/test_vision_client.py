"""The engine waits for its vision worker where that may take memory of a GPU, and nowhere else."""

import os
from array import array
from typing import Any

import pytest
from engine_configs import engine_config

from headrace.board.board import Board, Seat
from headrace.engine_proc.child_processes import vision_client as module
from headrace.engine_proc.child_processes.child_process import WorkerDied
from headrace.engine_proc.child_processes.vision_client import VisionClient
from headrace.engine_proc.images.encoder_cache import EncoderCache
from headrace.engine_proc.images.encoder_queue import EncoderQueue
from headrace.engine_proc.sequence.sequence import Sequence
from headrace.engine_proc.shm.embedding_area import EmbeddingArea
from headrace.exit_status import ExitStatus
from headrace.ipc.arena import Arena
from headrace.ipc.messages import GenerateRequest, Image, Sampling, Tensor, request_id
from headrace.ipc.worker_messages import Encode, Encoded, TowerReady
from headrace.runtime.process import Context

IMAGE_TOKEN = 6
Said = Encoded | TowerReady | WorkerDied | None


class Told:
    """A vision worker, and its likes after it, that say one thing after the other."""

    is_ready = True

    def __init__(self, *said: Said) -> None:
        self.said = list(said)
        self.asked: list[Encode] = []
        self.num_started = 0

    def __call__(self, *_: Any) -> "Told":
        self.num_started += 1
        return self

    def receive(self, _timeout_s: float) -> Said:
        return None if isinstance(self.said[0], WorkerDied) else self.said.pop(0)

    def check(self) -> None:
        if self.said and isinstance(self.said[0], WorkerDied):
            raise self.said.pop(0)  # type: ignore[misc]

    def send(self, message: Encode) -> None:
        self.asked.append(message)

    def make_crash_report(self, *_: Any) -> None: ...

    def stop(self) -> None: ...


def started(monkeypatch: pytest.MonkeyPatch, told: Told, **flags: Any) -> VisionClient:
    """Return a vision worker whose process is told what to say, on a machine that may have GPUs."""
    monkeypatch.setattr(module, "ChildProcess", told)
    monkeypatch.setattr(module, "has_gpus", lambda: True)
    seats = [Seat("engine", 0), Seat("vision", 0)]
    board = Board.create(seats)
    context = Context(seats[0], board, board.slot("engine"), "error", os.getpid())
    config = engine_config(image_row_size=4, **flags)
    return VisionClient(config, context, Arena.create(1, 4096), EmbeddingArea.create(64, 4))


def some_images(num: int) -> EncoderQueue:
    """Return images that wait, each of another request."""
    images = EncoderQueue(EncoderCache(64), IMAGE_TOKEN, lambda _: None)
    for number in range(num):
        image = Image(bytes([number]), 0, 1, 1, {"pixels": Tensor(0, 1, "f4", [1, 10])})
        id = request_id(0, number)
        request = GenerateRequest(id, 0, 1, Sampling(), [], b"", images=[image])
        images.enter(Sequence.of(request, array("I", [IMAGE_TOKEN]).tobytes()))
    return images


def test_what_a_tower_has_of_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = WorkerDied("killed")
    told = Told(None, killed, None, TowerReady(1, 5 << 30))
    assert started(monkeypatch, told).wait_gpu_bytes(some_images(0)) == 5 << 30
    assert told.num_started == 2


def test_a_tower_without_room_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(None, WorkerDied("no room", code=ExitStatus.BAD_FLAGS))
    told.is_ready = False
    with pytest.raises(WorkerDied, match="no room"):
        started(monkeypatch, told).wait_gpu_bytes(some_images(0))


def test_without_a_gpu_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, Told(), device="cpu").wait_gpu_bytes(some_images(0)) == 0
    vision = started(monkeypatch, Told())
    monkeypatch.setattr(module, "has_gpus", lambda: False)
    assert vision.wait_gpu_bytes(some_images(0)) == 0


def test_ready_vision_worker_is_asked_for_as_many_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died = WorkerDied("killed")
    told = Told(None, TowerReady(20), Encoded(), died, TowerReady(0), Encoded())
    vision, images = started(monkeypatch, told), some_images(4)
    for _ in range(2):
        vision.take(images)
        vision.ask(images)
    assert [len(asked.images) for asked in told.asked] == [2]
    for _ in range(2):  # it answers and dies; no batch is sent before the next one is ready
        vision.take(images)
    vision.ask(images)
    assert len(told.asked) == 1
    for _ in range(3):
        vision.take(images)
        vision.ask(images)
    assert [len(asked.images) for asked in told.asked] == [2, 1, 1]
