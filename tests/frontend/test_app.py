"""The application, asked as uvicorn asks it, with the ring played by the test."""

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.api_keys import digest
from headrace.board import Board, Field, Seat, Slot, Span, State
from headrace.frontend.admin import Admin
from headrace.frontend.admission import Admission, AdmissionLimits
from headrace.frontend.app import Forwarder, build_app
from headrace.frontend.connection import EXTENSION, RECEIVED_AT
from headrace.frontend.door import Door
from headrace.frontend.exchanges import MAX_UNSENT_BYTES, Exchanges
from headrace.frontend.keyring import Keyring
from headrace.http_counts import CLIENT_LEFT, HttpCounts
from headrace.links import Links
from headrace.messages import Head, HttpRequest, Times
from headrace.sent import Sent
from headrace.sockets import Frame

LIMIT = 100  # bytes of a body
DEADLINE_S = 20
Message = dict[str, Any]
LEFT: Message = {"type": "http.disconnect"}
MAX_REQUESTS = 50


class FakeLinks(Links):
    """Keeps what is sent. `full` refuses."""

    def __init__(self) -> None:
        self.forwarded: asyncio.Queue[tuple[HttpRequest, bytes]] = asyncio.Queue()
        self.aborted: list[int] = []
        self.full = False

    def forward(self, sent: Sent) -> bool:
        if not self.full:
            self.forwarded.put_nowait((sent.request, sent.body))
        return not self.full

    def abort(self, request: int) -> None:
        self.aborted.append(request)


@dataclass
class Connection:
    """A client's side of one request."""

    sent: list[Message] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)  # which of them came past the application
    _incoming: "asyncio.Queue[Message]" = field(default_factory=asyncio.Queue)
    _writable: asyncio.Event = field(default_factory=asyncio.Event)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    on_lost: Callable[[], None] | None = None
    is_cut: bool = False

    def __post_init__(self) -> None:
        self._writable.set()

    def say(self, *messages: Message) -> None:
        for message in messages:
            self._incoming.put_nowait(message)

    def stop_reading(self) -> None:
        self._writable.clear()

    def cut(self) -> None:
        """Be closed by the server, as `frontend.connection` closes."""
        self.is_cut = True
        self._writable.set()
        self.leave()

    def leave(self) -> None:
        """Close, and have the server notice."""
        if self.on_lost is not None:
            self.on_lost()

    def read_on(self) -> None:
        self._writable.set()

    async def receive(self) -> Message:
        return await self._incoming.get()

    def write_piece(self, data: Frame) -> bool:
        if self._writable.is_set():
            self.pieces.append(len(self.sent))
            self.sent.append({"body": bytes(data), "more_body": True})
        return self._writable.is_set()

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self._news.set()
        await self._writable.wait()

    async def until(self, num_messages: int) -> None:
        """Wait until so many messages have been sent."""
        while len(self.sent) < num_messages:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), DEADLINE_S)

    @property
    def status(self) -> int:
        assert self.sent[0]["type"] == "http.response.start"
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def is_complete(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", False)


def body_of(*chunks: bytes) -> list[Message]:
    return [
        {"type": "http.request", "body": chunk, "more_body": i < len(chunks)}
        for i, chunk in enumerate(chunks, 1)
    ]


class Site:
    """An application whose tokenizers and detokenizers are the test."""

    def __init__(self, *keys: bytes) -> None:
        self.board = Board.create([Seat("frontend", 0), Seat("engine", 0)])
        self.exchanges = Exchanges(0, self.slot)
        self.links = FakeLinks()
        admission = Admission(AdmissionLimits(MAX_REQUESTS, 1000, 10 * LIMIT))
        keyring = Keyring(map(digest, keys))
        door = Door(keyring, admission, LIMIT, self.board, self.slot)
        forwarder = Forwarder(self.exchanges, self.links, self.slot, door, LIMIT)
        self.door = door
        admin = Admin(Keyring([digest(b"admin")]), self.board, self.slot, os.getpid())
        self._app = build_app(self.board, forwarder, door, admin)

    @property
    def slot(self) -> Slot:
        return self.board.slot("frontend")

    def ask(
        self,
        connection: Connection,
        path: str = "/v1/completions",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        method: str = "POST",
    ) -> "asyncio.Task[None]":
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": list(headers),
            "extensions": {EXTENSION: connection, RECEIVED_AT: time.monotonic_ns()},
        }
        return asyncio.create_task(self._run(scope, connection))

    async def _run(self, scope: dict[str, Any], connection: Connection) -> None:
        await asyncio.wait_for(self._app(scope, connection.receive, connection.send), DEADLINE_S)

    async def forwarded(self) -> tuple[HttpRequest, bytes]:
        return await asyncio.wait_for(self.links.forwarded.get(), DEADLINE_S)

    def answer(self, id: int, data: bytes, last: bool, head: Head | None = None) -> None:
        self.exchanges.deliver(id, head, data, last, 0)


