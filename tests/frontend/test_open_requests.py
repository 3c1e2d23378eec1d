"""Response bytes find the request they are for, and wait for it within limits."""

import pytest

from headrace.board.board import SLOT_WORDS, Seat, Slot
from headrace.board.fields import FrontendField
from headrace.frontend import open_requests as open_requests_module
from headrace.frontend.open_requests import MAX_UNSENT_BYTES, OpenRequest, OpenRequests
from headrace.ipc.inflight import InflightRequest
from headrace.ipc.messages import MORE, Head, HttpRequest, ResponseFrames, frontend_of
from headrace.ipc.sockets import Frame

HEAD = Head(200, "text/plain")
SLOT = Slot(memoryview(bytearray(SLOT_WORDS * 8)).cast("Q"), Seat("frontend", 0))


def test_writer_receives_new_pieces() -> None:
    told = []
    open_request = OpenRequest(1)
    open_request.on_news = lambda: told.append(bytes(open_request.unsent))
    open_request.deliver(b"one ", False)
    open_request.deliver(memoryview(b"two"), True)
    assert told == [b"one ", b"one two"]
    assert open_request.complete


def test_a_piece_is_written_at_once_where_all_before_it_is() -> None:
    written: list[bytes] = []

    def write(data: Frame, num_written: int) -> bool:
        written.append(bytes(data[num_written:]))
        return data != b"too much"

    open_request = OpenRequest(1, write=write)
    open_request.deliver(b"first", False)
    open_request.deliver(b"a part", False, 2)
    open_request.deliver(b"", False)
    open_request.deliver(b"too much", False)
    open_request.deliver(b"third", False)
    open_request.deliver(b"last", True)
    assert written == [b"first", b"part", b"too much"]
    assert bytes(open_request.unsent) == b"too muchthirdlast"


def test_a_client_that_leaves_is_news() -> None:
    told = []
    open_request = OpenRequest(1)
    open_request.on_news = lambda: told.append(open_request.dropped)
    open_request.drop()
    assert told == [True]


def test_a_reader_that_is_too_slow_is_dropped() -> None:
    open_request = OpenRequest(1)
    open_request.deliver(bytes(MAX_UNSENT_BYTES), False)
    assert not open_request.dropped
    open_request.deliver(b"x", False)
    assert open_request.dropped


def test_a_response_that_is_complete_may_have_any_size() -> None:
    open_request = OpenRequest(1)
    open_request.deliver(bytes(MAX_UNSENT_BYTES + 1), True)
    assert not open_request.dropped


def test_request_ids_are_unique_and_name_the_frontend() -> None:
    open_requests = OpenRequests(5, SLOT)
    ids = [open_requests.open().id for _ in range(10)]
    assert len(set(ids)) == len(open_requests) == 10
    assert {frontend_of(id) for id in ids} == {5}


def test_bytes_are_cut_apart_by_their_lengths() -> None:
    open_requests = OpenRequests(0, SLOT)
    a, b, c = (open_requests.open() for _ in range(3))
    frames = ResponseFrames.of({a.id: HEAD}, [b.id, c.id, a.id], [2, 0, 3], [False, True, True])
    for entry in frames.split(b"bbaaa"):
        open_requests.deliver(*entry)
    assert (bytes(a.unsent), a.head, a.complete) == (b"aaa", HEAD, True)
    assert (bytes(b.unsent), b.head, b.complete) == (b"bb", None, False)
    assert (bytes(c.unsent), c.complete) == (b"", True)


def test_a_head_that_has_come_stays() -> None:
    open_requests = OpenRequests(0, SLOT)
    open_request = open_requests.open()
    open_requests.deliver(open_request.id, HEAD, b"x", False, 0)
    open_requests.deliver(open_request.id, None, b"y", False, 0)
    assert (bytes(open_request.unsent), open_request.head) == (b"xy", HEAD)


def test_frames_of_unknown_ids_are_dropped_alone() -> None:
    open_requests = OpenRequests(0, SLOT)
    gone, here = open_requests.open(), open_requests.open()
    open_requests.close(gone)
    for entry in ResponseFrames.of({}, [gone.id, here.id], [3, 2], [False, False]).split(b"xxxhi"):
        open_requests.deliver(*entry)
    assert bytes(here.unsent) == b"hi"
    assert not gone.unsent
    assert list(open_requests) == [here]


def test_closing_twice_does_nothing() -> None:
    open_requests = OpenRequests(0, SLOT)
    open_request = open_requests.open()
    open_requests.close(open_request)
    open_requests.close(open_request)
    assert len(open_requests) == 0
    assert SLOT[FrontendField.OPEN_REQUESTS] == 0


