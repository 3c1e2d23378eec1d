"""Pieces reach the sockets of reading clients, whole and in order, and no other socket."""

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import httptools
import pytest
import pytest_asyncio
import uvicorn

from headrace.board.board import Board, Seat
from headrace.frontend.admission.admission import Admission, AdmissionLimits
from headrace.frontend.admission.api_key_auth import ApiKeyAuth
from headrace.frontend.admission.gate import Gate
from headrace.frontend.dispatcher import Dispatcher
from headrace.frontend.forwarder import Forwarder
from headrace.frontend.http.connection import Connection
from headrace.frontend.http.deadlines import Deadlines
from headrace.frontend.http.socket_writer import TURN, Streams, Written
from headrace.frontend.http.start_queue import StartQueue
from headrace.frontend.open_requests import OpenRequests
from headrace.ipc.inflight import InflightRequest
from headrace.ipc.messages import MAX_SEQUENCES, Head, ResponseFrames, request_id
from headrace.ipc.router import Router

DEADLINE_S = 120
SOCKET_BYTES = 1 << 16  # that fit in a socket whose client does not read
NUM_CLIENTS = 60
NUM_ROUNDS = 40
REQUESTS = [request_id(3, counter) for counter in range(1, 5)]
EVENTS = Head(200, "text/event-stream")


