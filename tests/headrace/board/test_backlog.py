"""Backlogs of processes, and their correction after a death."""

import pytest

from headrace.board.backlog import detokenizer_backlog, frontend_backlog, tokenizer_backlog
from headrace.board.board import MESSAGES_SENT, Board, Seat, Slot
from headrace.board.fields import FrontendField, Seating, TokenizerField

SEATS = [Seat(role, i) for role in ("frontend", "tokenizer", "detokenizer") for i in range(2)]


def test_tokenizer_backlog_is_sent_by_all_frontends_less_handled() -> None:
    board = Board.create(SEATS)
    for slot in board.of("frontend"):
        slot.add(FrontendField.FORWARDED_BYTES + 1, 50)
    board.slot("tokenizer", 1).add(TokenizerField.HANDLED_BYTES, 30)
    assert [tokenizer_backlog(board, index)() for index in range(2)] == [0, 70]


def test_a_frontend_has_what_tokenizers_and_detokenizers_sent() -> None:
    board = Board.create(SEATS)
    board.slot("tokenizer", 0).add(MESSAGES_SENT, 2)
    board.slot("detokenizer", 1).add(MESSAGES_SENT, 3)
    board.slot("frontend").add(FrontendField.MESSAGES_TAKEN)
    assert [frontend_backlog(board, index)() for index in range(2)] == [4, 0]


def test_what_was_lost_is_forgotten_when_nothing_is_on_its_way() -> None:
    board = Board.create([Seat("engine", 0), Seat("detokenizer", 0)])
    backlog = detokenizer_backlog(board, 0)
    board.slot("engine").add(MESSAGES_SENT, 5)
    assert backlog() == 5
    backlog.settle()
    assert backlog() == 0
    board.slot("engine").add(MESSAGES_SENT)
    assert backlog() == 1


def test_steps_of_an_engine_that_has_left_count() -> None:
    board = Board.create([Seat("engine", 0), Seat("engine", 1), Seat("detokenizer", 0)])
    backlog, second = detokenizer_backlog(board, 0), board.slot("engine", 1)
    second.add(MESSAGES_SENT, 5)
    assert backlog() == 5
    board.seat(second, Seating.VACANT)
    assert backlog() == 5
    board.seat(second, Seating.SEATED)
    second.add(MESSAGES_SENT)
    assert backlog() == 6


def test_seats_that_are_vacant_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board.create([Seat("engine", 0), Seat("engine", 1), Seat("detokenizer", 0)])
    board.seat(board.slot("engine", 1), Seating.VACANT)
    backlog, looks, look = detokenizer_backlog(board, 0), list[Seat](), Slot.__getitem__

    def note(slot: Slot, field: int) -> int:
        looks.append(slot.seat)
        return look(slot, field)

    assert backlog() == 0
    monkeypatch.setattr(Slot, "__getitem__", note)
    assert backlog() == 0
    assert Seat("engine", 1) not in looks


def test_what_was_sent_since_the_last_look_may_still_come() -> None:
    board = Board.create([Seat("frontend", 0), Seat("tokenizer", 0)])
    backlog, sent = tokenizer_backlog(board, 0), FrontendField.FORWARDED_BYTES
    backlog.settle_idle()
    board.slot("frontend").add(sent, 5)  # while the receiver stands still, waiting for it
    backlog.settle_idle()
    assert backlog() == 5
    board.slot("tokenizer").add(TokenizerField.HANDLED_BYTES, 5)
    backlog.settle_idle()
    assert backlog() == 0
    board.slot("frontend").add(sent, 7)  # and is lost
    backlog.settle_idle()
    assert backlog() == 7
    backlog.settle_idle()
    assert backlog() == 0
