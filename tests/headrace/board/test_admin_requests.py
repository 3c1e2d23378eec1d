"""What one process asks for on the board, and another takes."""

from headrace.board.admin_requests import (
    PROFILE,
    STOP,
    SUPERVISED,
    WISHES,
    AdminRequests,
    admin_request,
)
from headrace.board.board import Board, Seat


def test_each_admin_request_is_taken_once() -> None:
    board = Board.create([Seat("frontend", 0), Seat("frontend", 1), Seat("engine", 0)])
    first, second = board.of("frontend")
    admin_requests, profiles = AdminRequests(board), AdminRequests(board, PROFILE)
    assert admin_requests.take() == []
    admin_request(first, "tokenizer")
    admin_request(second, "tokenizer")
    admin_request(second, STOP)
    assert admin_requests.take() == [STOP, "tokenizer"]
    assert admin_requests.take() == []
    for what in WISHES:
        admin_request(first, what)
    assert admin_requests.take() == list(SUPERVISED)
    assert profiles.take() == list(PROFILE)