class Pairs:
    """A table of streams, and both ends of sockets."""

    def __init__(self) -> None:
        self.streams = Streams()
        self._sockets: list[socket.socket] = []

    def connect(self, request: int) -> socket.socket:
        """Open a request on a socket; return the other end."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        self._sockets += (ours, theirs)
        self.streams.open(request, ours.fileno())
        return theirs

    def write(self, *rows: tuple[int, bytes, bool, int], row: int = 0, start: int = 0) -> Written:
        """Write rows: the sequence, a piece of its answer, whether it is the last; what is told."""
        ids, pieces, last, told = zip(*rows, strict=True)
        frames = ResponseFrames.of({}, ids, map(len, pieces), last, told)
        return self.streams.write(frames, b"".join(pieces), row, start)

    def close(self) -> None:
        for end in self._sockets:
            end.close()


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    made = Pairs()
    yield made
    made.close()


def heard(client: socket.socket) -> bytes:
    pieces = []
    with suppress(BlockingIOError):
        while piece := client.recv(1 << 20):
            pieces.append(piece)
    return b"".join(pieces)


def test_each_gets_its_own_as_chunks_in_order(pairs: Pairs) -> None:
    one, other = pairs.connect(REQUESTS[0]), pairs.connect(REQUESTS[1])
    long = bytes(300)
    rows = [(REQUESTS[0], b"a", False, 1), (REQUESTS[1], long, False, 1)]
    written = pairs.write(*rows, (REQUESTS[0] + 1, b"bc", False, 2))
    assert (written.row, written.start, written.num_bytes) == (3, 303, 303)
    assert list(written.left) == []
    assert heard(one) == b"1\r\na\r\n2\r\nbc\r\n"
    assert heard(other) == b"12c\r\n" + long + b"\r\n"


def test_ends_and_unknown_requests_are_left(pairs: Pairs) -> None:
    client = pairs.connect(REQUESTS[0])
    rows = [(REQUESTS[1], b"xx", False, 1), (REQUESTS[0], b"end", True, 9)]
    written = pairs.write(*rows, (REQUESTS[0], b"late", False, 9))
    assert list(written.left) == [(0, 0, 0), (2, 1, 0), (5, 2, 0)], "a left request stays left"
    assert written.num_bytes == 0
    assert heard(client) == b""


def test_an_empty_piece_is_no_chunk(pairs: Pairs) -> None:
    client = pairs.connect(REQUESTS[0])
    assert not list(pairs.write((REQUESTS[0], b"", False, 1), (REQUESTS[0], b"a", False, 1)).left)
    assert heard(client) == b"1\r\na\r\n", "an empty one would end the answer"


def test_rows_are_written_a_turn_at_a_time(pairs: Pairs) -> None:
    client = pairs.connect(REQUESTS[0])
    rows = [(REQUESTS[0], b"%03d" % i, False, i) for i in range(TURN + 2)]
    first = pairs.write(*rows)
    assert (first.row, first.start) == (TURN, 3 * TURN)
    assert heard(client).count(b"\r\n") == 2 * TURN
    second = pairs.write(*rows, row=first.row, start=first.start)
    assert (second.row, second.start, second.num_bytes) == (TURN + 2, 3 * TURN + 6, 6)
    assert heard(client) == b"3\r\n%03d\r\n3\r\n%03d\r\n" % (TURN, TURN + 1)


def test_of_a_piece_that_does_not_fit_it_is_known_what_did(pairs: Pairs) -> None:
    client = pairs.connect(REQUESTS[0])
    piece = bytes(range(256)) * 8192
    written = pairs.write((REQUESTS[0], piece, False, 1), (REQUESTS[0], b"next", False, 2))
    (_, row, num_written), behind = list(written.left)
    chunk = b"%x\r\n" % len(piece) + piece + b"\r\n"
    assert 0 < num_written < len(chunk)
    assert (row, behind) == (0, (len(piece), 1, 0)), "what comes behind it must not overtake it"
    assert heard(client) == chunk[:num_written]


def test_a_client_that_has_gone_is_left(pairs: Pairs) -> None:
    client = pairs.connect(REQUESTS[0])
    client.close()
    assert list(pairs.write((REQUESTS[0], b"a", False, 1)).left) == [(0, 0, 0)]


def test_nothing_is_written_for_a_closed_request(pairs: Pairs) -> None:
    client = pairs.connect(REQUESTS[0])
    pairs.streams.close(REQUESTS[0])
    pairs.streams.close(REQUESTS[1])
    assert list(pairs.write((REQUESTS[0], b"a", False, 1)).left) == [(0, 0, 0)]
    assert heard(client) == b""


def test_delivered_tokens_are_counted_by_sequence(pairs: Pairs) -> None:
    pairs.connect(REQUESTS[0])
    assert pairs.streams.num_delivered(REQUESTS[0]) == {}
    first, third = REQUESTS[0], REQUESTS[0] + 2
    pairs.write((first, b"a", False, 1), (third, b"b", False, 7), (first, b"c", False, 3))
    pairs.write((first, b"end", True, 1 << 31 | 4), (third, b"left", False, 8))
    assert pairs.streams.num_delivered(REQUESTS[0]) == {0: 1 << 31 | 4, 2: 8}, (
        "also where it is left"
    )
    assert pairs.streams.num_delivered(REQUESTS[1]) == {}


REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\n\r\n{}"
)


class FakeLinks(Router):
    """Takes everything, and sends it nowhere."""

    def __init__(self) -> None:
        self.forwarded: asyncio.Queue[int] = asyncio.Queue()
        self.aborted: asyncio.Queue[int] = asyncio.Queue()

    def forward(self, sent: InflightRequest) -> bool:
        self.forwarded.put_nowait(sent.request.id)
        return True

    def flush(self) -> None:
        pass

    def abort(self, sent: InflightRequest) -> None:
        self.aborted.put_nowait(sent.request.id)


class Site:
    """A frontend on real sockets, whose ring is the test."""

    def __init__(self) -> None:
        self._board = Board.create([Seat("frontend", 0), Seat("engine", 0)])
        slot = self._board.slot("frontend")
        self.open_requests = OpenRequests(0, slot)
        self.links = FakeLinks()
        limits = AdmissionLimits(1000, 1 << 20)
        gate = Gate(ApiKeyAuth([]), Admission(limits), 1000, self._board, slot, [10 * NUM_CLIENTS])
        forwarder = Forwarder(self.open_requests, self.links, slot, gate, 1000)
        self.dispatcher = Dispatcher(asyncio.get_running_loop(), self.open_requests, slot)
        deadlines: Deadlines[Connection] = Deadlines(DEADLINE_S)
        http: Any = partial(Connection, deadlines, deadlines, StartQueue(), 10 * NUM_CLIENTS)
        app: Any = forwarder.begin
        options: Any = {"http": http, "interface": "asgi3", "proxy_headers": False}
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, **options)
        self._server = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._clients: list[Client] = []
        self._serving = asyncio.create_task(self._server._serve([self._listener]))

    async def connect(self) -> "Client":
        """Return a client that has sent a request, with its id here."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        client.connect(self._listener.getsockname())
        reader, writer = await asyncio.open_connection(sock=client)
        writer.write(REQUEST)
        id = await asyncio.wait_for(self.links.forwarded.get(), DEADLINE_S)
        self._clients.append(Client(id, reader, writer))
        return self._clients[-1]

    async def deliver(self, frames: ResponseFrames, data: bytes) -> None:
        self.dispatcher.take(frames, data)
        while self.dispatcher:
            await asyncio.sleep(0)

    async def stop(self) -> None:
        for client in self._clients:
            client.leave()
        self._server.should_exit = True
        await asyncio.wait_for(self._serving, DEADLINE_S)


