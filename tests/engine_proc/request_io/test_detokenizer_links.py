"""A detokenizer that keeps up gets each step at once; others get several together, in order."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.board.board import Board, Seat
from headrace.board.fields import DetokenizerField
from headrace.engine_proc.request_io.detokenizer_links import MAX_BEHIND, MAX_HELD, DetokenizerLinks
from headrace.ipc.messages import StepOutput, ToDetokenizer
from headrace.ipc.sockets import Inbox, address

DEADLINE_MS = 120_000


class Rig:
    """The links to two detokenizers, played by their inboxes."""

    def __init__(self, run_dir: str) -> None:
        seats = [Seat("engine", 0), Seat("detokenizer", 0), Seat("detokenizer", 1)]
        self.board = Board.create(seats)
        self.inboxes: list[Inbox[ToDetokenizer]] = [
            Inbox(address(run_dir, "detokenizer", i), ToDetokenizer) for i in range(2)
        ]
        self.links = DetokenizerLinks.of_ring(run_dir, 2, self.board, self.board.slot("engine"))
        self._step = 0

    def step(self, detokenizer: int = 0) -> None:
        """Have a step bring the token that is its number, from 1."""
        self._step += 1
        output = StepOutput.of({}, [7], [1], [None])
        self.links.hold(detokenizer, output, self._step.to_bytes(4, "little"))
        self.links.send_ready()

    def heard(self, detokenizer: int = 0) -> int:
        """Return the token that a detokenizer is told next."""
        received = self.inboxes[detokenizer].receive(DEADLINE_MS)
        assert received is not None
        return int.from_bytes(received[1], "little")

    def has_come(self, detokenizer: int = 0) -> bool:
        """Whether there is more; what was sent together comes together."""
        return bool(self.inboxes[detokenizer]._unread)

    def handle(self, num_steps: int, detokenizer: int = 0) -> None:
        """Say that a detokenizer has handled steps."""
        self.board.slot("detokenizer", detokenizer).add(DetokenizerField.MESSAGES_TAKEN, num_steps)

    def close(self) -> None:
        self.links.close()
        for inbox in self.inboxes:
            inbox.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(str(tmp_path))
    yield made
    made.close()


def test_detokenizer_that_keeps_up_gets_single_steps(rig: Rig) -> None:
    for number in range(1, 4 * MAX_BEHIND):
        rig.step()
        assert rig.heard() == number
        assert not rig.has_come()
        rig.handle(1)


def test_slow_detokenizer_gets_steps_together(rig: Rig) -> None:
    for _ in range(MAX_BEHIND + 3):
        rig.step()
    assert [rig.heard() for _ in range(MAX_BEHIND)] == list(range(1, MAX_BEHIND + 1))
    rig.handle(MAX_BEHIND)
    rig.step()
    first = MAX_BEHIND + 1
    assert rig.heard() == first
    assert rig.has_come()
    assert [rig.heard() for _ in range(3)] == [first + 1, first + 2, first + 3]


def test_slow_detokenizer_delays_no_other(rig: Rig) -> None:
    for _ in range(MAX_BEHIND + 1):
        rig.step(detokenizer=0)
    rig.step(detokenizer=1)
    assert rig.heard(detokenizer=1) == MAX_BEHIND + 2


def test_so_much_is_held_and_no_more(rig: Rig) -> None:
    for _ in range(MAX_BEHIND + MAX_HELD):
        rig.step()
    heard = [rig.heard() for _ in range(MAX_BEHIND + MAX_HELD)]
    assert heard == list(range(1, MAX_BEHIND + MAX_HELD + 1))


def test_what_is_held_goes_when_there_is_no_other_work(rig: Rig) -> None:
    for _ in range(MAX_BEHIND + 1):
        rig.step()
    rig.links.flush()
    assert [rig.heard() for _ in range(MAX_BEHIND + 1)] == list(range(1, MAX_BEHIND + 2))
