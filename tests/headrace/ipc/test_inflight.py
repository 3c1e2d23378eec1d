"""What is sent again, and what it says of itself then."""

import pytest

from headrace.board.board import Seat
from headrace.ipc.inflight import MAX_BLAMED, InflightRequest
from headrace.ipc.messages import ENDED, HttpRequest, request_id

FIRST, SECOND, THIRD = (request_id(1, counter) for counter in (5, 6, 7))


def make_sent(id: int = FIRST, tokenizer: int = 0) -> InflightRequest:
    return InflightRequest(
        HttpRequest(id, "POST", "/v1/completions", 1.5, key=9), b"body", tokenizer
    )


@pytest.mark.parametrize(
    ("seat", "is_lost"),
    [
        (Seat("tokenizer", 0), True),
        (Seat("tokenizer", 1), False),
        (Seat("engine", 0), True),
        (Seat("detokenizer", 5 % 2), True),
        (Seat("detokenizer", 6 % 2), False),
        (Seat("frontend", 0), False),
    ],
)
def test_dead_process_takes_its_requests(seat: Seat, is_lost: bool) -> None:
    assert make_sent().is_lost_with(seat, 2) == is_lost


def test_a_tokenizer_is_done_with_what_is_answered() -> None:
    sent = make_sent()
    sent.is_answered = True
    assert not sent.is_lost_with(Seat("tokenizer", 0), 2)
    assert sent.is_lost_with(Seat("engine", 0), 2)


def test_a_get_is_its_tokenizers_to_the_last_byte() -> None:
    sent = InflightRequest(HttpRequest(FIRST, "GET", "/ring/events", 1.5), b"", 2)
    sent.is_answered = True
    assert sent.is_with_tokenizer
    assert sent.is_lost_with(Seat("tokenizer", 2), 2)
    for seat in (Seat("tokenizer", 0), Seat("engine", 0), Seat("detokenizer", 5 % 2)):
        assert not sent.is_lost_with(seat, 2)


def test_it_is_the_same_request_under_another_id() -> None:
    sent = make_sent()
    sent.num_delivered = {0: 7, 1: 3 | ENDED}
    sent.renew(SECOND, is_suspect=False)
    assert sent.request == HttpRequest(
        SECOND, "POST", "/v1/completions", 1.5, 9, FIRST, FIRST, {0: 7, 1: 3 | ENDED}, False
    )
    assert sent.request.first_id == FIRST
    assert sent.tokenizer < 0
    sent.num_delivered[0] = 8
    sent.renew(THIRD, is_suspect=True)
    assert (sent.request.origin, sent.request.resumes) == (FIRST, SECOND)
    assert sent.request.num_delivered == {0: 8, 1: 3 | ENDED}
    sent.renew(FIRST, is_suspect=False)
    assert sent.request.is_suspect, "once suspected, it is watched"
    sent.renew(SECOND, is_reply_suspect=True)
    sent.renew(THIRD)
    assert sent.request.is_reply_suspect


def test_request_blamed_too_often_is_not_resent() -> None:
    sent = make_sent()
    assert all(sent.blame(SECOND) for _ in range(10))
    assert [sent.blame(FIRST) for _ in range(MAX_BLAMED)] == [True] * (MAX_BLAMED - 1) + [False]
