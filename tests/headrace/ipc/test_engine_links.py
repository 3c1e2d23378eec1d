"""Links to engines that come and go."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField, Seating
from headrace.ipc.engine_links import EngineLinks
from headrace.ipc.messages import Abort
from headrace.ipc.sockets import HIGH_WATER


@pytest.fixture
def board() -> Board:
    """A board of three engines; the second seat is vacant."""
    board = Board.create([Seat("engine", index) for index in range(3)])
    board.seat(board.slot("engine", 1), Seating.VACANT)
    return board


@pytest.fixture
def links(board: Board, tmp_path: Path) -> Iterator[EngineLinks]:
    made = EngineLinks(str(tmp_path), board)
    yield made
    made.close()


def test_engines_are_present_until_they_have_ended(board: Board, links: EngineLinks) -> None:
    assert links.present == [0, 2]
    slot = board.slot("engine", 2)
    slot.enter(State.READY)
    board.seat(slot, Seating.VACANT)
    assert links.present == [0, 2], "it still reads"
    slot[CommonField.STATE] = State.ABSENT
    board.note_seating()
    assert links.present == [0]


def test_seats_are_looked_at_after_a_change_alone(
    board: Board, links: EngineLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = list[int](), board.is_vacant
    monkeypatch.setattr(board, "is_vacant", lambda slot: looks.append(1) or look(slot))
    assert links.present == links.present == [0, 2]
    assert len(looks) == 3
    board.seat(board.slot("engine", 1), Seating.SEATED)
    assert links.present == links.present == [0, 1, 2]
    assert len(looks) == 6


def test_what_waits_for_an_engine_that_has_left_is_dropped(
    board: Board, links: EngineLinks
) -> None:
    slot = board.slot("engine", 2)
    while links[2].try_send(Abort(1)):
        pass  # no engine reads
    board.seat(slot, Seating.VACANT)
    assert links.present == [0]
    board.seat(slot, Seating.SEATED)
    assert links[2].try_send(Abort(2)), "a link that is full"


def test_a_link_made_after_an_engine_has_left_is_dropped(board: Board, links: EngineLinks) -> None:
    assert links.present == [0, 2]
    while links[1].try_send(Abort(1)):
        pass  # no engine is in the seat
    assert links.present == [0, 2]
    assert links[1].try_send(Abort(2)), "a link that is full"


def test_a_send_to_an_engine_that_leaves_does_not_wait_for_ever(
    board: Board, tmp_path: Path
) -> None:
    slot, waits = board.slot("engine", 2), list[int]()

    def on_wait() -> None:
        waits.append(1)
        if len(waits) == 2:
            board.seat(slot, Seating.VACANT)

    links = EngineLinks(str(tmp_path), board, on_wait)
    for number in range(HIGH_WATER + 1):  # the engine reads none
        links.send(2, [(Abort(number), b"")])
    assert len(waits) == 2
    links.close()
