"""What one process asks for on the board, and another takes."""

from headrace.board.admin_requests import PROFILE, STOP, SUPERVISED, WISHES, AdminRequests, wish
from headrace.board.board import Board, Seat


def test_each_wish_is_taken_once_whoever_has_it() -> None:
    board = Board.create([Seat("frontend", 0), Seat("frontend", 1), Seat("engine", 0)])
    first, second = board.of("frontend")
    wishes, profiles = AdminRequests(board), AdminRequests(board, PROFILE)
    assert wishes.take() == []
    wish(first, "tokenizer")
    wish(second, "tokenizer")
    wish(second, STOP)
    assert wishes.take() == [STOP, "tokenizer"]
    assert wishes.take() == []
    for what in WISHES:
        wish(first, what)
    assert wishes.take() == list(SUPERVISED)
    assert profiles.take() == list(PROFILE)
