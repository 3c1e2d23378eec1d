"""Bodies go where there is least to do; long ones have a way of their own."""

import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.board.board import Board, Seat, State
from headrace.board.fields import CommonField, DetokenizerField, FrontendField, TokenizerField
from headrace.frontend.open_requests import OpenRequest
from headrace.ipc.inflight import MAX_BLAMED, InflightRequest, InflightRequests
from headrace.ipc.messages import Abort, HttpRequest, RenewLeases, ToEngine, ToTokenizer, request_id
from headrace.ipc.router import LONG_BODY_BYTES, MAX_LONG_BACKLOG_BYTES, Router
from headrace.ipc.sockets import Inbox, address

DEADLINE_MS = 120_000
TIMEOUT_MS = 20  # in which nothing is to come
REQUEST = HttpRequest(0, "POST", "/", 0.0)
SHORT, LONG = b"x" * 100, b"x" * LONG_BODY_BYTES


class Tokenizers:
    """Two tokenizers for short bodies, one for long ones, and the links to them.

    With `num_images`, as many more for those with images.
    """

    def __init__(self, run_dir: str, num_images: int = 0, handles_gets: bool = True) -> None:
        num_all = 3 + num_images + handles_gets
        seats = [Seat("frontend", 0), *(Seat("tokenizer", i) for i in range(num_all))]
        self.board = Board.create([*seats, Seat("engine", 0), Seat("detokenizer", 0)])
        self.inboxes: list[Inbox[ToTokenizer]] = [
            Inbox(address(run_dir, "tokenizer", i), ToTokenizer) for i in range(num_all)
        ]
        self.aborts: list[Inbox[Abort]] = [
            Inbox(address(run_dir, "aborts", i), Abort) for i in range(num_all)
        ]
        self.engine: Inbox[ToEngine] = Inbox(address(run_dir, "engine"), ToEngine)
        for slot in self.board.slots:
            slot.enter(State.STARTING)
            slot.enter(State.READY)
        self.links = Router(run_dir, 2, self.board, self.board.slot("frontend"), handles_gets)

    def replace(self, index: int, role: str = "tokenizer") -> None:
        """Let a process die and another take its seat."""
        slot = self.board.slot(role, index)
        slot.die()
        slot.enter(State.STARTING)
        slot.enter(State.READY)

    def received(self, tokenizer: int) -> int:
        """Return the length of the next body that a tokenizer gets."""
        self.links.flush()
        received = self.inboxes[tokenizer].receive(DEADLINE_MS)
        assert received is not None
        return len(received[1])

    def aborted(self, tokenizer: int | None = None) -> int:
        """Return which request a tokenizer, or else the engine, is told of next."""
        inbox: Inbox[Any] = self.engine if tokenizer is None else self.aborts[tokenizer]
        received = inbox.receive(DEADLINE_MS)
        assert received is not None
        assert isinstance(received[0], Abort)
        return received[0].request

    def close(self) -> None:
        self.links.close()
        for inbox in (*self.inboxes, *self.aborts, self.engine):
            inbox.close()


@pytest.fixture
def tokenizers(tmp_path: Path) -> Iterator[Tokenizers]:
    made = Tokenizers(str(tmp_path))
    yield made
    made.close()


def test_body_goes_to_the_least_loaded_tokenizer(tokenizers: Tokenizers) -> None:
    for body in (SHORT, b"x", b"x", b"x"):
        assert tokenizers.links.forward(InflightRequest(REQUEST, body))
    assert tokenizers.received(0) == 100
    assert [tokenizers.received(1) for _ in range(3)] == [1, 1, 1]
    tokenizers.board.slot("tokenizer", 0).add(TokenizerField.HANDLED_BYTES, 101)
    assert tokenizers.links.forward(InflightRequest(REQUEST, SHORT))
    assert tokenizers.received(0) == 100


def test_bodies_wait_for_each_other_until_they_are_flushed(tokenizers: Tokenizers) -> None:
    for _ in range(4):
        assert tokenizers.links.forward(InflightRequest(REQUEST, SHORT))
    assert not tokenizers.inboxes[0].wait(TIMEOUT_MS)
    tokenizers.links.flush()
    for inbox in tokenizers.inboxes[:2]:
        assert inbox.wait(DEADLINE_MS)
        assert [inbox.receive(0) for _ in range(3)] == [(REQUEST, SHORT)] * 2 + [None]


