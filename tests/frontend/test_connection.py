"""What a client may not do to a connection, over real sockets, served by uvicorn."""

import asyncio
import json
import math
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
import uvicorn

from headrace.frontend import connection as module
from headrace.frontend.arrivals import Arrivals
from headrace.frontend.connection import MAX_HEAD_BYTES, MIN_BYTES_PER_S, Connection
from headrace.frontend.deadlines import Deadlines
from headrace.frontend.main import KEEP_ALIVE_S
from headrace.frontend.request import Request

DEADLINE_S = 120
PATIENCE_S = 20.0
READER_PATIENCE_S = 0.05
LARGE = 1 << 20  # bytes of an answer; some fit into the buffers of sockets


async def read(request: Request) -> bytes:
    body = request.take_body()
    if body is not None:
        return body
    pieces = []
    while True:
        message = await request.receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def pour(request: Request) -> None:
    """Write as long as the client reads."""
    while request.is_writable:
        request.write(bytes(1 << 16))


class Site:
    """A server with one application, whose clients have time until `be_impatient`."""

    def __init__(
        self,
        max_connections: int = 100,
        reader_patience_s: float = DEADLINE_S,
        keep_alive_s: int = KEEP_ALIVE_S,
    ) -> None:
        self.deadlines: Deadlines[Connection] = Deadlines(PATIENCE_S)
        self.readers: Deadlines[Connection] = Deadlines(reader_patience_s)
        self.num_large = 0
        self._clients: list[Client] = []
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.go = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.is_leaving = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_heard = 0
        site = self

        class Counted(Connection):
            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                site.num_heard += len(data)

        http: Any = partial(
            *(Counted, self.deadlines, self.readers, Arrivals(), max_connections),
            is_leaving=lambda: self.is_leaving,
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.app,  # type: ignore[arg-type]  # called by `Connection` alone
                http=http,
                ws="none",
                interface="asgi3",
                lifespan="off",
                log_config=None,
                timeout_keep_alive=keep_alive_s,
                proxy_headers=False,
            )
        )
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def app(self, request: Request) -> None:
        self.has_begun.set()
        if request.path in ("/pour", "/large", "/brim"):
            self._answer_much(request)
            return
        if request.path == "/fail":
            raise ValueError("nobody has foreseen it")
        answer = self._tell if request.path in ("/told", "/steps") else self._answer
        task = asyncio.create_task(answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _answer_much(self, request: Request) -> None:
        match request.path:
            case "/pour":
                request.on_lost = partial(self.lost.put_nowait, "cut off")
                request.on_writable = partial(pour, request)
                request.begin(200, [])
                pour(request)
            case "/large":
                self.num_large += 1
                request.answer(200, [], bytes(LARGE))
            case "/brim":
                request.begin(200, [])
                while not request._cycle.transport.get_write_buffer_size():
                    request.write(bytes(1 << 12))  # until the kernel takes no more
                request.end()
                self.lost.put_nowait("answered")

    async def _tell(self, request: Request) -> None:
        if request.path == "/told":
            told = f"{request.method} {request.path} ".encode() + await read(request)
            request.answer(200, [], told)
            return
        request.begin(200, [])
        request.write(b"a")
        await self.go.wait()
        request.write(b"b")
        request.end()

    async def _answer(self, request: Request) -> None:
        match request.path:
            case "/echo":
                request.answer(200, [], await read(request))
            case "/refuse":
                request.answer(429, [], b"no")
            case "/stream":
                body = await read(request)
                request.begin(200, [])
                for piece in (b"a", b"", memoryview(body)):
                    request.write(piece)
                request.end(b"c")
            case "/wait":
                request.on_lost = partial(self.lost.put_nowait, "left")
                request.begin(200, [])
                request.write(b"a")
            case "/late":
                await read(request)
                await self.go.wait()
                request.answer(200, [], b"late")
                self.lost.put_nowait("nobody is told")
            case "/flood":
                request.begin(200, [])
                pour(request)
                request.on_writable = request.end
            case "/part":
                request.on_lost = partial(self.lost.put_nowait, "parted")
                request.begin(200, [])
                request.write(b"not all")
                request.break_off()

    async def run(self) -> None:
        serving = asyncio.create_task(self._server._serve([self._listener]))
        loop = asyncio.get_running_loop()
        while not serving.done():
            for connection in self.readers.passed(loop.time()):
                connection.on_reader_deadline()
            await asyncio.sleep(READER_PATIENCE_S / 10)
        await serving

    async def be_impatient(self) -> None:
        """Let all the time pass that clients have, once what they have said is here."""
        await self.hear()
        for connection in list(self.deadlines.passed(math.inf)):
            connection.on_deadline()

    async def hear(self) -> None:
        """Wait until clients are connected, and what they have said is here."""
        async with asyncio.timeout(DEADLINE_S):
            while not self.deadlines or self.num_heard < sum(c.num_said for c in self._clients):
                await asyncio.sleep(0)

    async def read_all(self) -> None:
        """Wait until what clients have said is here."""
        async with asyncio.timeout(DEADLINE_S):
            while self.num_heard < sum(client.num_said for client in self._clients):
                await asyncio.sleep(0)

    async def stop(self, running: "asyncio.Task[None]") -> None:
        for client in self._clients:
            client.writer.close()
        self._server.should_exit = self._server.force_exit = True
        await asyncio.wait_for(running, DEADLINE_S)

    async def is_left(self) -> None:
        """Wait until nobody is connected."""
        async with asyncio.timeout(DEADLINE_S):
            while self._server.server_state.connections:
                await asyncio.sleep(0)

    async def connect(self) -> "Client":
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        return client


class Client:
    """The other end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.num_said = 0

    def say(self, data: bytes) -> None:
        self.writer.write(data)
        self.num_said += len(data)

    async def response(self) -> tuple[int, bytes]:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        lines = head.decode().lower().split("\r\n")
        length = next(int(x.split(":")[1]) for x in lines if x.startswith("content-length"))
        body = await asyncio.wait_for(self.reader.readexactly(length), DEADLINE_S)
        return int(lines[0].split()[1]), body

    async def end(self) -> bytes:
        """Wait until the server closes; return what it says before."""
        with suppress(ConnectionResetError):
            return await asyncio.wait_for(self.reader.read(), DEADLINE_S)
        return b""


@pytest_asyncio.fixture
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    made = Site(**getattr(request, "param", {}))
    running = asyncio.create_task(made.run())
    yield made
    await made.stop(running)


def code(body: bytes) -> str:
    found: str = json.loads(body)["error"]["code"]
    return found


async def test_a_request_with_what_is_not_http_behind_it_is_not_begun(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /late HTTP/1.1\r\ncontent-length: 0\r\n\r\n\0 not HTTP\r\n\r\n")
    assert (await client.response())[0] == 400
    assert await client.end() == b""
    assert not site.has_begun.is_set()


async def test_requests_are_served_one_after_the_other(site: Site) -> None:
    client = await site.connect()
    for body in (b"one", b"", b"three"):
        client.say(b"POST /echo HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert await client.response() == (200, body)


async def test_who_asks_what_fails_is_parted_with_and_others_are_served(site: Site) -> None:
    failures: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, failed: failures.append(failed["exception"]))
    failing, other = await site.connect(), await site.connect()
    failing.say(b"GET /fail HTTP/1.1\r\n\r\n")
    other.say(b"GET /refuse HTTP/1.1\r\n\r\n")
    assert await failing.end() == b""
    assert (await other.response())[0] == 429
    assert [str(error) for error in failures] == ["nobody has foreseen it"]


async def test_a_connection_on_which_nothing_comes_is_closed(site: Site) -> None:
    client = await site.connect()
    await site.be_impatient()
    assert await client.end() == b""


@pytest.mark.parametrize(
    "start", [b"GET /echo HT", b"POST /echo HTTP/1.1\r\ncontent-length: 90\r\n\r\nonly this"]
)
async def test_a_request_that_does_not_come_is_told_so(site: Site, start: bytes) -> None:
    client = await site.connect()
    client.say(start)
    await site.be_impatient()
    status, body = await client.response()
    assert (status, code(body)) == (408, "request_timeout")
    assert await client.end() == b""


async def test_a_body_that_comes_fast_enough_has_time(site: Site) -> None:
    pieces, size = 8, round(MIN_BYTES_PER_S * PATIENCE_S)
    client = await site.connect()
    client.say(b"POST /echo HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (pieces * size))
    await site.hear()
    for _ in range(pieces - 1):
        client.say(b"x" * size)
        await site.be_impatient()
    client.say(b"x" * size)
    assert (await client.response())[0] == 200


async def test_pieces_that_come_together_are_one_body(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
    client.say(b"1\r\na\r\n2\r\nbc\r\n3\r\ndef\r\n0\r\n\r\n")
    assert await client.response() == (200, b"abcdef")


async def test_a_head_too_long_is_refused(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /echo HTTP/1.1\r\na: " + b"x" * (MAX_HEAD_BYTES + (1 << 19)))
    status, body = await client.response()
    assert (status, code(body)) == (431, "head_too_large")
    assert await client.end() == b""


@pytest.mark.parametrize("trailer", [b"a: b\r\n", b"a: " + b"x" * (1 << 20)])
async def test_a_trailer_too_long_is_refused(site: Site, trailer: bytes) -> None:
    client = await site.connect()
    client.say(b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n")
    await asyncio.wait_for(site.has_begun.wait(), DEADLINE_S)
    client.say(trailer * (2 * MAX_HEAD_BYTES // len(trailer) + 1))
    status, body = await client.response()
    assert (status, code(body)) == (431, "head_too_large")
    assert "the request's trailer is longer" in body.decode()
    assert await client.end() == b""


async def test_a_short_trailer_is_nothing(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n")
    client.say(b"a: b\r\n\r\n")
    assert await client.response() == (200, b"ok")


async def test_what_is_not_http_is_told_so(site: Site) -> None:
    client = await site.connect()
    client.say(b"\x16\x03\x01 not HTTP\r\n\r\n")
    status, body = await client.response()
    assert (status, code(body)) == (400, "invalid_http")


@pytest.mark.parametrize(
    "request_head",
    [
        b"POST /late HTTP/1.1\r\ncontent-length: 0\r\n\r\n",
        b"POST /late HTTP/1.1\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n123456789",
        b"GET /late HTTP/1.1\r\n\r\nGET /echo HTTP/1.1\r\n\r\n",
    ],
)
async def test_a_request_before_what_is_not_http_is_given_up_without_a_word(
    request_head: bytes, site: Site
) -> None:
    client = await site.connect()
    client.say(request_head)
    await asyncio.wait_for(site.has_begun.wait(), DEADLINE_S)
    client.say(b"\0 not HTTP\r\n\r\n")
    status, body = await client.response()
    assert (status, code(body)) == (400, "invalid_http")
    site.go.set()
    assert await asyncio.wait_for(site.lost.get(), DEADLINE_S) == "nobody is told"
    assert await client.end() == b""


@pytest.mark.parametrize("site", [{"max_connections": 2}], indirect=True)
async def test_a_client_too_many_is_sent_away(site: Site) -> None:
    clients = [await site.connect() for _ in range(2)]
    for client in clients:
        client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 2\r\n\r\n1")
    late = await site.connect()
    status, body = await late.response()
    assert (status, code(body)) == (503, "overloaded")
    for client in clients:
        client.say(b"2")


async def test_after_a_refusal_the_rest_of_the_body_is_ignored(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /refuse HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
    assert await client.response() == (429, b"no")
    client.say(b"x" * 1_000_000)
    client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 5\r\n\r\nagain")
    assert await client.response() == (200, b"again")


async def test_what_is_ignored_has_a_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IGNORED_BYTES", 1000)
    client = await site.connect()
    client.say(b"POST /refuse HTTP/1.1\r\ncontent-length: 1000000\r\n\r\n")
    assert await client.response() == (429, b"no")
    client.say(b"x" * 2000)
    assert await client.end() == b""


async def test_who_serves_is_told_when_the_client_leaves(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /wait HTTP/1.1\r\n\r\n")
    await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    client.writer.close()
    assert await asyncio.wait_for(site.lost.get(), DEADLINE_S) == "left"


async def test_pieces_of_a_stream_are_chunks_of_its_response(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /stream HTTP/1.1\r\ncontent-length: 20\r\n\r\n" + b"b" * 20)
    head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    assert b"transfer-encoding: chunked" in head
    chunks = b"1\r\na\r\n14\r\n" + b"b" * 20 + b"\r\n1\r\nc\r\n0\r\n\r\n"
    assert await asyncio.wait_for(client.reader.readexactly(len(chunks)), DEADLINE_S) == chunks
    client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 2\r\n\r\nok")
    assert await client.response() == (200, b"ok")


async def test_who_asks_a_server_that_leaves_is_answered_and_told_to_go(site: Site) -> None:
    client = await site.connect()
    site.is_leaving = True
    client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 2\r\n\r\nok")
    answer = await client.end()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close\r\n" in answer
    assert answer.endswith(b"ok")


async def test_a_client_that_waits_to_be_told_to_go_on_is_told(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")
    head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    assert head.startswith(b"HTTP/1.1 100 ")
    client.say(b"ok")
    assert await client.response() == (200, b"ok")


async def test_a_head_comes_without_a_body_where_that_is_all_there_is(site: Site) -> None:
    client = await site.connect()
    client.say(b"HEAD /refuse HTTP/1.1\r\n\r\n")
    head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    assert b"content-length: 2" in head


async def test_a_client_that_does_not_read_is_told_of_when_it_does(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /flood HTTP/1.0\r\ncontent-length: 0\r\n\r\n")
    answer = await client.end()
    assert b"transfer-encoding" not in answer[:1000]
    assert answer.endswith(bytes(1 << 16))


async def test_to_those_who_do_not_know_chunks_the_end_is_the_end(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /stream HTTP/1.0\r\ncontent-length: 2\r\n\r\nbb")
    assert (await client.end()).split(b"\r\n\r\n")[1] == b"abbc"


async def test_many_requests_at_once_are_answered_in_order(site: Site) -> None:
    client = await site.connect()
    for number in range(2000):
        client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 4\r\n\r\n%04d" % number)
    for number in range(2000):
        assert await client.response() == (200, b"%04d" % number)


async def test_requests_too_many_at_once_are_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PIPELINED", 10)
    client = await site.connect()
    client.say(b"GET /late HTTP/1.1\r\n\r\n" * 100)
    status, body = await client.response()
    assert (status, code(body)) == (429, "rate_limit_exceeded")
    assert "10 requests wait on this connection" in body.decode()
    assert await client.end() == b""


async def test_who_serves_may_part_in_the_middle(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /part HTTP/1.1\r\n\r\n")
    assert (await client.end()).endswith(b"not all\r\n"), "and no last chunk"
    assert await asyncio.wait_for(site.lost.get(), DEADLINE_S) == "parted"


@pytest.mark.parametrize("site", [{"reader_patience_s": READER_PATIENCE_S}], indirect=True)
async def test_a_client_that_does_not_read_its_answer_is_cut_off(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /pour HTTP/1.1\r\n\r\n")
    assert await asyncio.wait_for(site.lost.get(), DEADLINE_S) == "cut off"
    await site.is_left()


@pytest.mark.parametrize(
    "site", [{"reader_patience_s": READER_PATIENCE_S, "keep_alive_s": 0}], indirect=True
)
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_client_that_does_not_read_a_whole_answer_is_cut_off(
    site: Site, version: bytes
) -> None:
    client = await site.connect()
    client.say(b"GET /brim HTTP/%b\r\n\r\n" % version)
    assert await asyncio.wait_for(site.lost.get(), DEADLINE_S) == "answered"
    await site.is_left()


@pytest.mark.parametrize("site", [{"reader_patience_s": READER_PATIENCE_S}], indirect=True)
async def test_who_reads_no_answers_is_not_given_more(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /large HTTP/1.1\r\n\r\n" * 100)
    await site.is_left()
    assert 1 <= site.num_large < 20


async def test_who_reads_later_is_given_all(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /large HTTP/1.1\r\n\r\n" * 20)
    for _ in range(20):
        assert await client.response() == (200, bytes(LARGE))
    client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 2\r\n\r\nok")
    assert await client.response() == (200, b"ok")


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP\r\n"
INNER = b"GET /told?smuggled HTTP/1.1\r\nhost: x\r\n\r\n"  # a body that looks like a request
SIZED = b"content-length: %d\r\n\r\n%b" % (len(INNER), INNER)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nupgrade: h2c\r\n\r\n" % (
    len(INNER),
    INNER,
)
TOLD = b"POST /told " + INNER
UPGRADES = b"".join(
    [
        b"POST /told HTTP/1.1\r\n" + H2C + SIZED,
        b"GET /told HTTP/1.1\r\n" + H2C + b"\r\n",
        b"POST /told HTTP/1.1\r\n" + H2C + CHUNKED,
        b"GET /told HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"POST /told HTTP/1.1\r\n" + SIZED,
    ]
)


async def test_upgrade_is_ignored_split_at_every_byte(site: Site) -> None:
    client = await site.connect()
    for split in range(1, len(UPGRADES)):
        client.say(UPGRADES[:split])
        await site.read_all()
        client.say(UPGRADES[split:])
        for told in (TOLD, b"GET /told ", TOLD, b"GET /told ", TOLD):
            assert await client.response() == (200, told), split


async def test_upgrade_is_ignored_byte_by_byte(site: Site) -> None:
    client = await site.connect()
    for byte in UPGRADES:
        client.say(bytes([byte]))
        await site.read_all()
    for told in (TOLD, b"GET /told ", TOLD, b"GET /told ", TOLD):
        assert await client.response() == (200, told)


async def test_upgrade_and_close_is_answered_once(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /told HTTP/1.1\r\nupgrade: h2c\r\nconnection: close, upgrade\r\n" + SIZED)
    answer = await client.end()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert answer.endswith(b"\r\n\r\n" + TOLD)


@pytest.mark.parametrize(
    ("start", "status", "error"),
    [
        (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", 505, "http_version"),
        (b"GET / HTTP/3.1\r\nhost: x\r\n\r\n", 505, "http_version"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version"),
        (b"GET /\r\n\r\n", 505, "http_version"),
        (b"POST /echo HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n", 501, "transfer_encoding"),
        (
            b"POST /echo HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            *(501, "transfer_encoding"),
        ),
        (
            b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
            *(400, "invalid_http"),
        ),
        (
            b"POST /echo HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
            *(400, "invalid_http"),
        ),
        (b"POST /echo HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n", 400, "invalid_http"),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", 405, "method_not_allowed"),
    ],
)
async def test_unclear_framing_ends_the_connection(
    site: Site, start: bytes, status: int, error: str
) -> None:
    client = await site.connect()
    client.say(start + b"GET /echo HTTP/1.1\r\n\r\n")
    found, body = await client.response()
    assert (found, code(body)) == (status, error)
    assert await client.end() == b""
    assert not site.has_begun.is_set()


async def test_trailers_are_no_headers(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /late HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
    client.say(b"x-request-id: trailer\r\n\r\n")
    client.say(b"GET /echo HTTP/1.1\r\nx-request-id: header\r\n\r\n")
    await site.read_all()
    site.go.set()
    for name in (None, "header"):
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
        assert b"trailer" not in head
        assert name is None or b"x-request-id: header\r\n" in head
        if name is None:
            await client.reader.readexactly(len(b"late"))


@pytest.mark.parametrize("path", [b"/late", b"/stream", b"/echo"])
async def test_half_closed_client_is_answered(site: Site, path: bytes) -> None:
    client = await site.connect()
    client.say(b"POST %b HTTP/1.1\r\ncontent-length: 2\r\n\r\nbb" % path)
    client.writer.write_eof()
    await asyncio.wait_for(site.has_begun.wait(), DEADLINE_S)
    site.go.set()
    answer = await client.end()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith({b"/late": b"late", b"/echo": b"bb"}.get(path, b"1\r\nc\r\n0\r\n\r\n"))


async def test_half_closed_client_is_answered_all_it_asked(site: Site) -> None:
    client = await site.connect()
    for number in range(3):
        client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 1\r\n\r\n%d" % number)
    client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 9\r\n\r\nnot all")
    client.writer.write_eof()
    for number in range(3):
        assert await client.response() == (200, b"%d" % number)
    assert await client.end() == b""


async def test_half_closed_client_in_a_stream_is_told_the_rest(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /steps HTTP/1.1\r\n\r\n")
    await asyncio.wait_for(client.reader.readuntil(b"1\r\na\r\n"), DEADLINE_S)
    client.writer.write_eof()
    async with asyncio.timeout(DEADLINE_S):
        assert await client.reader.readexactly(1) == b"0", "a digit of the next chunk's size"
    site.go.set()
    assert await client.end() == b"1\r\nb\r\n0\r\n\r\n"


@pytest.mark.parametrize("path", [b"/late", b"/wait"])
async def test_client_that_closes_is_given_up(site: Site, path: bytes) -> None:
    client = await site.connect()
    client.say(b"GET %b HTTP/1.1\r\n\r\n" % path)
    await asyncio.wait_for(site.has_begun.wait(), DEADLINE_S)
    client.writer.close()
    await site.is_left()


async def test_half_closed_client_that_closes_later_is_given_up(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /late HTTP/1.1\r\n\r\n")
    client.writer.write_eof()
    async with asyncio.timeout(DEADLINE_S):
        assert await client.reader.readexactly(1) == b"H"
    client.writer.close()
    await site.is_left()


async def test_incomplete_request_is_dropped_at_the_end(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 9\r\n\r\nnot all")
    client.writer.write_eof()
    assert await client.end() == b""
    await site.is_left()


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (b"x-request-id: a-1:b\r\n", b"a-1:b"),
        (b"x-request-id: " + b"x" * 128 + b"\r\n", b"x" * 128),
        *((b, None) for b in (b"", b"x-request-id: \r\n", b"x-request-id: a b\r\n")),
        (b'x-request-id: a"b\r\n', None),
        (b"x-request-id: " + b"x" * 129 + b"\r\n", None),
    ],
)
async def test_answer_has_a_request_id(site: Site, sent: bytes, told: bytes | None) -> None:
    client = await site.connect()
    found = []
    for _ in range(2):
        client.say(b"GET /refuse HTTP/1.1\r\n" + sent + b"\r\n")
        answer = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\nno"), DEADLINE_S)
        found += [line for line in answer.split(b"\r\n") if line.startswith(b"x-request-id: ")]
    if told is None:
        assert len({line for line in found if len(line) > 30}) == 2
    else:
        assert found == [b"x-request-id: " + told] * 2


async def test_what_is_not_http_has_a_request_id(site: Site) -> None:
    client = await site.connect()
    client.say(b"\0\r\n\r\n")
    assert b"\r\nx-request-id: " in await client.end()
