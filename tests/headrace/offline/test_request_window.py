"""Requests go out as places come free, and no sooner are they made."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headrace.client.responses import Completion
from headrace.errors import ApiError
from headrace.ipc.messages import Head
from headrace.offline.request_window import RequestWindow
from headrace.offline.ring_connection import Piece, RingRequest

JSON = Head(200, "application/json")
BODY = msgspec.json.encode({"id": "x", "created": 5, "model": "tiny", "choices": []})


class Places:
    """A ring with room for three sequences, which keeps what it was sent."""

    places = 3

    def __init__(self) -> None:
        self.sent: list[RingRequest] = []
        self.closed: list[int] = []

    def open(self, call: RingRequest, _put: object) -> int:
        self.sent.append(call)
        return len(self.sent)

    def close(self, id: int) -> None:
        self.closed.append(id)


def flight_of(ring: Any, sizes: list[int], made: list[int]) -> RequestWindow[Completion]:
    def calls() -> Iterator[RingRequest]:
        for size in sizes:
            made.append(size)
            yield RingRequest("/v1/completions", b"{}", size)

    return RequestWindow(ring, lambda _: None, calls(), Completion)


def test_requests_are_made_when_there_are_places_for_them() -> None:
    ring, made = Places(), []
    window = flight_of(ring, [1] * 100, made)
    assert window.fill()
    assert len(ring.sent) == 3
    assert len(made) == 4, "those, and the next"
    assert window.take(Piece(2, JSON, BODY, True)) is not None
    assert window.fill()
    assert len(ring.sent) == 4


def test_a_request_that_is_larger_than_all_places_goes_alone() -> None:
    ring = Places()
    window = flight_of(ring, [2, 5, 1], [])
    for id in (1, 2, 3):
        assert window.fill()
        assert len(ring.sent) == id
        window.take(Piece(id, JSON, BODY, True))
    assert not window.fill()


def test_an_answer_may_come_in_pieces_and_a_refusal_too() -> None:
    window = flight_of(Places(), [1, 1], [])
    assert window.fill()
    assert window.take(Piece(1, JSON, BODY[:9], False)) is None
    assert window.take(Piece(2, Head(400, JSON.content_type), b'{"error":{"mess', False)) is None
    assert window.take(Piece(1, None, BODY[9:], True)) == window.responses()[0]
    with pytest.raises(ApiError, match=r"^no\nin request 1, counted from 0$"):
        window.take(Piece(2, None, b'age":"no"}}', True))


def test_only_what_is_out_is_given_up() -> None:
    ring = Places()
    window = flight_of(ring, [1] * 5, [])
    window.fill()
    window.take(Piece(2, JSON, BODY, True))
    window.close()
    assert ring.closed == [1, 3]
