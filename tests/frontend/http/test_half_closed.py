"""Clients that say no more are answered; those that have gone are given up."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from connection_site import DEADLINE_S, Site


@pytest_asyncio.fixture
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    made = Site(**getattr(request, "param", {}))
    running = asyncio.create_task(made.run())
    yield made
    await made.stop(running)


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


async def test_half_closed_client_in_a_stream_receives_the_rest(site: Site) -> None:
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