def test_what_waits_for_slow_readers_is_known() -> None:
    open_requests = OpenRequests(0, SLOT)
    one, other = open_requests.open(), open_requests.open()
    assert SLOT[FrontendField.OPEN_REQUESTS] == 2
    one.deliver(b"123", False)
    other.deliver(b"45", True)
    assert open_requests.num_unsent_bytes == 5


def sent_of(open_request: OpenRequest) -> InflightRequest:
    open_request.sent = InflightRequest(HttpRequest(open_request.id, "POST", "/", 0.0), b"")
    return open_request.sent


def test_what_comes_for_an_old_id_is_dropped() -> None:
    open_requests = OpenRequests(0, SLOT)
    open_request = open_requests.open()
    old = open_request.id
    open_request.sent = sent_of(open_request)
    open_requests.deliver(old, HEAD, b"first ", False, 1)
    open_requests.renumber(open_request)
    new = open_request.id
    assert (new != old, list(open_requests.ids)) == (True, [new])
    open_requests.deliver(old, None, b"lost ", False, 2)
    open_requests.deliver(new, HEAD, b"second", True, 2)
    assert bytes(open_request.unsent) == b"first second"


def test_it_is_known_what_a_client_has_of_each_sequence() -> None:
    open_requests = OpenRequests(0, SLOT)
    open_request = open_requests.open()
    sent = sent_of(open_request)
    assert open_requests.incomplete() == [sent]
    assert not sent.has_response
    for sequence, told in [(0, 3), (2, 1), (0, 5)]:
        open_requests.deliver(open_request.id + sequence, None, b"x", False, told)
    assert (sent.has_response, sent.num_delivered) == (True, {0: 5, 2: 1})


def test_a_request_that_is_given_up_has_an_answer() -> None:
    open_requests = OpenRequests(0, SLOT)
    open_request = open_requests.open()
    open_requests.fail(sent_of(open_request), HEAD, b"sorry", b"data: sorry")
    assert (bytes(open_request.unsent), open_request.head, open_request.complete) == (
        b"sorry",
        HEAD,
        True,
    )


def test_slices_of_an_answer_wait_until_it_is_whole() -> None:
    open_requests = OpenRequests(0, SLOT)
    open_request = open_requests.open()
    sent = sent_of(open_request)
    told = []
    open_request.on_news = lambda: told.append(bytes(open_request.unsent))
    open_requests.deliver(open_request.id, None, b"one ", MORE, 0)
    open_requests.deliver(open_request.id, None, b"two ", MORE, 0)
    assert (told, sent.num_delivered, open_request.head, open_requests.num_unsent_bytes) == (
        [],
        {},
        None,
        8,
    )
    open_requests.deliver(open_request.id, HEAD, b"three", True, 7)
    assert (told, sent.num_delivered, open_request.head) == ([b"one two three"], {0: 7}, HEAD)


def test_slices_of_a_dead_process_are_dropped() -> None:
    open_requests = OpenRequests(0, SLOT)
    open_request = open_requests.open()
    sent = sent_of(open_request)
    open_requests.deliver(open_request.id, None, b"half", MORE, 0)
    open_requests.renumber(open_request)
    sent.renew(open_request.id, is_suspect=False)
    open_requests.deliver(open_request.id, HEAD, b"whole", True, 1)
    assert bytes(open_request.unsent) == b"whole"


def test_complete_answer_is_not_sent_again() -> None:
    open_requests = OpenRequests(0, SLOT)
    open_request = open_requests.open()
    sent_of(open_request)
    open_requests.deliver(open_request.id, HEAD, b"whole", True, 1)
    assert open_requests.incomplete() == []


def test_stream_that_is_given_up_ends_with_an_event() -> None:
    open_requests = OpenRequests(0, SLOT)
    open_request = open_requests.open()
    sent = sent_of(open_request)
    open_requests.deliver(open_request.id, HEAD, b"data: 1", False, 1)
    open_requests.fail(sent, Head(500, "x"), b"sorry", b"data: sorry")
    assert (bytes(open_request.unsent), open_request.head) == (b"data: 1data: sorry", HEAD)


def test_unread_answers_are_bounded_over_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_requests_module, "MAX_TOTAL_UNSENT_BYTES", 250)
    open_requests = OpenRequests(0, SLOT)
    opened = [open_requests.open() for _ in range(4)]
    for written_at, open_request in zip([3.0, 1.0, 2.0, 4.0], opened, strict=True):
        open_request.written_at = written_at
        open_request.deliver(bytes(100), True)
    open_requests.cut_slowest()
    assert [open_request.dropped for open_request in opened] == [False, True, True, False]


def test_one_answer_is_kept_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_requests_module, "MAX_TOTAL_UNSENT_BYTES", 10)
    open_requests = OpenRequests(0, SLOT)
    open_request = open_requests.open()
    open_request.deliver(bytes(100), True)
    open_requests.cut_slowest()
    assert not open_request.dropped