JSON = Head(200, "application/json")
EVENTS = Head(200, "text/event-stream")


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    os.close(made.board.fd)


def answered(site: Site) -> dict[int, int]:
    row = HttpCounts(site.slot.http_words).row("POST", "/v1/completions")
    return {status: count for status, count in row.answers.items() if count}


async def test_the_body_goes_on_as_it_came(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b'{"a"', b"", b": not JSON"))
    task = site.ask(connection, "/v1/é")
    request, body = await site.forwarded()
    assert (request.method, request.path) == ("POST", "/v1/é")
    assert body == b'{"a": not JSON'
    site.answer(request.id, b"", True, JSON)
    await task


async def test_requests_with_one_api_key_share_its_part(site: Site) -> None:
    keys = []
    for name, value in [
        (b"x-other", b"a"),
        *[(b"authorization", b"Bearer " + k) for k in (b"a", b"a", b"b")],
    ]:
        connection = Connection()
        connection.say(*body_of(b"{}"))
        task = site.ask(connection, headers=((name, value),))
        request, _ = await site.forwarded()
        keys.append(request.key)
        site.answer(request.id, b"", True, JSON)
        await task
    nobody, mine, again, yours = keys
    assert nobody == 0
    assert mine == again != yours
    assert mine and yours


async def test_a_whole_answer_has_its_status_type_and_length(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    task = site.ask(connection)
    request, _ = await site.forwarded()
    site.answer(request.id, b'{"error": 1}', True, Head(404, "application/json"))
    await task
    assert (connection.status, answered(site)) == (404, {404: 1})
    assert connection.headers == {b"content-type": b"application/json", b"content-length": b"12"}
    assert connection.body == b'{"error": 1}'
    assert connection.is_complete
    assert len(connection.sent) == 2
    assert site.links.aborted == []
    assert len(site.exchanges) == 0


async def test_a_stream_is_written_as_it_comes(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    task = site.ask(connection)
    request, _ = await site.forwarded()
    site.answer(request.id, b"one", False, EVENTS)
    await connection.until(2)
    assert connection.headers[b"content-type"] == b"text/event-stream"
    assert b"content-length" not in connection.headers
    assert (connection.body, connection.is_complete) == (b"one", False)
    site.answer(request.id, b"two", False)
    await connection.until(3)
    site.answer(request.id, b"three", True)
    await task
    assert (connection.body, connection.is_complete) == (b"onetwothree", True)
    assert site.links.aborted == []


async def test_the_middle_of_a_stream_wakes_nobody(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    task = site.ask(connection)
    request, _ = await site.forwarded()
    site.answer(request.id, b"one", False, EVENTS)
    await connection.until(2)
    await asyncio.sleep(0)  # the application waits for more
    for piece in (b"two", b"", b"three"):
        site.answer(request.id, piece, False)
    site.answer(request.id, b"four", True)
    await task
    assert connection.body == b"onetwothreefour"
    assert connection.pieces == [2], "what is empty is not written; then the application is awake"
    assert connection.is_complete
    assert site.slot[Field.BYTES_OUT] == len(connection.body)


async def test_a_client_that_reads_on_gets_everything_in_order(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    task = site.ask(connection)
    request, _ = await site.forwarded()
    site.answer(request.id, b"1", False, EVENTS)
    await connection.until(2)
    await asyncio.sleep(0)
    connection.stop_reading()
    site.answer(request.id, b"2", False)
    await connection.until(3)  # the application has it, and waits for the client
    connection.read_on()
    site.answer(request.id, b"3", False)
    assert connection.pieces == []
    site.answer(request.id, b"4", True)
    await task
    assert connection.body == b"1234"


async def test_what_comes_while_the_client_does_not_read_is_written_together(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    task = site.ask(connection)
    request, _ = await site.forwarded()
    connection.stop_reading()
    site.answer(request.id, b"one", False, EVENTS)
    await connection.until(1)
    for piece in (b"two", b"three"):
        site.answer(request.id, piece, False)
    site.answer(request.id, b"", True)
    connection.read_on()
    await task
    assert [m["body"] for m in connection.sent[1:]] == [b"one", b"twothree"]
    assert connection.is_complete


async def test_a_client_that_reads_too_slowly_is_cut_off(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    task = site.ask(connection)
    request, _ = await site.forwarded()
    connection.stop_reading()
    site.answer(request.id, b"one", False, EVENTS)
    await connection.until(1)
    site.answer(request.id, bytes(MAX_UNSENT_BYTES + 1), False)
    await task
    assert connection.is_cut
    assert not connection.is_complete, "so that the server closes the connection"
    assert site.links.aborted == [request.id]


@pytest.mark.parametrize("pieces", [[], [b"one"]])
async def test_a_client_that_leaves_aborts_its_request(site: Site, pieces: list[bytes]) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    task = site.ask(connection)
    request, _ = await site.forwarded()
    for piece in pieces:
        site.answer(request.id, piece, False, EVENTS)
        await connection.until(2)
    connection.leave()
    await task
    assert site.links.aborted == [request.id]
    assert len(site.exchanges) == 0
    assert site.slot[Field.DISCONNECTS] == 1
    assert site.slot[Field.RESPONSES] == 0


async def test_a_handler_that_is_cancelled_aborts_its_request(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    task = site.ask(connection)
    request, _ = await site.forwarded()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert site.links.aborted == [request.id]
    assert len(site.exchanges) == 0


async def test_a_client_that_leaves_before_the_body_is_there_is_forgotten(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"{", b"}")[:1], LEFT)
    await site.ask(connection)
    assert (connection.sent, answered(site)) == ([], {CLIENT_LEFT: 1})
    assert site.links.forwarded.empty()
    assert site.links.aborted == []


async def test_a_body_declared_too_large_is_refused_unread(site: Site) -> None:
    connection = Connection()  # which says nothing
    await site.ask(connection, headers=((b"content-length", b"101"),))
    assert (connection.status, answered(site)) == (413, {413: 1})
    error = json.loads(connection.body)["error"]
    assert error["code"] == "body_too_large"
    assert "100 bytes (--max-body-bytes)" in error["message"]


async def test_a_body_that_grows_too_large_is_refused(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"x" * 60, b"x" * 41, b"x")[:2])
    await site.ask(connection, headers=((b"content-length", b"nonsense"),))
    assert (connection.status, answered(site)) == (413, {413: 1})
    assert site.links.forwarded.empty()


async def test_a_body_of_just_the_limit_is_taken(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"x" * LIMIT))
    task = site.ask(connection, headers=((b"content-length", b"100"),))
    request, body = await site.forwarded()
    site.answer(request.id, b"", True, JSON)
    await task
    assert len(body) == LIMIT


async def test_full_links_are_answered_with_try_again(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    site.links.full = True
    await site.ask(connection)
    assert (connection.status, answered(site)) == (503, {503: 1})
    assert connection.headers[b"retry-after"] == b"1"
    assert json.loads(connection.body)["error"]["code"] == "overloaded"
    assert len(site.exchanges) == 0


async def test_traffic_is_counted(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"12345"))
    task = site.ask(connection)
    request, _ = await site.forwarded()
    site.answer(request.id, b"123", False, EVENTS)
    await connection.until(2)
    site.answer(request.id, b"4567", True)
    await task
    fields = (Field.REQUESTS, Field.RESPONSES, Field.DISCONNECTS, Field.BYTES_IN, Field.BYTES_OUT)
    assert [site.slot[f] for f in fields] == [1, 1, 0, 5, 7]
    assert answered(site) == {200: 1}


async def test_concurrent_requests_get_their_own_answers(site: Site) -> None:
    connections = [Connection() for _ in range(20)]
    for i, connection in enumerate(connections):
        connection.say(*body_of(str(i).encode()))
    tasks = [site.ask(connection) for connection in connections]
    requests = [await site.forwarded() for _ in connections]
    for request, body in reversed(requests):
        site.answer(request.id, b"answer " + body, True, JSON)
    await asyncio.gather(*tasks)
    assert [c.body for c in connections] == [f"answer {i}".encode() for i in range(20)]


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (b"", 401),
        (b"Bearer", 401),
        (b"Bearer wrong", 401),
        (b"Basic right", 401),
        (b"right", 401),
        (b"Bearer right", 200),
        (b"bearer  other ", 200),
    ],
)
async def test_only_those_with_a_key_come_in(authorization: bytes, status: int) -> None:
    site = Site(b"right", b"other")
    connection = Connection()
    connection.say(*body_of(b"{}"))
    task = site.ask(connection, headers=((b"authorization", authorization),))
    if status == 200:
        request, _ = await site.forwarded()
        site.answer(request.id, b"", True, JSON)
    await task
    assert connection.status == status
    assert site.slot[Field.UNAUTHORIZED] == (status == 401)
    assert (connection.headers.get(b"www-authenticate") == b"Bearer") == (status == 401)
    os.close(site.board.fd)


async def test_a_refusal_is_in_the_words_of_the_api() -> None:
    site = Site(b"right")
    connection = Connection()
    await site.ask(connection, "/v1/messages", headers=((b"x-api-key", b"wrong"),))
    assert connection.status == 401
    body = json.loads(connection.body)
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
    os.close(site.board.fd)


async def test_who_stops_answers_what_is_open_and_takes_no_more(site: Site) -> None:
    for slot in site.board.slots:
        slot.enter(State.READY)
    early = Connection()
    early.say(*body_of(b"{}"))
    task = site.ask(early)
    request, _ = await site.forwarded()
    site.door.is_closed = True
    late, ready, health = Connection(), Connection(), Connection()
    await site.ask(late)
    assert (late.status, late.headers[b"retry-after"]) == (503, b"1")
    assert json.loads(late.body)["error"]["code"] == "stopping"
    await site.ask(ready, "/ready", method="GET")
    await site.ask(health, "/health", method="GET")
    assert (ready.status, health.status) == (503, 200)
    site.answer(request.id, b"answered", True, JSON)
    await task
    assert (early.status, early.body) == (200, b"answered")


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_health_needs_no_key(path: str) -> None:
    site = Site(b"right")
    connection = Connection()
    await site.ask(connection, path, method="GET")
    assert connection.status == 503
    assert "engine 0 is absent" in json.loads(connection.body)["reasons"]
    os.close(site.board.fd)


@pytest.mark.parametrize("what", ["requests", "tokens", "bytes"])
async def test_overload_is_told_before_the_body_is_read(site: Site, what: str) -> None:
    if what == "requests":
        site.slot[Field.ADMITTED] = MAX_REQUESTS
    elif what == "tokens":
        site.board.slot("engine")[Field.WAITING_TOKENS] = 1000
    else:
        site.slot[Field.KEPT_BYTES] = 10 * LIMIT
    connection = Connection()  # which says nothing
    await site.ask(connection, headers=((b"content-length", b"5"),))
    assert connection.status == 429
    assert int(connection.headers[b"retry-after"]) > 0
    assert json.loads(connection.body)["error"]["code"] == "rate_limit_exceeded"
    assert site.slot[Field.OVERLOADS] == 1
    by_limit = [site.slot[Field.REQUEST_OVERLOADS], site.slot[Field.TOKEN_OVERLOADS]]
    assert by_limit == [what == "requests", what == "tokens"]


async def test_what_there_is_to_know_is_told_under_load(site: Site) -> None:
    site.slot[Field.ADMITTED] = MAX_REQUESTS
    connection = Connection()
    connection.say(*body_of(b""))
    task = site.ask(connection, "/metrics", method="GET")
    request, _ = await site.forwarded()
    site.answer(request.id, b"all is well", True, JSON)
    await task
    assert connection.status == 200


async def test_bodies_count_while_they_are_read(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"123", b"45", b"")[:2])
    task = site.ask(connection)
    while connection._incoming.qsize():
        await asyncio.sleep(0)
    assert site.slot[Field.HELD_BYTES] == 5
    connection.say(LEFT)
    await task
    assert site.slot[Field.HELD_BYTES] == 0
    assert (site.slot[Field.OPEN_REQUESTS], site.slot[Field.ADMITTED]) == (0, 0)


async def test_an_answer_may_bring_headers_of_its_own(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    task = site.ask(connection)
    request, _ = await site.forwarded()
    site.answer(request.id, b"", True, Head(405, "application/json", None, [("allow", "GET")]))
    await task
    assert connection.headers[b"allow"] == b"GET"
    assert b"retry-after" not in connection.headers


async def test_who_finds_the_engines_queue_full_is_told_when_to_come_again(site: Site) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    task = site.ask(connection)
    request, _ = await site.forwarded()
    site.answer(request.id, b"{}", True, Head(429, "application/json"))
    await task
    assert int(connection.headers[b"retry-after"]) > 0


async def test_what_the_engine_had_no_part_in_counts_as_no_request_of_it(site: Site) -> None:
    connection = Connection()
    task = site.ask(connection, method="GET", path="/v1/models")
    connection.say(*body_of(b""))
    request, _ = await site.forwarded()
    site.answer(request.id, b"{}", True, Head(200, "application/json"))
    await task
    assert not sum(site.slot.histogram(Span.WHOLE).counts)


TIMES = [10, 21, 33, 46, 60, 75, 91]


@pytest.mark.parametrize("is_asked", [True, False])
async def test_hops_are_counted_and_told_on_demand(site: Site, is_asked: bool) -> None:
    connection = Connection()
    connection.say(*body_of(b"{}"))
    headers = ((b"x-request-timing", b"1"),) if is_asked else ()
    task = site.ask(connection, headers=headers)
    request, _ = await site.forwarded()
    (exchange,) = site.exchanges
    ms = 1_000_000
    times = Times(*(exchange.received_at + at * ms for at in TIMES))
    site.answer(request.id, b"one", False, Head(200, "text/event-stream", times))
    await connection.until(2)
    site.answer(request.id, b"two", True)
    await task
    expected = (
        "accept;dur=10.000, parse;dur=11.000, tokenize;dur=12.000, submit;dur=13.000, "
        "queue;dur=14.000, prefill;dur=15.000, render;dur=16.000"
    )
    assert connection.headers.get(b"server-timing") == (expected.encode() if is_asked else None)
    for span in Span:
        if Span.LOOP_LAG < span <= Span.WHOLE:
            assert sum(site.slot.histogram(span).counts) == 1, span
    assert site.slot.histogram(Span.FIRST_TOKEN).sum == pytest.approx(0.091)