class Client:
    """A client that reads one answer."""

    def __init__(self, id: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.id, self._reader, self._writer = id, reader, writer
        self.expected = b""
        self.has_head = False
        self._body: list[bytes] = []
        self._is_complete = False
        self._parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True

    def take(self) -> bool:
        """Read what waits in the socket, without the event loop; return whether there was some."""
        number = self._writer.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(number)) as own:
            found = heard(own)
        self._parser.feed_data(found)
        return len(found) > 0

    async def answer(self) -> bytes:
        """Read to the end of the answer."""
        while not self._is_complete:
            self._parser.feed_data(await asyncio.wait_for(self._reader.read(1 << 16), DEADLINE_S))
        return b"".join(self._body)

    def ask_again(self) -> None:
        self._writer.write(REQUEST)

    def leave(self) -> None:
        self._writer.transport.abort()


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    yield made
    await made.stop()


async def deliver_round(
    site: Site, clients: list[Client], gone: list[Client], chance: random.Random
) -> None:
    """Send pieces to most clients, some of them last ones, and to all clients that have left."""
    spoken = [client for client in clients if chance.random() < 0.8]
    heads = {client.id: EVENTS for client in spoken if not client.has_head}
    last = [client.has_head and chance.random() < 0.05 for client in spoken] + [False] * len(gone)
    told = spoken + gone
    pieces = [b"%d:%s " % (client.id, b"x" * chance.randrange(300)) for client in told]
    ids = [client.id + chance.randrange(3) for client in told]
    for client, piece in zip(told, pieces, strict=True):
        client.has_head = True
        client.expected += piece
    frames = ResponseFrames.of(heads, ids, map(len, pieces), last, [1] * len(ids))
    await site.deliver(frames, b"".join(pieces))
    for client, is_last in zip(told, last, strict=True):
        if is_last:
            assert await client.answer() == client.expected
            client.leave()
            clients.remove(client)


async def test_answers_are_whole_while_others_come_and_go(site: Site) -> None:
    chance = random.Random(7)
    clients = [await site.connect() for _ in range(NUM_CLIENTS)]
    gone: list[Client] = []  # the numbers of their sockets are soon those of others
    for _ in range(NUM_ROUNDS):
        gone = [client for client in chance.sample(clients, 3) if client.has_head]
        for client in gone:
            client.leave()
            clients.remove(client)
        clients += [await site.connect() for _ in range(NUM_CLIENTS - len(clients))]
        await deliver_round(site, clients, gone, chance)
    ids = [client.id for client in clients if client.has_head]
    ends = ResponseFrames.of({}, ids, [0] * len(ids), [True] * len(ids), [1] * len(ids))
    await site.deliver(ends, b"")
    for client in clients:
        if client.has_head:
            assert await client.answer() == client.expected


