"""Which seats have something placed for them."""

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField, EngineField, Seating
from headrace.engine_proc.placement.main import is_wanted


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
