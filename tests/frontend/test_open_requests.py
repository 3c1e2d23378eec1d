"""Response bytes find the request they are for, and wait for it within limits."""

import pytest

from headrace.board.board import SLOT_WORDS, Field, Seat, Slot
from headrace.frontend import open_requests as exchanges_module
from headrace.frontend.open_requests import MAX_UNSENT_BYTES, OpenRequest, OpenRequests
from headrace.ipc.inflight import InflightRequest
from headrace.ipc.messages import MORE, Head, HttpRequest, ResponseFrames, frontend_of
from headrace.ipc.sockets import Frame

HEAD = Head(200, "text/plain")
SLOT = Slot(memoryview(bytearray(SLOT_WORDS * 8)).cast("Q"), Seat("frontend", 0))


def test_who_writes_is_told_of_what_has_come() -> None:
    told = []
    exchange = OpenRequest(1)
    exchange.on_news = lambda: told.append(bytes(exchange.unsent))
    exchange.deliver(b"one ", False)
    exchange.deliver(memoryview(b"two"), True)
    assert told == [b"one ", b"one two"]
    assert exchange.complete


def test_a_piece_is_written_at_once_where_all_before_it_is() -> None:
    written: list[bytes] = []

    def write(data: Frame, num_written: int) -> bool:
        written.append(bytes(data[num_written:]))
        return data != b"too much"

    exchange = OpenRequest(1, write=write)
    exchange.deliver(b"first", False)
    exchange.deliver(b"a part", False, 2)
    exchange.deliver(b"", False)
    exchange.deliver(b"too much", False)
    exchange.deliver(b"third", False)
    exchange.deliver(b"last", True)
    assert written == [b"first", b"part", b"too much"]
    assert bytes(exchange.unsent) == b"too muchthirdlast"


def test_a_client_that_leaves_is_news() -> None:
    told = []
    exchange = OpenRequest(1)
    exchange.on_news = lambda: told.append(exchange.dropped)
    exchange.drop()
    assert told == [True]


def test_a_reader_that_is_too_slow_is_dropped() -> None:
    exchange = OpenRequest(1)
    exchange.deliver(bytes(MAX_UNSENT_BYTES), False)
    assert not exchange.dropped
    exchange.deliver(b"x", False)
    assert exchange.dropped


def test_a_response_that_is_complete_may_have_any_size() -> None:
    exchange = OpenRequest(1)
    exchange.deliver(bytes(MAX_UNSENT_BYTES + 1), True)
    assert not exchange.dropped


def test_request_ids_are_unique_and_name_the_frontend() -> None:
    exchanges = OpenRequests(5, SLOT)
    ids = [exchanges.open().id for _ in range(10)]
    assert len(set(ids)) == len(exchanges) == 10
    assert {frontend_of(id) for id in ids} == {5}


def test_bytes_are_cut_apart_by_their_lengths() -> None:
    exchanges = OpenRequests(0, SLOT)
    a, b, c = (exchanges.open() for _ in range(3))
    frames = ResponseFrames.of({a.id: HEAD}, [b.id, c.id, a.id], [2, 0, 3], [False, True, True])
    for entry in frames.split(b"bbaaa"):
        exchanges.deliver(*entry)
    assert (bytes(a.unsent), a.head, a.complete) == (b"aaa", HEAD, True)
    assert (bytes(b.unsent), b.head, b.complete) == (b"bb", None, False)
    assert (bytes(c.unsent), c.complete) == (b"", True)


def test_a_head_that_has_come_stays() -> None:
    exchanges = OpenRequests(0, SLOT)
    exchange = exchanges.open()
    exchanges.deliver(exchange.id, HEAD, b"x", False, 0)
    exchanges.deliver(exchange.id, None, b"y", False, 0)
    assert (bytes(exchange.unsent), exchange.head) == (b"xy", HEAD)


def test_what_comes_for_nobody_is_dropped_and_shifts_nothing() -> None:
    exchanges = OpenRequests(0, SLOT)
    gone, here = exchanges.open(), exchanges.open()
    exchanges.close(gone)
    for entry in ResponseFrames.of({}, [gone.id, here.id], [3, 2], [False, False]).split(b"xxxhi"):
        exchanges.deliver(*entry)
    assert bytes(here.unsent) == b"hi"
    assert not gone.unsent
    assert list(exchanges) == [here]


def test_closing_twice_does_nothing() -> None:
    exchanges = OpenRequests(0, SLOT)
    exchange = exchanges.open()
    exchanges.close(exchange)
    exchanges.close(exchange)
    assert len(exchanges) == 0
    assert SLOT[Field.OPEN_REQUESTS] == 0