async def test_disconnect_aborts_the_open_request_of_a_connection(
    site: Site,
) -> None:
    client, other = await site.connect(), await site.connect()
    await site.deliver(ResponseFrames.of({client.id: EVENTS}, [client.id], [3], [True]), b"end")
    assert await client.answer() == b"end"
    client.ask_again()
    second = await asyncio.wait_for(site.links.forwarded.get(), DEADLINE_S)
    client.leave()
    assert await asyncio.wait_for(site.links.aborted.get(), DEADLINE_S) == second
    assert [open_request.id for open_request in site.open_requests] == [other.id]
    assert site.links.aborted.empty()


async def test_a_client_that_reads_late_gets_everything_in_order(site: Site) -> None:
    client = await site.connect()
    pieces = [b"%d " % i * (3 if i < 5 else SOCKET_BYTES) for i in range(25)]
    for i, piece in enumerate(pieces):
        heads = {} if i else {client.id: EVENTS}
        await site.deliver(ResponseFrames.of(heads, [client.id], [len(piece)], [False], [i]), piece)
    (open_request,) = site.open_requests
    assert open_request.unsent, "it does not read, so much of it waits"
    await site.deliver(ResponseFrames.of({}, [client.id], [3], [True], [25]), b"end")
    assert await client.answer() == b"".join(pieces) + b"end"


async def test_sequences_of_one_request_never_overtake_unsent_bytes(
    site: Site,
) -> None:
    """A sequence opens the stream, and the next fills the socket, within one turn."""
    client = await site.connect()
    sequences = range(client.id, client.id + 3)
    pieces = [b"head ", b"first ", b"x" * (40 * SOCKET_BYTES), b"third "]
    frames = ResponseFrames.of({client.id: EVENTS}, sequences[:1], [5], [False], [1])
    await site.deliver(frames, pieces[0])
    told = [1] * 2
    frames = ResponseFrames.of({}, sequences[:2], map(len, pieces[1:3]), [False] * 2, told)
    site.dispatcher.take(frames, b"".join(pieces[1:3]))
    begun = client.take()  # there is room again, of which the event loop has not heard
    assert begun
    site.dispatcher.take(ResponseFrames.of({}, sequences[2:], [6], [False], [1]), pieces[3])
    await site.deliver(ResponseFrames.of({}, sequences[:1], [0], [True], [1]), b"")
    assert await client.answer() == b"".join(pieces)


async def test_resent_request_keeps_what_clients_have_received(site: Site) -> None:
    client = await site.connect()
    for told in (1, 2, 3):
        heads = {client.id: EVENTS} if told == 1 else {}
        frames = ResponseFrames.of(heads, [client.id + 1], [1], [False], [told])
        await site.deliver(frames, b"%d" % told)
    (sent,) = site.open_requests.incomplete()
    (open_request,) = site.open_requests
    site.open_requests.renumber(open_request)
    client_id = open_request.id
    assert sent.num_delivered == {1: 3}
    lost = ResponseFrames.of({}, [client.id + 1], [4], [False], [4])
    await site.deliver(lost, b"lost")
    again = ResponseFrames.of({client_id: EVENTS}, [client_id + 1], [1], [True], [4])
    await site.deliver(again, b"4")
    assert await client.answer() == b"1234"


def test_sequences_of_a_request_share_its_stream(pairs: Pairs) -> None:
    client = pairs.connect(REQUESTS[0])
    last = REQUESTS[0] + MAX_SEQUENCES - 1
    assert not list(pairs.write((last, b"a", False, 5)).left)
    assert heard(client) == b"1\r\na\r\n"
    assert pairs.streams.num_delivered(REQUESTS[0]) == {MAX_SEQUENCES - 1: 5}


def test_bytes_of_pieces_that_were_sent_are_counted(pairs: Pairs) -> None:
    pairs.connect(REQUESTS[0])
    pairs.write((REQUESTS[0], b"one", False, 1), (REQUESTS[0] + 1, b"three", False, 1))
    assert pairs.streams.num_bytes(REQUESTS[0]) == 8
    list(pairs.write((REQUESTS[0], b"the last", True, 2)).left)
    assert pairs.streams.num_bytes(REQUESTS[0]) == 8, "the caller writes it"
    assert pairs.streams.num_bytes(REQUESTS[1]) == 0
