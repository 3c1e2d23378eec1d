"""Bodies go where there is least to do; long ones have a way of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.board import Board, Field, Seat
from headrace.links import LONG_BODY_BYTES, MAX_LONG_BACKLOG_BYTES, Links
from headrace.messages import HttpRequest, ToTokenizer
from headrace.sockets import Inbox, address

DEADLINE_MS = 20_000
REQUEST = HttpRequest(0, "POST", "/", 0.0)
SHORT, LONG = b"x" * 100, b"x" * LONG_BODY_BYTES


class Tokenizers:
    """Two tokenizers for short bodies, one for long ones, and the links to them."""

    def __init__(self, run_dir: str) -> None:
        seats = [Seat("frontend", 0), *(Seat("tokenizer", i) for i in range(3))]
        self.board = Board.create(seats)
        self.inboxes: list[Inbox[ToTokenizer]] = [
            Inbox(address(run_dir, "tokenizer", i), ToTokenizer) for i in range(3)
        ]
        self.links = Links(run_dir, 2, self.board, self.board.slot("frontend"))

    def received(self, tokenizer: int) -> int:
        """Return the length of the next body that a tokenizer gets."""
        received = self.inboxes[tokenizer].receive(DEADLINE_MS)
        assert received is not None
        return len(received[1])

    def close(self) -> None:
        self.links.close()
        for inbox in self.inboxes:
            inbox.close()


@pytest.fixture
def tokenizers(tmp_path: Path) -> Iterator[Tokenizers]:
    made = Tokenizers(str(tmp_path))
    yield made
    made.close()


def test_a_body_goes_to_who_has_least_to_do(tokenizers: Tokenizers) -> None:
    for body in (SHORT, b"x", b"x", b"x"):
        assert tokenizers.links.forward(REQUEST, body)
    assert tokenizers.received(0) == 100
    assert [tokenizers.received(1) for _ in range(3)] == [1, 1, 1]
    tokenizers.board.slot("tokenizer", 0).add(Field.HANDLED_BYTES, 101)
    assert tokenizers.links.forward(REQUEST, SHORT)
    assert tokenizers.received(0) == 100


def test_a_long_body_stands_in_nobodys_way(tokenizers: Tokenizers) -> None:
    for body in (LONG, SHORT, LONG, SHORT):
        assert tokenizers.links.forward(REQUEST, body)
    assert [tokenizers.received(i) for i in range(2)] == [len(SHORT)] * 2
    assert [tokenizers.received(2) for _ in range(2)] == [len(LONG)] * 2


def test_long_bodies_wait_in_bounded_number(tokenizers: Tokenizers) -> None:
    frontend, long = tokenizers.board.slot("frontend"), tokenizers.board.slot("tokenizer", 2)
    frontend.add(Field.FORWARDED_BYTES + 2, MAX_LONG_BACKLOG_BYTES)
    assert not tokenizers.links.forward(REQUEST, LONG)
    assert tokenizers.links.forward(REQUEST, SHORT)
    long.add(Field.HANDLED_BYTES, 1)
    assert tokenizers.links.forward(REQUEST, LONG)
    assert tokenizers.received(2) == len(LONG)
