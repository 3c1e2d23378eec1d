"""Images being fetched: waiting requests get them, aborted requests are forgotten."""

from typing import Any

import pytest

from headrace.board.board import Board, Seat
from headrace.ipc.arena import Arena
from headrace.ipc.fetcher_messages import Fetch, Fetched, Forget
from headrace.ipc.messages import Tensor
from headrace.tokenizer_proc.images.fetches import File, ImageFetches
from headrace.tokenizer_proc.images.sources import Remote
from headrace.tokenizer_proc.jobs.stages import Check

FILE = b"an image"


class Rig:
    """One process's fetches, and a fetcher that is played."""

    def __init__(self) -> None:
        self.arena = Arena.create(1, 1 << 16)
        self.region = self.arena.region(0)
        self.board = Board.create([Seat("fetcher", 0)])
        self.asked: list[Fetch | Forget] = []
        self.answers: list[Fetched] = []
        link: Any = self
        self.fetches = ImageFetches(2, link, link, self.arena, self.board)

    def send(self, message: Fetch | Forget) -> None:
        self.asked.append(message)

    def receive(self, _timeout_ms: int) -> tuple[Fetched, bytes] | None:
        return (self.answers.pop(0), b"") if self.answers else None

    def answer(self, fetch: Fetch | Forget) -> int:
        """Answer with a file; return its place."""
        place = self.region.allocate(len(FILE))
        assert place is not None
        self.region.view(place)[: len(FILE)] = FILE
        self.region.send(place)
        tensor = Tensor(place, self.region.generation(place), "u1", [len(FILE)])
        self.answers.append(Fetched(fetch.id, [tensor], ["image/png"]))
        self.fetches.look()
        return place


@pytest.fixture
def rig() -> Rig:
    return Rig()


def remote() -> Remote:
    return Remote("http://x/", "messages[0].content[0].image_url")


def test_files_come_to_the_waiting_request(rig: Rig) -> None:
    stages = rig.fetches.files([remote()])
    check = next(stages)
    assert isinstance(check, Check)
    assert check.found is None
    place = rig.answer(rig.asked[0])
    assert rig.region.num_sent(place) == 0, "it has been read"
    with pytest.raises(StopIteration) as end:
        stages.send([])
    assert end.value.value == [File("image/png", FILE)]
    assert len(rig.asked) == 1


def test_fetches_of_disconnected_clients_are_forgotten(rig: Rig) -> None:
    stages = rig.fetches.files([remote()])
    next(stages)
    stages.close()
    fetch, forget = rig.asked
    assert isinstance(forget, Forget)
    assert forget.id == fetch.id
    place = rig.answer(fetch)  # which was on its way
    assert rig.region.num_sent(place) == 0
    assert len(rig.asked) == 2