def test_router_is_behind_until_bodies_are_handled(tokenizers: Tokenizers) -> None:
    assert tokenizers.links.forward(InflightRequest(replace(REQUEST, method="GET"), b""))
    assert not tokenizers.links.is_behind
    assert tokenizers.links.forward(InflightRequest(REQUEST, SHORT))
    assert tokenizers.links.is_behind
    tokenizers.board.slot("tokenizer", 0).add(TokenizerField.HANDLED_BYTES, len(SHORT) + 1)
    assert not tokenizers.links.is_behind


def test_long_body_blocks_no_other(tokenizers: Tokenizers) -> None:
    for body in (LONG, SHORT, LONG, SHORT):
        assert tokenizers.links.forward(InflightRequest(REQUEST, body))
    assert [tokenizers.received(i) for i in range(2)] == [len(SHORT)] * 2
    assert [tokenizers.received(2) for _ in range(2)] == [len(LONG)] * 2


def test_bodies_with_images_go_to_image_tokenizers(tmp_path: Path) -> None:
    tokenizers = Tokenizers(str(tmp_path), num_images=2)
    with_image = b'{"type": "image_url", "image_url": {"url": "data:"}}'
    with_video = with_image.replace(b"image_url", b"video_url")
    for body in (with_image, with_image + LONG, SHORT, LONG, with_video):
        assert tokenizers.links.forward(InflightRequest(REQUEST, body))
    assert tokenizers.received(0) == len(SHORT)
    assert tokenizers.received(2) == len(LONG)
    assert [tokenizers.received(3) for _ in range(2)] == [len(with_image)] * 2
    assert tokenizers.received(4) == len(with_image + LONG)
    # Of the one long body and the three with images, each with a byte of its own.
    assert tokenizers.links.long_backlog() == 2 * len(LONG) + 3 * len(with_image) + 4
    tokenizers.close()


def test_images_go_to_the_last_where_no_gets_come(tmp_path: Path) -> None:
    tokenizers = Tokenizers(str(tmp_path), num_images=1, handles_gets=False)
    body = b'"image_url"'
    assert tokenizers.links.forward(InflightRequest(REQUEST, body))
    assert tokenizers.received(3) == len(body)
    tokenizers.close()


def test_gets_go_to_the_last_tokenizer(tmp_path: Path) -> None:
    tokenizers = Tokenizers(str(tmp_path), num_images=1)
    for method in ("GET", "HEAD"):
        assert tokenizers.links.forward(InflightRequest(replace(REQUEST, method=method), b""))
        assert tokenizers.received(4) == 0
    tokenizers.close()


def test_a_stream_of_a_get_is_aborted_at_its_tokenizer(tmp_path: Path) -> None:
    tokenizers = Tokenizers(str(tmp_path))
    sent = InflightRequest(replace(REQUEST, id=request_id(0, 7), method="GET"), b"")
    assert tokenizers.links.forward(sent)
    sent.has_response = True
    tokenizers.links.abort(sent)
    assert tokenizers.aborted(3) == sent.request.id
    tokenizers.close()


def test_forwarded_requests_are_counted_but_for_gets(tokenizers: Tokenizers) -> None:
    for method in ("POST", "GET", "POST"):
        assert tokenizers.links.forward(InflightRequest(replace(REQUEST, method=method), b""))
    assert tokenizers.board.slot("frontend")[FrontendField.FORWARDED] == 2


def test_images_of_messages_are_found_by_their_type(tmp_path: Path) -> None:
    tokenizers = Tokenizers(str(tmp_path), num_images=1)
    body = b'{"type": "image", "source": {"type": "base64"}}'
    for path, tokenizer in (("/v1/messages", 3), ("/v1/messages/count_tokens", 3), ("/", 0)):
        assert tokenizers.links.forward(InflightRequest(replace(REQUEST, path=path), body))
        assert tokenizers.received(tokenizer) == len(body)
    tokenizers.close()


def test_a_model_without_images_has_no_ear_for_them(tokenizers: Tokenizers) -> None:
    assert tokenizers.links.forward(InflightRequest(REQUEST, b'"image_url"'))
    assert tokenizers.received(0) == len(b'"image_url"')


def test_long_bodies_wait_in_bounded_number(tokenizers: Tokenizers) -> None:
    frontend, long = tokenizers.board.slot("frontend"), tokenizers.board.slot("tokenizer", 2)
    frontend.add(FrontendField.FORWARDED_BYTES + 2, MAX_LONG_BACKLOG_BYTES)
    assert not tokenizers.links.forward(InflightRequest(REQUEST, LONG))
    assert tokenizers.links.forward(InflightRequest(REQUEST, SHORT))
    long.add(TokenizerField.HANDLED_BYTES, 1)
    assert tokenizers.links.forward(InflightRequest(REQUEST, LONG))
    assert tokenizers.received(2) == len(LONG)


