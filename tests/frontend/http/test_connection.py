"""What a client may not do to a connection, over real sockets, served by uvicorn."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from connection_site import (
    DEADLINE_S,
    LARGE,
    PATIENCE_S,
    READER_PATIENCE_S,
    Site,
    code,
)

from headrace.frontend.http import connection as module
from headrace.frontend.http.connection import MAX_HEAD_BYTES, MIN_BYTES_PER_S


@pytest_asyncio.fixture
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    made = Site(**getattr(request, "param", {}))
    running = asyncio.create_task(made.run())
    yield made
    await made.stop(running)


async def test_requests_are_served_one_after_the_other(site: Site) -> None:
    client = await site.connect()
    for body in (b"one", b"", b"three"):
        client.say(b"POST /echo HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert await client.response() == (200, body)


async def test_failing_request_ends_its_connection_alone(site: Site) -> None:
    failures: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, failed: failures.append(failed["exception"]))
    failing, other = await site.connect(), await site.connect()
    failing.say(b"GET /fail HTTP/1.1\r\n\r\n")
    other.say(b"GET /refuse HTTP/1.1\r\n\r\n")
    assert await failing.end() == b""
    assert (await other.response())[0] == 429
    assert [str(error) for error in failures] == ["unexpected"]


async def test_a_connection_on_which_nothing_comes_is_closed(site: Site) -> None:
    client = await site.connect()
    await site.be_impatient()
    assert await client.end() == b""


@pytest.mark.parametrize(
    "start", [b"GET /echo HT", b"POST /echo HTTP/1.1\r\ncontent-length: 90\r\n\r\nonly this"]
)
async def test_a_request_that_does_not_come_is_answered(site: Site, start: bytes) -> None:
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


@pytest.mark.parametrize("part", ["head", "trailer"])
async def test_fields_too_long_in_one_read_are_refused(site: Site, part: str) -> None:
    client = await site.connect()
    fields = b"a: " + b"x" * 30_000 + b"\r\n" + b"b: c\r\n" * 10_000 + b"\r\n"
    head = b"POST /echo HTTP/1.1\r\ntransfer-encoding: chunked\r\n"
    connection = await site.connection()
    connection.data_received(
        head + (b"\r\n2\r\nok\r\n0\r\n" if part == "trailer" else b"") + fields
    )
    status, body = await client.response()
    assert (status, code(body)) == (431, "head_too_large")
    assert f"the request's {part} is longer than 65536 bytes" in body.decode()
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


async def test_data_that_is_not_http_is_answered(site: Site) -> None:
    client = await site.connect()
    client.say(b"\x16\x03\x01 not HTTP\r\n\r\n")
    status, body = await client.response()
    assert (status, code(body)) == (400, "invalid_http")


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


async def test_handler_receives_a_disconnect(site: Site) -> None:
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


async def test_draining_server_responds_and_closes_connections(site: Site) -> None:
    client = await site.connect()
    site.is_leaving = True
    client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 2\r\n\r\nok")
    answer = await client.end()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close\r\n" in answer
    assert answer.endswith(b"ok")


async def test_client_that_expects_100_continue_receives_it(site: Site) -> None:
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


async def test_slow_reader_is_reported_when_it_reads(site: Site) -> None:
    client = await site.connect()
    client.say(b"POST /flood HTTP/1.0\r\ncontent-length: 0\r\n\r\n")
    answer = await client.end()
    assert b"transfer-encoding" not in answer[:1000]
    assert answer.endswith(bytes(1 << 16))


async def test_http_1_0_response_ends_with_the_connection(site: Site) -> None:
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
    site.go.set()
    for _ in range(11):  # that which is served, and those that wait
        assert await client.response() == (200, b"late")
    status, body = await client.response()
    assert (status, code(body)) == (429, "rate_limit_exceeded")
    assert "10 requests wait on this connection" in body.decode()
    assert await client.end() == b""


async def test_handler_may_cut_a_response(site: Site) -> None:
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
async def test_client_that_reads_nothing_gets_no_more_responses(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /large HTTP/1.1\r\n\r\n" * 100)
    await site.is_left()
    assert 1 <= site.num_large < 20


async def test_client_that_reads_late_gets_every_response(site: Site) -> None:
    client = await site.connect()
    client.say(b"GET /large HTTP/1.1\r\n\r\n" * 20)
    for _ in range(20):
        assert await client.response() == (200, bytes(LARGE))
    client.say(b"POST /echo HTTP/1.1\r\ncontent-length: 2\r\n\r\nok")
    assert await client.response() == (200, b"ok")