def test_what_waits_for_slow_readers_is_known() -> None:
    exchanges = OpenRequests(0, SLOT)
    one, other = exchanges.open(), exchanges.open()
    assert SLOT[Field.OPEN_REQUESTS] == 2
    one.deliver(b"123", False)
    other.deliver(b"45", True)
    assert exchanges.num_unsent_bytes == 5


def sent_of(exchange: OpenRequest) -> InflightRequest:
    exchange.sent = InflightRequest(HttpRequest(exchange.id, "POST", "/", 0.0), b"")
    return exchange.sent


def test_what_comes_for_an_old_id_is_dropped() -> None:
    exchanges = OpenRequests(0, SLOT)
    exchange = exchanges.open()
    old = exchange.id
    exchange.sent = sent_of(exchange)
    exchanges.deliver(old, HEAD, b"first ", False, 1)
    new = exchanges.renumber(exchange.sent)
    assert (exchange.id, len(exchanges)) == (new, 1)
    exchanges.deliver(old, None, b"lost ", False, 2)
    exchanges.deliver(new, HEAD, b"second", True, 2)
    assert bytes(exchange.unsent) == b"first second"


def test_it_is_known_what_a_client_has_of_each_sequence() -> None:
    exchanges = OpenRequests(0, SLOT)
    exchange = exchanges.open()
    sent = sent_of(exchange)
    assert exchanges.sent() == [sent]
    assert not sent.is_answered
    for sequence, told in [(0, 3), (2, 1), (0, 5)]:
        exchanges.deliver(exchange.id + sequence, None, b"x", False, told)
    assert (sent.is_answered, sent.num_delivered) == (True, {0: 5, 2: 1})


def test_a_request_that_is_given_up_has_an_answer() -> None:
    exchanges = OpenRequests(0, SLOT)
    exchange = exchanges.open()
    exchanges.fail(sent_of(exchange), HEAD, b"sorry", b"data: sorry")
    assert (bytes(exchange.unsent), exchange.head, exchange.complete) == (b"sorry", HEAD, True)


def test_slices_of_an_answer_wait_until_it_is_whole() -> None:
    exchanges = OpenRequests(0, SLOT)
    exchange = exchanges.open()
    sent = sent_of(exchange)
    told = []
    exchange.on_news = lambda: told.append(bytes(exchange.unsent))
    exchanges.deliver(exchange.id, None, b"one ", MORE, 0)
    exchanges.deliver(exchange.id, None, b"two ", MORE, 0)
    assert (told, sent.num_delivered, exchange.head, exchanges.num_unsent_bytes) == (
        [],
        {},
        None,
        8,
    )
    exchanges.deliver(exchange.id, HEAD, b"three", True, 7)
    assert (told, sent.num_delivered, exchange.head) == ([b"one two three"], {0: 7}, HEAD)


def test_slices_of_a_dead_process_are_dropped() -> None:
    exchanges = OpenRequests(0, SLOT)
    exchange = exchanges.open()
    sent = sent_of(exchange)
    exchanges.deliver(exchange.id, None, b"half", MORE, 0)
    exchanges.renumber(sent)
    sent.renew(exchange.id, is_suspect=False)
    exchanges.deliver(exchange.id, HEAD, b"whole", True, 1)
    assert bytes(exchange.unsent) == b"whole"


def test_complete_answer_is_not_sent_again() -> None:
    exchanges = OpenRequests(0, SLOT)
    exchange = exchanges.open()
    sent_of(exchange)
    exchanges.deliver(exchange.id, HEAD, b"whole", True, 1)
    assert exchanges.sent() == []


def test_stream_that_is_given_up_ends_with_an_event() -> None:
    exchanges = OpenRequests(0, SLOT)
    exchange = exchanges.open()
    sent = sent_of(exchange)
    exchanges.deliver(exchange.id, HEAD, b"data: 1", False, 1)
    exchanges.fail(sent, Head(500, "x"), b"sorry", b"data: sorry")
    assert (bytes(exchange.unsent), exchange.head) == (b"data: 1data: sorry", HEAD)


def test_unread_answers_are_bounded_over_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges_module, "MAX_TOTAL_UNSENT_BYTES", 250)
    exchanges = OpenRequests(0, SLOT)
    opened = [exchanges.open() for _ in range(4)]
    for written_at, exchange in zip([3.0, 1.0, 2.0, 4.0], opened, strict=True):
        exchange.written_at = written_at
        exchange.deliver(bytes(100), True)
    exchanges.cut_slowest()
    assert [exchange.dropped for exchange in opened] == [False, True, True, False]


def test_one_answer_is_kept_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges_module, "MAX_TOTAL_UNSENT_BYTES", 10)
    exchanges = OpenRequests(0, SLOT)
    exchange = exchanges.open()
    exchange.deliver(bytes(100), True)
    exchanges.cut_slowest()
    assert not exchange.dropped
