"""What is sent again, and what it says of itself then."""

import pytest

from headrace.board.board import Seat
from headrace.frontend.open_requests import OpenRequest
from headrace.ipc.inflight import (
    MAX_BLAMED,
    MAX_EARLIER,
    InflightRequest,
    InflightRequests,
    Withdrawal,
)
from headrace.ipc.messages import ENDED, MORE, Head, HttpRequest, request_id, request_of

FIRST, SECOND, THIRD, FOURTH, FIFTH = (request_id(1, counter) for counter in range(5, 10))


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
    sent.has_response = True
    assert not sent.is_lost_with(Seat("tokenizer", 0), 2)
    assert sent.is_lost_with(Seat("engine", 0), 2)


def test_engine_takes_only_what_it_may_have() -> None:
    sender = Sender(2)
    unknown, known = sender.receivers
    sender.requests.deliver(known.id, None, b"x", False, 1, engine=1)
    first, second = Seat("engine", 0), Seat("engine", 1)
    lost = [one.sent.is_lost_with(first, 2) for one in (unknown, known) if one.sent]
    assert lost == [True, False]
    assert sender.replace(Seat("detokenizer", 6 % 2)) == [Withdrawal(SECOND, -1, 1, False)]
    assert known.sent is not None
    assert known.sent.request.engine == 1, "it goes where its tokens are"
    sender.replace(second)
    assert known.sent.request.engine == -1


def test_a_get_is_its_tokenizers_to_the_last_byte() -> None:
    sent = InflightRequest(HttpRequest(FIRST, "GET", "/ring/events", 1.5), b"", 2)
    sent.has_response = True
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
    sent.renew(SECOND, is_response_suspect=True)
    sent.renew(THIRD)
    assert sent.request.is_response_suspect


def test_a_request_names_its_ids_since_its_last_response() -> None:
    sent = make_sent()
    for id in (SECOND, THIRD, FOURTH):
        sent.renew(id)
    assert (sent.request.resumes, sent.request.earlier) == (THIRD, [SECOND, FIRST])
    sent.has_response = True
    sent.renew(FIFTH)
    assert (sent.request.resumes, sent.request.earlier) == (FOURTH, [])
    sent.renew(FIRST)
    assert (sent.request.resumes, sent.request.earlier) == (FIFTH, [FOURTH])


def test_a_request_that_comes_to_nothing_keeps_its_first_id() -> None:
    sent = make_sent()
    ids = [request_id(1, 6 + again) for again in range(2 * MAX_EARLIER)]
    for id in ids:
        sent.renew(id)
    assert len(sent.request.earlier) == MAX_EARLIER
    assert [sent.request.resumes, *sent.request.earlier[:-1]] == ids[-2 : -MAX_EARLIER - 2 : -1]
    assert sent.request.earlier[-1] == FIRST


def test_request_blamed_too_often_is_not_resent() -> None:
    sent = make_sent()
    assert all(sent.blame(SECOND) for _ in range(10))
    assert [sent.blame(FIRST) for _ in range(MAX_BLAMED)] == [True] * (MAX_BLAMED - 1) + [False]


class Sender:
    """Requests that have been sent, with what came for each."""

    def __init__(self, num_requests: int) -> None:
        self.requests: InflightRequests[OpenRequest] = InflightRequests(1, 4)
        self.receivers = [OpenRequest(self.requests.next_id()) for _ in range(num_requests)]
        for receiver in self.receivers:
            receiver.sent = make_sent(receiver.id)
            self.requests.add(receiver)
        self.given_up: list[InflightRequest] = []

    def replace(self, seat: Seat, in_progress: int = 0) -> list[Withdrawal]:
        return self.requests.replace(seat, in_progress, 2, self.given_up.append)


def test_ids_count_on_from_the_first() -> None:
    sender = Sender(2)
    assert list(sender.requests.ids) == [FIRST, SECOND]
    assert list(sender.requests) == sender.receivers


def test_replaced_engine_loses_all_but_complete_requests() -> None:
    sender = Sender(3)
    waits, answered, complete = sender.receivers
    sender.requests.deliver(answered.id, None, b"x", False, 1)
    sender.requests.deliver(complete.id, None, b"x", True, 1)
    assert sender.replace(Seat("engine", 0)) == [
        Withdrawal(FIRST, 0, -1, False),
        Withdrawal(SECOND, -1, -1, False),
    ]
    assert list(sender.requests.ids) == [THIRD, waits.id, answered.id]
    assert [receiver.sent.request.resumes for receiver in sender.receivers if receiver.sent] == [
        FIRST,
        SECOND,
        0,
    ]
    assert not sender.given_up


def test_given_up_request_is_withdrawn_from_the_engine() -> None:
    sender = Sender(1)
    (receiver,) = sender.receivers
    for _ in range(MAX_BLAMED - 1):
        sender.replace(Seat("tokenizer", 0), receiver.id)
        assert receiver.sent is not None
        receiver.sent.tokenizer = 0
    id = receiver.id
    assert sender.replace(Seat("tokenizer", 0), id) == [Withdrawal(id, 0, -1, True)]
    assert (sender.given_up, receiver.id) == ([receiver.sent], id)


def test_pieces_of_a_response_reach_its_receiver_whole() -> None:
    sender = Sender(1)
    (receiver,) = sender.receivers
    head = Head(200, "text/plain")
    sender.requests.deliver(FIRST, None, b"a ", MORE, 0)
    assert (bytes(receiver.unsent), receiver.head) == (b"", None)
    sender.requests.deliver(FIRST, head, b"b", False, 1)
    assert (bytes(receiver.unsent), receiver.head) == (b"a b", head)
    receiver.has_begun = True
    sender.requests.deliver(FIRST, Head(500, "x"), b"c", True, 2)
    assert (bytes(receiver.unsent), receiver.head, receiver.complete) == (b"a bc", head, True)
    sender.requests.remove(receiver)
    sender.requests.deliver(request_of(FIRST), head, b"d", True, 3)
    assert (bytes(receiver.unsent), len(sender.requests)) == (b"a bc", 0)
