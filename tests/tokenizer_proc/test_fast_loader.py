"""When a tokenizer loads what makes encoding fast."""

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import EngineField
from headrace.tokenizer_proc.fast_loader import LATEST_S, POLL_INTERVAL_S, QUIET_S, FastLoader


class Rig:
    """A loader, the board, and the time."""

    def __init__(self) -> None:
        self.board = Board.create([Seat("engine", 0), Seat("tokenizer", 0)])
        self.engine = self.board.slot("engine")
        for slot in self.board.slots:
            slot.enter(State.STARTING)
        self.num_loads = 0
        self.now = 5.0
        self.loader = FastLoader(self.load, self.board, lambda: self.now)

    def load(self) -> None:
        """Count."""
        self.num_loads += 1

    def serve(self) -> None:
        """Have all processes serve."""
        for slot in self.board.slots:
            slot.enter(State.READY)

    def loads(self, is_busy: bool = False) -> int:
        """Return how often it has loaded after another look."""
        self.loader.poll(is_busy)
        if self.loader.thread is not None:
            self.loader.thread.join()
        return self.num_loads


def test_a_tokenizer_loads_once_when_the_server_has_rested() -> None:
    rig = Rig()
    assert rig.loads() == 0
    rig.serve()
    assert rig.loads() == 0
    rig.now += QUIET_S
    assert rig.loads() == 1
    assert rig.loads() == 1


def test_a_tokenizer_loads_when_no_sequence_needs_the_cores() -> None:
    rig = Rig()
    rig.serve()
    assert rig.loads(is_busy=True) == 0
    rig.engine[EngineField.RUNNING] = 1
    rig.now += QUIET_S
    assert rig.loads() == 0
    rig.engine[EngineField.RUNNING] = 0
    rig.now += QUIET_S / 2
    assert rig.loads() == 0
    rig.now += QUIET_S / 2
    assert rig.loads() == 1


def test_a_tokenizer_that_is_never_idle_loads_at_last() -> None:
    rig = Rig()
    rig.serve()
    rig.engine[EngineField.WAITING] = 1
    assert rig.loads(is_busy=True) == 0
    rig.now += LATEST_S
    assert rig.loads(is_busy=True) == 1


def test_a_busy_tokenizer_seldom_looks_at_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, looks = Rig(), list[float]()

    def look() -> list[Seat]:
        looks.append(rig.now)
        return []

    monkeypatch.setattr(rig.board, "unhealthy", look)
    rig.serve()
    for _ in range(100):
        rig.loads(is_busy=True)
    assert looks == [rig.now]
    rig.now += POLL_INTERVAL_S
    rig.loads(is_busy=True)
    assert len(looks) == 2
