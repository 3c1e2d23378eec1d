"""Which seats have something placed for them."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField, EngineField, Seating
from headrace.engine_proc.placement.main import is_wanted, tend
from headrace.engine_proc.placement.placed_engine import EngineStarted, PlacedEngine
from headrace.runtime.placed_address import PlacedAddress


@pytest.mark.parametrize(
    ("seating", "state", "expected"),
    [
        (Seating.SEATED, State.ABSENT, True),
        (Seating.LEAVING, State.READY, True),
        (Seating.VACANT, State.READY, True),  # it has been told to end
        (Seating.VACANT, State.DEAD, True),  # another one may follow
        (Seating.VACANT, State.ABSENT, False),
    ],
)
def test_an_engine_is_placed_until_it_has_left(
    seating: Seating, state: State, expected: bool
) -> None:
    slot = Board.create([Seat("engine", 0)]).slot("engine")
    slot[EngineField.SEATING], slot[CommonField.STATE] = seating, state
    assert is_wanted(slot) == expected


def test_a_stage_is_always_placed() -> None:
    assert is_wanted(Board.create([Seat("worker", 1)]).slot("worker", 1))


def test_an_engine_whose_address_is_withdrawn_is_placed_anew(tmp_path: Path) -> None:
    """Its room stays its own."""
    slot = Board.create([Seat("engine", 0)]).slot("engine")
    address = PlacedAddress(str(tmp_path), "engine 0")
    cluster = Mock()
    cluster.poll.side_effect = [EngineStarted("tcp://node:1"), None, EngineStarted("tcp://node:2")]
    engine = PlacedEngine("engine 0", cluster, address.write, lambda: True)

    def look() -> list[str]:
        """Return what the cluster is asked at the next look, but for news."""
        cluster.reset_mock()
        tend(engine, slot, address)
        return [name for name, *_ in cluster.method_calls if name != "poll"]

    assert [look() for _ in range(3)] == [["start"], ["watch"], []]
    address.write(None)
    assert [look() for _ in range(3)] == [["end"], ["start"], ["watch"]]
    assert address.read() == "tcp://node:2"