def test_absent_tokenizer_gets_nothing_while_another_is_there(
    tokenizers: Tokenizers,
) -> None:
    tokenizers.board.slot("tokenizer", 0)[CommonField.STATE] = State.DEAD
    for _ in range(3):
        assert tokenizers.links.forward(InflightRequest(REQUEST, SHORT))
    assert [tokenizers.received(1) for _ in range(3)] == [len(SHORT)] * 3


class Owner:
    """The sender of requests: draws new ids from 100 on, and records given-up requests."""

    def __init__(self, tokenizers: Tokenizers, num_requests: int) -> None:
        self.links = tokenizers.links
        self.sent = [
            InflightRequest(replace(REQUEST, id=request_id(0, i)), SHORT)
            for i in range(num_requests)
        ]
        self.requests: InflightRequests[OpenRequest] = InflightRequests(0, 99)
        for sent in self.sent:
            self.requests.add(OpenRequest(sent.request.id, sent=sent))
        self.given_up: list[InflightRequest] = []

    def resend(self) -> None:
        self.links.resend(self.requests, self.given_up.append)


def test_what_a_dead_tokenizer_had_is_sent_again_and_watched(tokenizers: Tokenizers) -> None:
    owner = Owner(tokenizers, 3)
    assert all(tokenizers.links.forward(sent) for sent in owner.sent)
    assert [sent.tokenizer for sent in owner.sent] == [0, 1, 0]
    owner.sent[2].has_response = True
    owner.resend()
    assert [sent.request.resumes for sent in owner.sent] == [0, 0, 0]
    tokenizers.replace(0)
    owner.resend()
    assert [sent.request.resumes for sent in owner.sent] == [request_id(0, 0), 0, 0]
    assert [sent.request.is_suspect for sent in owner.sent] == [True, False, False]
    assert tokenizers.received(0) == tokenizers.received(owner.sent[0].tokenizer) == len(SHORT)
    owner.resend()
    assert owner.sent[0].request.id == request_id(0, 100), "it is sent once"
    assert not owner.given_up


def test_old_id_of_a_resent_request_is_unknown(tokenizers: Tokenizers) -> None:
    owner = Owner(tokenizers, 2)
    waits, answered = owner.sent
    assert all(tokenizers.links.forward(sent) for sent in owner.sent)
    answered.has_response = True
    tokenizers.replace(0, "engine")
    owner.resend()
    assert [sent.request.resumes for sent in owner.sent] == [request_id(0, i) for i in range(2)]
    assert tokenizers.aborted(0) == request_id(0, 0)
    assert tokenizers.engine.receive(0) is None, "which may go on from there"
    tokenizers.links.abort(waits)
    tokenizers.links.abort(answered)
    assert tokenizers.aborted(waits.tokenizer) == waits.request.id
    assert tokenizers.aborted(answered.tokenizer) == answered.request.id


def test_resent_answered_request_is_lost_with_its_tokenizer(
    tokenizers: Tokenizers,
) -> None:
    owner = Owner(tokenizers, 1)
    (sent,) = owner.sent
    assert tokenizers.links.forward(sent)
    sent.has_response = True
    tokenizers.replace(0, "engine")
    owner.resend()
    assert sent.request.id == request_id(0, 100)
    tokenizers.replace(sent.tokenizer)
    owner.resend()
    assert sent.request.id == request_id(0, 101)


def test_a_request_with_which_tokenizers_die_is_given_up(tokenizers: Tokenizers) -> None:
    owner = Owner(tokenizers, 2)
    slot = tokenizers.board.slot("tokenizer", 0)
    for _ in range(MAX_BLAMED):
        for sent in owner.sent:
            sent.tokenizer = 0
        slot[TokenizerField.AT_HAND] = owner.sent[1].request.id
        tokenizers.replace(0)
        owner.resend()
    assert owner.given_up == [owner.sent[1]]


def test_request_at_whose_response_detokenizers_die_is_given_up(tokenizers: Tokenizers) -> None:
    owner = Owner(tokenizers, 2)
    slot = tokenizers.board.slot("detokenizer", 0)
    for _ in range(MAX_BLAMED):
        for sent in owner.sent:
            sent.tokenizer, sent.has_response = 0, True
        slot[DetokenizerField.LAST_RESPONSE_AT_HAND] = deadly = owner.sent[1].request.id
        tokenizers.replace(0, "detokenizer")
        owner.resend()
    assert owner.given_up == [owner.sent[1]]
    tokenizers.links.flush()
    received = tokenizers.engine.receive(DEADLINE_MS)
    assert received is not None, "the engine is to let go of it"
    assert received[0] == Abort(deadly)


@pytest.mark.parametrize("is_known", [False, True])
def test_death_at_no_known_response_makes_suspects(tokenizers: Tokenizers, is_known: bool) -> None:
    owner = Owner(tokenizers, 2)
    for sent in owner.sent:
        sent.tokenizer, sent.has_response = 0, True
    slot = tokenizers.board.slot("detokenizer", 0)
    slot[DetokenizerField.LAST_RESPONSE_AT_HAND] = owner.sent[1].request.id if is_known else 0
    tokenizers.replace(0, "detokenizer")
    owner.resend()
    assert not owner.given_up
    found = [(s.request.is_suspect, s.request.is_response_suspect) for s in owner.sent]
    assert found == [(False, not is_known)] * 2


def test_what_a_full_link_refuses_is_sent_again_later(tokenizers: Tokenizers) -> None:
    owner = Owner(tokenizers, 1)
    sent = owner.sent[0]
    sent.body = LONG
    backlog = tokenizers.board.slot("frontend")
    assert tokenizers.links.forward(sent)
    backlog.add(FrontendField.FORWARDED_BYTES + 2, MAX_LONG_BACKLOG_BYTES)
    tokenizers.replace(2)
    owner.resend()
    assert sent.tokenizer < 0
    backlog[FrontendField.FORWARDED_BYTES + 2] = 0
    owner.resend()
    assert sent.tokenizer == 2


def test_abort_goes_to_every_possible_holder(tokenizers: Tokenizers) -> None:
    sent = Owner(tokenizers, 5).sent
    waits, waits_too, answered, _, last = sent
    for one in (waits, waits_too, answered, last):
        assert tokenizers.links.forward(one)
    assert [one.tokenizer for one in sent] == [0, 1, 0, -1, 1]
    answered.has_response = True
    for one in sent:
        tokenizers.links.abort(one)
    assert [tokenizers.aborted() for _ in sent] == [one.request.id for one in sent]
    assert tokenizers.aborted(0) == waits.request.id
    assert [tokenizers.aborted(1) for _ in range(2)] == [waits_too.request.id, last.request.id]
    assert tokenizers.aborts[0].receive(0) is None


def test_an_abort_overtakes_what_waits(tokenizers: Tokenizers) -> None:
    sent = Owner(tokenizers, 50).sent
    for one in sent:
        one.body = LONG
        assert tokenizers.links.forward(one)
    tokenizers.links.abort(sent[-1])
    assert tokenizers.aborted(2) == sent[-1].request.id
    assert [tokenizers.received(2) for _ in sent] == [len(LONG)] * len(sent)


def test_a_tokenizer_that_takes_no_aborts_holds_up_no_others(tokenizers: Tokenizers) -> None:
    stuck, other = Owner(tokenizers, 2).sent
    stuck.tokenizer, other.tokenizer = 0, 1
    num_stuck = 0
    while not any(aborts for _, aborts in tokenizers.links._tokenizer_aborts):
        tokenizers.links.abort(stuck)
        assert tokenizers.aborted() == stuck.request.id
        num_stuck += 1
    tokenizers.links.abort(other)
    assert tokenizers.aborted() == tokenizers.aborted(1) == other.request.id
    for _ in range(num_stuck):
        assert tokenizers.aborted(0) == stuck.request.id
        tokenizers.links.flush()
    assert not any(aborts for _, aborts in tokenizers.links._tokenizer_aborts)


def test_engine_gets_lease_renewals_of_open_requests(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ids = [request_id(0, 1), request_id(0, 7)]
    tokenizers.links.renew(ids)
    tokenizers.links.renew(ids)
    received = tokenizers.engine.receive(DEADLINE_MS)
    assert received is not None
    assert isinstance(received[0], RenewLeases)
    assert bytes(received[1]) == array("Q", ids).tobytes()
    assert tokenizers.engine.receive(0) is None, "a second has not passed"
    now += 1
    tokenizers.links.renew(ids)
    assert tokenizers.engine.receive(DEADLINE_MS) is not None
